"""``python -m ci summary``: the table of a release and its change since another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from ci import __main__ as cli
from ci import audit, index, matrix
from ci.report import slots, summary
from ci.report.slots import Slot
from ci.report.summary import Earlier
from ci.wheelfile.facts import DeviceFacts, ModuleFacts, WheelFacts

LINUX, ARM = (Slot("mlx-cuda", f"Linux {machine}", "cp310-abi3") for machine in ("x86_64", "aarch64"))
TAG = "cp310-abi3-manylinux_2_28_x86_64"
NAME = f"mlx_cuda-1.2-{TAG}.whl"
MIB = 2**20


def wheel(size: int = MIB, tag: str = TAG, modules: tuple[ModuleFacts, ...] = (), device: int = 0) -> WheelFacts:
    return WheelFacts(f"mlx_cuda-1.2-{tag}.whl", "mlx-cuda", "1.2", (tag,), size, DeviceFacts("", device, (), (), ()), modules)


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        (NAME, LINUX),
        ("mlx_cuda-1-cp310-abi3-manylinux_2_34_x86_64.whl", LINUX),
        ("mlx_cuda-1-cp310-abi3-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl", ARM),
        ("mlx_cuda-1-cp315-abi3t-win_amd64.whl", Slot("mlx-cuda", "Windows amd64", "cp315-abi3t")),
        ("mlx_cuda-0.30.0-py3-none-manylinux_2_35_x86_64.whl", None),  # the former owner's
        ("mlx_cuda-1-cp310-abi3-macosx_14_0_arm64.whl", None),
        ("mlx_cuda-1.tar.gz", None),
    ],
)
def test_slot(name: str, slot: Slot | None) -> None:
    found = slots.of(name)
    assert (found if found in slots.declared() else None) == slot


def test_the_table_without_an_earlier_release() -> None:
    module = ModuleFacts("mlx_cuda/_cu12.abi3.so", MIB // 2, (), (), None, None)
    text = summary.table([wheel(modules=(module,), device=MIB // 4)], None)
    share = f"{1 / matrix.load().size_budget_mib:.0%}"
    assert text.startswith("### mlx-cuda 1.2\n")
    assert cells(text)[2] == ["Linux x86_64", f"`{TAG}`", "1.00", "new", "`_cu12` 0.50, `device` 0.25", share]
    assert "no earlier release" in text
    assert len({len(row) for row in cells(text)}) == 1


def test_the_change() -> None:
    arm = wheel(tag="cp310-abi3-manylinux_2_28_aarch64")
    text = summary.table([wheel(), arm], Earlier("1.1", {LINUX: MIB // 2, ARM: MIB}))
    rows = cells(text)
    assert [row[3] for row in rows] == ["since 1.1", "---:", "+512.0 KiB (+100.0%)", "same", "+512.0 KiB (+33.3%)"]
    assert "no earlier release" not in text


def test_sums_of_unlike_releases_are_not_compared() -> None:
    rows = cells(summary.table([wheel()], Earlier("1.1", {LINUX: MIB, ARM: MIB})))
    assert [row[3] for row in rows[2:]] == ["same", ""]


def test_a_smaller_one() -> None:
    assert summary.change(MIB - 1024, MIB) == "-1.0 KiB (-0.1%)"


def test_a_folder_of_earlier_wheels(tmp_path: Path) -> None:
    assert summary.in_folder(tmp_path) is None
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / NAME).write_bytes(b"12345")
    (tmp_path / "mlx_cuda-1.tar.gz").write_bytes(b"1")
    assert summary.in_folder(tmp_path) == Earlier(tmp_path.name, {LINUX: 5})


def test_the_last_release_is_the_newest_before_this_one() -> None:
    names = ["mlx_cuda-0.30.0-py3-none-manylinux_2_35_x86_64.whl", *(f"mlx_cuda-{version}-{TAG}.whl" for version in ("1.2", "1.10", "1.9"))]
    found = summary.releases((name, size) for size, name in enumerate(names))
    assert set(found) == {Version("1.2"), Version("1.9"), Version("1.10")}
    assert summary.last(found, "1.10") == Earlier("1.9", {LINUX: 3})
    assert summary.last(found, "2") == Earlier("1.10", {LINUX: 2})
    assert summary.last(found, "1.2") is None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command on one wheel, with an index that has 1.1 and another project's 0.30.0."""

    def files(self: index.Index, project: str) -> tuple[index.Remote, ...]:
        assert project == "mlx-cuda"
        names = [f"mlx_cuda-1.1-{TAG}.whl", "mlx_cuda-0.30.0-py3-none-manylinux_2_35_x86_64.whl"]
        return tuple(index.Remote(name, None, "", MIB // 2) for name in names)

    monkeypatch.setattr(index.Index, "files", files)
    monkeypatch.setattr(audit, "describe", lambda _: wheel())
    return lambda *options: cli.main(["summary", NAME, *options])


@pytest.mark.parametrize("against", ["newest", "1.1"])
def test_against_the_index(run: Callable[..., int], tmp_path: Path, against: str) -> None:
    output = tmp_path / "summary.md"
    assert run("--against", against, "--output", str(output)) == 0
    assert "| since 1.1 |" in output.read_text("utf-8")
    assert "+512.0 KiB" in output.read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--against", "0.30.0"], "mlx-cuda 0.30.0 is not on the index"),
        (["--against", "no/such/folder"], "neither a folder nor a version"),
        (["--output", "no/such/folder/file"], "cannot write"),
    ],
)
def test_what_cannot_be_done(run: Callable[..., int], capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert run(*options) == 2
    assert said in capsys.readouterr().err
