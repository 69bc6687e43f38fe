"""What is different from another set of wheels."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.device.packed import pack
from ci.report import page
from ci.report.model import make
from ci.report.page import render
from ci.wheelfile.wheel import DEVICE

from ..audit_support import (
    DEVICE_CODE,
    Files,
    World,
    fatbin,
    with_module,
)


def test_what_changed(wheel: Callable[..., Path], world: World) -> None:
    old = with_module(world, without=["libcudnn"])
    less = {f"{DEVICE}decode.fatbin.lzma": pack(fatbin([80, "90a"], []))}
    before = wheel(
        old,
        lambda files: files.update(less),
        lambda files: files.update({"mlx_cuda/old.py": b"x" * 7, "mlx_cuda/py.typed": b"ab"}),
        folder="old",
    )
    after = wheel(lambda files: files.update({"mlx_cuda/new.py": b"x" * 5}))
    changes = make([after], against=[before]).changes
    assert changes is not None
    (change,) = changes.pairs
    members = {each.name: (each.before, each.after, each.delta) for each in change.members}
    assert members["mlx_cuda/old.py"] == (7, None, -7)
    assert members["mlx_cuda/new.py"] == (None, 5, 5)
    assert members["mlx_cuda/py.typed"] == (2, 0, -2)
    assert "mlx_cuda/_cu12.abi3.so" not in members
    parts_changed = {each.name: each.delta for each in change.parts}
    assert all(parts_changed[f"device code: {each}"] > 0 for each in ("sm_100", "sm_120", "compute_80"))
    packed = [len(DEVICE_CODE[f"{DEVICE}decode.fatbin.lzma"]), len(less[f"{DEVICE}decode.fatbin.lzma"])]
    assert members["mlx_cuda/device/decode.fatbin.lzma"][2] == packed[0] - packed[1]
    assert set(change.added) == {"_cu13.abi3.so needs libcudnn.so.9"}
    assert change.removed == []
    assert change.download.delta == after.stat().st_size - before.stat().st_size
    html = render(make([after], against=[before]))
    assert "_cu13.abi3.so needs libcudnn.so.9" in html
    assert "Change against 0.32.4.1" in html


def test_another_version_is_compared_by_platform(
    wheel: Callable[..., Path], files: Files, windows_wheel: Callable[..., Path], tmp_path: Path
) -> None:
    renamed = {name.replace("0.32.4.1", "0.32.4.0"): data.replace(b"0.32.4.1", b"0.32.4.0") for name, data in files.items()}
    before = tmp_path / "mlx_cuda-0.32.4.0-cp310-abi3-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(before, "w") as archive:
        for name, data in renamed.items():
            archive.writestr(name, data)
    windows = windows_wheel()
    changes = make([windows, wheel()], against=[before]).changes
    assert changes is not None
    assert [pair.before.facts.version for pair in changes.pairs] == ["0.32.4.0"]
    assert [each.name for each in changes.pairs[0].members] == [f".dist-info/{name}" for name in ("RECORD",)] or not changes.pairs[
        0
    ].members
    assert "tagged cp310-abi3-manylinux_2_28_x86_64" in changes.pairs[0].added
    assert [each.slot.platform for each in changes.added] == ["Windows amd64"]
    assert changes.removed == ()
    back = make([windows], against=[before]).changes
    assert back is not None
    assert [each.slot.platform for each in back.removed] == ["Linux x86_64"]


def test_no_change(wheel: Callable[..., Path]) -> None:
    report = make([wheel()], against=[wheel(folder="old")])
    assert report.changes is not None
    assert report.changes.pairs[0].same_bytes
    assert "same bytes" in render(report)


@pytest.mark.parametrize(("percent", "shown"), [(12.34, "+12.3 %"), (-5.0, "−5.0 %"), (999.0, "+999.0 %"), (1900.0, "× 20")])  # noqa: RUF001
def test_ratios(percent: float, shown: str) -> None:
    assert page.ratio(percent) == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (15 * 2**20, "15.0 MiB"), (500 * 2**20, "500 MiB")]
)
def test_sizes(number: int, shown: str) -> None:
    assert page.size(number) == shown


@pytest.mark.parametrize(("part", "whole", "shown"), [(1, 3, "33.33%"), (5, 5, "100.00%"), (0, 0, "0.00%")])
def test_shares(part: float, whole: float, shown: str) -> None:
    assert page.percent(part, whole) == shown
