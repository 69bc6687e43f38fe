"""Which files of NVIDIA's libraries are loaded, and what they were taken for."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_cuda._loader import loaded
from mlx_cuda._loader.loaded import Loaded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="loads a Linux library")


def library() -> Path:
    """Some library, to stand for one of NVIDIA's under another name."""
    return Path(next(path for path in loaded.mapped() if Path(path).name.startswith("libm.so")))


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(library(), path))


def test_what_this_process_has_loaded() -> None:
    assert math.isfinite(ctypes.CDLL(str(library())).cos(0))
    assert sys.executable not in loaded.mapped()
    assert len(loaded.mapped()) == len(set(loaded.mapped()))


@pytest.mark.parametrize(("name", "stem"), [
    ("libcudnn.so.9", "libcudnn"), ("libcudnn_graph.so.9.19.0", "libcudnn_graph"), ("libcublasLt.so.13", "libcublasLt"),
    ("libnvrtc-builtins.so.13.0", "libnvrtc-builtins"), ("cudnn64_9.dll", "cudnn"), ("cudnn_graph64_9.dll", "cudnn_graph"),
    ("nvrtc64_130_0.dll", "nvrtc"), ("cublasLt64_13.dll", "cublasLt"), ("libcublas.so.13", None), ("libcudart.so.13", None),
])  # fmt: skip
def test_names(name: str, stem: str | None) -> None:
    found = loaded.OURS.match(name)
    assert (found and found[0]) == stem


def test_a_library_of_the_search_path_comes_before_the_package(tmp_path: Path) -> None:
    site, system = tmp_path / "site", tmp_path / "system"
    own = put(site / "nvidia/cudnn/lib/libcudnn_adv.so.9")
    other = put(system / "libcudnn_adv.so.9.1.0")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "libcudnn_adv.so.9").symlink_to(other)
    keep = ctypes.CDLL(str(other))
    variables = {"LD_LIBRARY_PATH": f":{tmp_path / 'none'}:{tmp_path / 'links'}"}
    wanted = Loaded(str(other), "", str(own), f"take {tmp_path / 'links'} out of LD_LIBRARY_PATH")
    assert [each for each in loaded.libraries([site], variables) if each.name == other.name] == [wanted]
    assert loaded.shadows([site], variables) == [str(tmp_path / "links" / "libcudnn_adv.so.9")]
    (preloaded,) = (each for each in loaded.libraries([site], {"LD_PRELOAD": f"x {other}"}) if each.name == other.name)
    assert preloaded.fix == f"take {other} out of LD_PRELOAD"
    (plain,) = (each for each in loaded.libraries([site], {}) if each.name == other.name)
    assert plain.fix == f"find out why the loader searches {system} first"
    (alone,) = (each for each in loaded.libraries([tmp_path / "nowhere"], variables) if each.name == other.name)
    assert (alone.instead_of, alone.fix) == ("", "")  # a system's is right where no package has one
    assert keep


def test_the_package_s_own_library(tmp_path: Path) -> None:
    """By its file, whatever links lead there; one of another CUDA major beside it is no other choice."""
    site = tmp_path / "site"
    own = put(tmp_path / "store" / "libnvrtc-test.so.13")
    for name, target in (("cu13/lib/libnvrtc-test.so.13", own), ("cuda_nvrtc/lib/libnvrtc-test.so.12", library())):
        path = site / "nvidia" / name
        path.parent.mkdir(parents=True)
        path.symlink_to(target)
    keep = ctypes.CDLL(str(site / "nvidia/cu13/lib/libnvrtc-test.so.13"))
    (found,) = (each for each in loaded.libraries([site], {}) if each.name == own.name)
    assert found == Loaded(str(own))
    assert keep
    assert loaded.shadows([site], {"LD_LIBRARY_PATH": os.fspath(site / "nvidia/cu13/lib")}) == []


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        def __init__(self, *values: int) -> None:
            self.values = values

        def __call__(self, *places: object) -> int:
            for place, value in zip(places, self.values, strict=False):
                vars(place)["_obj"].value = value
            return 0 if places else self.values[0]

    class Nvrtc:
        def nvrtcVersion(self, major: object, minor: object) -> int:  # noqa: N802
            vars_of = (major, minor)
            for place, value in zip(vars_of, (13, 1), strict=True):
                place._obj.value = value  # type: ignore[attr-defined]
            return 0

    found: dict[str, object] = {
        "cudnn": SimpleNamespace(cudnnGetVersion=Function(91900)),
        "cublasLt": SimpleNamespace(cublasLtGetVersion=Function(130102)),
        "nvrtc": Nvrtc(),
        "other": SimpleNamespace(),
    }
    monkeypatch.setattr(ctypes, "CDLL", found.__getitem__)
    assert [loaded.version_of(name) for name in found] == ["9.19.0", "13.1.2", "13.1", ""]


@pytest.mark.parametrize(("status", "said"), [(0, ""), (1, "cuDNN 9.19.0 loads parts of another version"), (None, "")])
def test_parts_of_another_cudnn(monkeypatch: pytest.MonkeyPatch, status: int | None, said: str) -> None:
    functions = {} if status is None else {"cudnnGraphVersionCheck": lambda: status}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**functions))
    libraries = [Loaded("/a/libcudnn_graph.so.9", "9.28.0"), Loaded("/a/libcudnn.so.9", "9.19.0")]
    assert loaded.mixed_cudnn(libraries) == said
    assert loaded.mixed_cudnn(libraries[:1]) == ""
