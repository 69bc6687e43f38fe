from __future__ import annotations

from pathlib import Path

import pytest
from mlx_cuda._loader.table import Bounds, dll_directories, library_paths, load, version

SITE = Path("/site-packages")
USER = Path("/home/user/site-packages")


def test_windows_directories_of_cuda_12() -> None:
    cuda = load().cuda[12]
    roots = dict.fromkeys((library.provider for library in cuda.libraries), SITE)
    expected = ["nvidia/cuda_runtime/bin", "nvidia/cublas/bin", "nvidia/cudnn/bin", "mlx"]
    assert dll_directories(cuda, roots) == tuple(SITE / directory for directory in expected)


def test_windows_directories_of_cuda_13_are_named_once() -> None:
    cuda = load().cuda[13]
    roots = dict.fromkeys((library.provider for library in cuda.libraries), SITE)
    assert dll_directories(cuda, roots) == (SITE / "nvidia/cu13/bin/x86_64", SITE / "nvidia/cudnn/bin", SITE / "mlx")


def test_directories_follow_their_packages() -> None:
    roots = {"nvidia-cuda-runtime": SITE, "nvidia-cublas": USER, "nvidia-cudnn-cu13": SITE}
    assert dll_directories(load().cuda[13], roots) == (
        SITE / "nvidia/cu13/bin/x86_64",
        USER / "nvidia/cu13/bin/x86_64",
        SITE / "nvidia/cudnn/bin",
    )


def test_paths_on_linux_leave_out_what_is_not_installed_or_not_needed() -> None:
    assert library_paths(load().cuda[12], "linux", {"nvidia-cudnn-cu12": USER, "nvidia-cuda-nvrtc-cu12": USER}) == {
        "libcudnn": USER / "nvidia/cudnn/lib/libcudnn.so.9"
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [("9.28.0.42", (9, 28, 0, 42)), ("0.32.4.dev1", (0, 32, 4)), ("2.36", (2, 36)), ("1.2+cu13", (1, 2)), ("", ())],
)
def test_version(text: str, expected: tuple[int, ...]) -> None:
    assert version(text) == expected


def test_bounds() -> None:
    bounds = Bounds(minimum="9.19", below="10")
    assert "9.19.0.56" in bounds
    assert "9.9.0" not in bounds
    assert "10.0" not in bounds
    assert str(bounds) == ">=9.19,<10"
    assert "0.32.4" in Bounds(exactly="0.32.4")
    assert "0.32.4.1" not in Bounds(exactly="0.32.4")
    assert str(Bounds(exactly="0.32.4")) == "==0.32.4"
