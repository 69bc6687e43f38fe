"""``python -m ci resources``: what kernels ask of a multiprocessor, by the headers of their cubins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci.__main__ import main
from ci.device import compilers, store
from ci.errors import EnvironmentProblem
from ci.maintain import resources
from ci.matrix import REPOSITORY, load

from .device_support import installed_tools

DOCUMENT = REPOSITORY / "docs" / "results" / "gpus.md"
SOURCE = """
extern "C" __global__ void __launch_bounds__(96, 5) few(float* out) {
  __shared__ float own[40];
  own[threadIdx.x % 40] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = own[(threadIdx.x + 1) % 40];
}
extern "C" __global__ void array(int* out, int at) {
  int values[32];
  for (int i = 0; i < 32; ++i) {
    values[(i * at) % 32] = out[i];
  }
  out[at] = values[out[at] % 32];
}
"""
KERNEL = resources.Kernel("a", "120", "k", registers=80, threads=384, shared=1024, frame=0, blocks=2)


@pytest.fixture(scope="module")
def kernels() -> list[resources.Kernel]:
    try:
        return resources.all_kernels()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize("architecture", ["75", "90a", "120"])
def test_what_a_kernel_asks_for_is_read_off_its_cubin(tmp_path: Path, architecture: str) -> None:
    using = installed_tools()
    source = tmp_path / "some.cu"
    source.write_text(SOURCE, "utf-8")
    ptx = compilers.compile_ptx(using, source, architecture, tmp_path, [])
    cubin = compilers.assemble(using, ptx, architecture, source.name)
    few, array = sorted(resources.kernels("some", architecture, cubin, ptx.decode()), key=lambda each: each.name, reverse=True)
    systems = 0 if architecture == "75" else resources.SYSTEMS
    assert few == resources.Kernel("some", architecture, "few", few.registers, 96, 160 + systems, 0, 5)
    assert 0 < few.registers <= resources.MOST_REGISTERS
    assert (array.threads, array.blocks, array.shared) == (resources.MOST_THREADS, 1, systems if array.shared else 0)
    assert array.frame == 128


@pytest.mark.parametrize(("change", "problem"), [
    ({}, ""),
    ({"registers": 86}, "67584 registers of 65536 for 2 blocks"),  # warps have multiples of 256
    ({"registers": 300}, "300 registers a thread"),
    ({"registers": 32, "threads": 1024}, "2048 threads of 1536"),
    ({"shared": 52 * 1024}, "53248 bytes of shared memory of 49152"),
    ({"shared": 49 * 1024, "blocks": 3, "registers": 32}, "150528 bytes of shared memory of 102400"),
])  # fmt: skip
def test_what_a_multiprocessor_has_not(change: dict[str, Any], problem: str) -> None:
    found = resources.violations([replace(KERNEL, **change)])
    if problem:
        assert all(any(problem in line for line in found if number in line) for number in ("on 12.0 ", "on 12.1 "))
    else:
        assert not found
    assert not any("on 9.0 " in line for line in found)


def test_kernels_ask_for_no_more_than_their_gpus_have(kernels: list[resources.Kernel]) -> None:
    assert not resources.violations(kernels)


def test_every_kind_of_machine_code_is_some_gpus() -> None:
    declared = {name for source in ("flash", "fp8", "flash_sm90", "copy") for name in load().device.declared(source).sass}
    assert {name for each in resources.capabilities() for name in each["code"]} == declared


def test_the_document_is_of_these_kernels(kernels: list[resources.Kernel]) -> None:
    text = DOCUMENT.read_text("utf-8")
    assert resources.updated(text, kernels) == text


def test_without_machine_code_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed_tools()
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    document = tmp_path / "some.md"
    document.write_text("as it was\n", "utf-8")
    assert main(["resources", "--update", str(document)]) == 2
    assert "fix: python -m ci device" in capsys.readouterr().err
    assert document.read_text("utf-8") == "as it was\n"
