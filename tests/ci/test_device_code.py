"""cmake/device_code.py: dependencies, compiling and packing, with the NVRTC of each installed toolkit root."""

from __future__ import annotations

import re
import struct
import sys
from typing import TYPE_CHECKING

import pytest

from ci import matrix
from ci.binary import fatbin

from .device_support import Compiler, compiler, device_code, write_kernels

if TYPE_CHECKING:
    from pathlib import Path

device = device_code()

needs_nvrtc = pytest.mark.skipif(sys.platform != "linux", reason="the roots of Linux are used")


@pytest.fixture(scope="module", params=matrix.load().cuda)
def cuda(request: pytest.FixtureRequest) -> Compiler:
    return compiler(request.param)


def written(folder: Path, **texts: str) -> dict[str, Path]:
    """Write files named by keyword (two underscores for a slash, one for the dot)."""
    paths = {name: folder / name.replace("__", "/").replace("_", ".") for name in texts}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[name], "utf-8")
    return paths


def test_own_headers_are_followed(tmp_path: Path) -> None:
    files = written(
        tmp_path,
        src__a_cu='#include "near.h"\n  #  include <deep/far.h>\n#include <cuda_fp16.h>\n#include "nowhere.h"\n',
        src__near_h='#pragma once\n#include "near.h"\n#include "deep/far.h"\n',
        include__deep__far_h="#include <deep/end.h>\n",
        include__deep__end_h="",
        include__deep__unused_h="",
    )
    found = device.own_headers(files["src__a_cu"], [tmp_path / "include"])
    assert set(found) == {files["src__near_h"], files["include__deep__far_h"], files["include__deep__end_h"]}
    assert len(found) == 3


def test_quotes_look_beside_the_file_first_and_brackets_do_not(tmp_path: Path) -> None:
    files = written(tmp_path, src__a_cu='#include "x.h"\n', src__b_cu="#include <x.h>\n", src__x_h="", include__x_h="")
    assert device.own_headers(files["src__a_cu"], [tmp_path / "include"]) == [files["src__x_h"]]
    assert device.own_headers(files["src__b_cu"], [tmp_path / "include"]) == [files["include__x_h"]]


def test_the_header_of_a_header_is_looked_for_beside_that_header(tmp_path: Path) -> None:
    files = written(tmp_path, src__a_cu='#include "deep/x.h"\n', src__deep__x_h='#include "y.h"\n', src__deep__y_h="", src__y_h="")
    assert device.own_headers(files["src__a_cu"], []) == [files["src__deep__x_h"], files["src__deep__y_h"]]


def test_a_computed_include_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path, src__a_cu='#include "x.h"\n', src__x_h='#define HEADER "y.h"\n#include HEADER\n')
    with pytest.raises(device.DeviceCodeError, match=r"x\.h: error: #include HEADER: a computed include hides a dependency"):
        device.own_headers(files["src__a_cu"], [])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 65])
def test_the_embedded_array_holds_the_bytes(size: int) -> None:
    data = bytes(range(255, 255 - size, -1))
    text = device.as_cpp(data, "an_array", "a.cu")
    assert "alignas(16) const std::uint64_t an_array[] = {" in text
    words = [int(word, 16) for word in re.findall(r"(0x[0-9a-f]+)u", text)]
    embedded = struct.pack(f"<{len(words)}Q", *words)
    assert embedded[:size] == data
    assert embedded[size:] == bytes(-size % 8)


def compile_(cuda: Compiler, src: Path, name: str, image: Path) -> int:
    arch = image.suffixes[-2].removeprefix(".")
    arguments = [f"--nvrtc={cuda.nvrtc}", f"--arch={arch}", f"--own-include={src}", f"--include={cuda.include}", f"--depfile={image}.d"]
    return int(device.main(["compile", *arguments, str(src / "kernels" / f"{name}.cu"), str(image)]))


def pack(cuda: Compiler, output: Path, *images: Path) -> bytes:
    arguments = [f"--nvfatbin={cuda.nvfatbin}", "--symbol=embedded", "--name=scale.cu", str(output), *map(str, images)]
    assert device.main(["pack", *arguments]) == 0
    words = [int(word, 16) for word in re.findall(r"(0x[0-9a-f]+)u", output.read_text("utf-8"))]
    return struct.pack(f"<{len(words)}Q", *words)


@needs_nvrtc
def test_a_depfile_names_the_source_and_its_headers(cuda: Compiler, tmp_path: Path) -> None:
    src = tmp_path / "with space"
    write_kernels(src, "scale")
    image = tmp_path / "scale.sm_90.cubin"
    assert compile_(cuda, src, "scale", image) == 0
    target, _, prerequisites = image.with_name(f"{image.name}.d").read_text("utf-8").rstrip("\n").partition(": ")
    assert target == str(image)
    names = [name.replace("\\ ", " ") for name in re.split(r"(?<!\\) ", prerequisites)]
    assert names == [str(src / "kernels" / "scale.cu"), str(src / "kernels" / "shared.h")]


@needs_nvrtc
def test_an_error_is_shown_with_file_and_line(cuda: Compiler, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_kernels(tmp_path, "scale")
    source, image = tmp_path / "kernels" / "scale.cu", tmp_path / "scale.sm_90.cubin"
    source.write_text(source.read_text("utf-8") + "\n__device__ int broken() { return undeclared; }\n", "utf-8")
    assert compile_(cuda, tmp_path, "scale", image) == 1
    assert f'{source}(4): error: identifier "undeclared" is undefined' in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels"]


@needs_nvrtc
def test_an_error_in_a_header_names_the_header(cuda: Compiler, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_kernels(tmp_path, "scale")
    header = tmp_path / "kernels" / "shared.h"
    header.write_text("#pragma once\n__device__ float scale(float x) { return y; }\n", "utf-8")
    assert compile_(cuda, tmp_path, "scale", tmp_path / "scale.sm_90.cubin") == 1
    assert re.search(r'kernels/shared\.h\(2\): error: identifier "y" is undefined', capfd.readouterr().err)


@needs_nvrtc
def test_a_fatbin_holds_what_was_packed(cuda: Compiler, tmp_path: Path) -> None:
    write_kernels(tmp_path, "scale")
    images = [tmp_path / name for name in ("scale.sm_80.cubin", "scale.sm_90a.cubin", "scale.compute_80.ptx")]
    for image in images:
        assert compile_(cuda, tmp_path, "scale", image) == 0
    data = pack(cuda, tmp_path / "scale.fatbin.cpp", *images)
    (found,) = fatbin.find(data)
    assert found.offset == 0
    assert found.architectures("sass") == {"80", "90a"}
    assert found.architectures("ptx") == {"80"}
    assert len(data) < sum(image.stat().st_size for image in images), "the fatbin is not compressed"


@needs_nvrtc
@pytest.mark.parametrize("version", matrix.load().cuda)
def test_what_is_declared_has_hoppers_own_instructions(tmp_path: Path, version: str) -> None:
    toolkit = compiler(version)
    write_kernels(tmp_path, "scale")
    source = tmp_path / "kernels" / "scale.cu"
    source.write_text('extern "C" __global__ void scale() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }\n', "utf-8")
    (declared,) = matrix.load().cuda[version].machine_code(["90"])
    image = tmp_path / f"scale.sm_{declared}.cubin"
    assert compile_(toolkit, tmp_path, "scale", image) == 0
    (found,) = fatbin.find(pack(toolkit, tmp_path / "scale.fatbin.cpp", image))
    assert found.architectures("sass") == {declared}
    assert compile_(toolkit, tmp_path, "scale", tmp_path / "scale.sm_90.cubin") == 1


@needs_nvrtc
def test_two_folders_give_the_same_bytes(cuda: Compiler, tmp_path: Path) -> None:
    made = []
    for folder in (tmp_path / "one", tmp_path / "another place"):
        write_kernels(folder, "scale")
        images = [folder / "scale.sm_90.cubin", folder / "scale.compute_80.ptx"]
        for image in images:
            assert compile_(cuda, folder, "scale", image) == 0
        made.append([pack(cuda, folder / "scale.fatbin.cpp", *images), *(image.read_bytes() for image in images)])
    assert made[0] == made[1]


@needs_nvrtc
def test_a_failing_packer_names_the_call(cuda: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "scale.sm_90.cubin"
    image.write_bytes(b"not machine code")
    arguments = [f"--nvfatbin={cuda.nvfatbin}", "--symbol=embedded", "--name=scale.cu", str(tmp_path / "out.cpp"), str(image)]
    assert device.main(["pack", *arguments]) == 1
    assert capsys.readouterr().err.startswith("nvFatbinAddCubin: ")
    assert not (tmp_path / "out.cpp").exists()
