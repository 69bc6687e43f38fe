"""``tune``: its file and its command, and what it does without a GPU."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import mlx_cuda
import pytest
from mlx_cuda.__main__ import main
from mlx_cuda._common.limits import PLAIN, Attention, limits, put
from mlx_cuda._loader import limits_file, tuned_file
from mlx_cuda._loader import native as _native
from mlx_cuda._loader.tuned_file import Tuned
from mlx_cuda._tuning import command

FAST, SLOW = Tuned("0f" * 64, 10.0, 12.5), Tuned("a0" * 64, 7.0, 7.0)


class Module:
    """What ``tune`` uses of a native module."""

    def __init__(self) -> None:
        self.on = self.forgotten = False
        self.known: dict[str, tuple[str, float, float]] = {}

    def tuning(self, enabled: bool) -> None:
        self.on = enabled

    def tuned(self) -> list[tuple[str, str, float, float]]:
        return [(key, *rest) for key, rest in self.known.items()]

    def set_tuned(self, tuned: list[tuple[str, str, float, float]]) -> None:
        self.known = {key: (algorithm, time, first) for key, algorithm, time, first in tuned}

    def forget_calls(self) -> None:
        self.forgotten = True

    def find(self, key: str, matmul: Tuned) -> None:
        self.known[key] = (matmul.algorithm, matmul.microseconds, matmul.first_microseconds)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    module = Module()
    monkeypatch.setattr(_native, "loaded", module)
    monkeypatch.setattr(_native, "load", lambda: module)
    monkeypatch.setattr("mlx.core.cuda.is_available", lambda: True)
    yield module
    mlx_cuda.tune(False)


def test_finds_are_written_at_the_end_and_read_by_the_next(module: Module, tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuned.json"
    with mlx_cuda.tune(path=path) as tuning:
        assert module.on
        module.find("a", FAST)
        assert tuning.matmuls == {"a": FAST}
        assert not path.exists()
    assert not module.on
    assert tuned_file.read(path) == {"a": FAST}
    module.known = {}
    with mlx_cuda.tune(path=path) as tuning:
        assert tuning.matmuls == {"a": FAST}
        module.find("b", SLOW)
    assert tuned_file.read(path) == {"a": FAST, "b": SLOW}
    assert [each.name for each in path.parent.iterdir()] == ["tuned.json"]


@pytest.mark.usefixtures("module")
def test_former_names(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"mlx_cuda_tuned": 1, "products": {"a": vars(FAST)}}))
    with mlx_cuda.tune(path=path) as tuning, pytest.warns(DeprecationWarning, match="matmuls"):
        assert attrgetter("products")(tuning) == {"a": FAST}
    tuned_file.add(path, {"b": SLOW})
    assert json.loads(path.read_text())["matmuls"] == {"a": vars(FAST), "b": vars(SLOW)}
    with pytest.raises(AttributeError, match="'Tuning' object has no attribute 'others'"):
        _ = tuning.others


def test_another_process_has_written_in_between(module: Module, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    with mlx_cuda.tune(path=path):
        tuned_file.add(path, {"theirs": SLOW})
        module.find("ours", FAST)
    assert tuned_file.read(path) == {"ours": FAST, "theirs": SLOW}


def test_calls_without_with(module: Module, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    mlx_cuda.tune(path=path)
    with mlx_cuda.tune(path=tmp_path / "other.json"):
        pass
    assert module.on
    module.find("a", FAST)
    mlx_cuda.tune(False).stop()
    assert not module.on
    assert tuned_file.read(path) == {"a": FAST}


def test_an_error_inside_ends_it_too(module: Module, tmp_path: Path) -> None:
    with pytest.raises(KeyError), mlx_cuda.tune(path=tmp_path / "tuned.json"):
        raise KeyError
    assert not module.on


def test_nothing_found_nothing_written(module: Module, tmp_path: Path) -> None:
    with mlx_cuda.tune(path=tmp_path / "tuned.json"):
        assert module.on
    assert list(tmp_path.iterdir()) == []


def test_without_a_native_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "loaded", None)
    with mlx_cuda.tune(path=tmp_path / "tuned.json") as tuning:
        assert tuning.matmuls == {}
    assert list(tmp_path.iterdir()) == []


TEXTS = {
    "no JSON": "{",
    "no object": "[]",
    "another program's": '{"format": 1}',
    "a later format": '{"mlx_cuda_tuned": 2, "matmuls": {}}',
    "no matmuls": '{"mlx_cuda_tuned": 1}',
    "half an algorithm": json.dumps({"mlx_cuda_tuned": 1, "matmuls": {"a": {**vars(FAST), "algorithm": "0f"}}}),
    "no hexadecimals": json.dumps({"mlx_cuda_tuned": 1, "matmuls": {"a": {**vars(FAST), "algorithm": "0g" * 64}}}),
    "upper case": json.dumps({"mlx_cuda_tuned": 1, "matmuls": {"a": {**vars(FAST), "algorithm": "0F" * 64}}}),
    "no time": json.dumps({"mlx_cuda_tuned": 1, "matmuls": {"a": {"algorithm": "0f" * 64}}}),
    "a number as matmul": json.dumps({"mlx_cuda_tuned": 1, "matmuls": {"a": 1}}),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_file_of_something_else_is_left_alone(text: str, module: Module, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"leaves .*tuned\.json alone.* Delete it, or name another file with MLX_CUDA_TUNED\."):
        tuning = mlx_cuda.tune(path=path)
    assert tuning.matmuls == {}
    module.find("a", FAST)
    with pytest.warns(RuntimeWarning, match="leaves"):
        tuning.stop()
    assert path.read_text() == text


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(RuntimeWarning, match="leaves"):
        assert tuned_file.read(path) is None


def test_a_folder_that_cannot_be_made(module: Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    module.find("a", FAST)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mlx_cuda.tune(path=tmp_path / "file" / "tuned.json"):
            pass
    assert caught
    assert all("MLX_CUDA_TUNED" in str(each.message) for each in caught)


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_CUDA_TUNED", str(tmp_path / "mine.json"))
    assert tuned_file.default_path() == tmp_path / "mine.json"
    monkeypatch.setenv("MLX_CUDA_TUNED", "")
    assert tuned_file.default_path() is None
    monkeypatch.delenv("MLX_CUDA_TUNED")
    monkeypatch.setenv("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", str(tmp_path))
    assert tuned_file.default_path() == tmp_path / "mlx-cuda" / "tuned.json"


@pytest.mark.usefixtures("_no_home")
def test_without_a_home_nothing_is_kept(module: Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MLX_CUDA_TUNED", raising=False)
    assert tuned_file.default_path() is None
    assert limits_file.default_path() is None
    assert main(["tune", "--show"]) == 0
    assert capsys.readouterr().out == "no tuned matmul algorithms\nno tuned thresholds\n"
    with mlx_cuda.tune():
        module.find("a", FAST)


@pytest.mark.usefixtures("_no_home")
def test_without_a_home_the_native_module_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_CUDA_TUNED", raising=False)
    loaded: Any = Module()
    replaced = {"gpu_name": lambda: "NVIDIA H200", "gpu_versions": lambda _: {}, "capability": lambda _: (9, 0), "_load": lambda *_: loaded}
    for name, value in {**replaced, "_outcome": None, "loaded": None}.items():
        monkeypatch.setattr(_native, name, value)
    assert _native.load() is loaded
    put((9, 0), None)


@pytest.mark.parametrize("content", [{"a": 1}, {"a": {1, 2}}], ids=["cannot replace", "no JSON"])
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "tuned.json"
    path.mkdir()  # which no file can replace
    if content == {"a": 1}:
        with pytest.warns(RuntimeWarning, match=r"cannot keep it: .*Name a file that can be written with MLX_CUDA_TUNED\."):
            assert not tuned_file.write(path, content, "it")
    else:
        with pytest.raises(TypeError):
            tuned_file.write(path, content, "it")
    assert list(tmp_path.iterdir()) == [path]


def test_loading_the_native_module_reads_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module: Any = Module()
    versions = limits_file.versions("13.0", "0.32.4")
    tuned_file.add(tmp_path / "tuned.json", {"a": FAST})
    limits_file.keep(tmp_path / "tuned-limits.json", "RTX", versions, PLAIN._replace(attention=Attention(growing=17)))
    monkeypatch.setenv("MLX_CUDA_TUNED", str(tmp_path / "tuned.json"))
    found = {"gpu_name": lambda: "RTX", "gpu_versions": lambda _: versions, "capability": lambda _: (8, 9)}
    for name, value in {**found, "_load": lambda *_: module, "_outcome": None, "loaded": None}.items():
        monkeypatch.setattr(_native, name, value)
    loaded: Any = _native.load()
    assert loaded is module
    assert tuned_file.found(loaded) == {"a": FAST}
    assert limits((8, 9)).attention.growing == 17
    module.forgotten = False
    put((8, 9), None)
    assert module.forgotten


def test_the_command_shows_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.json"
    assert main(["tune", "--show", "--file", str(path)]) == 0
    assert capsys.readouterr().out == "no tuned matmul algorithms\nno tuned thresholds\n"
    tuned_file.add(path, {"b": SLOW, "a": FAST})
    monkeypatch.setenv("MLX_CUDA_TUNED", str(path))
    assert main(["tune", "--show"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["      12.5 us ->       10.0 us  a", "       7.0 us ->        7.0 us  b"]


def test_the_command_needs_a_gpu_for_sizes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx.core.cuda.is_available", lambda: False)
    assert main(["tune", "16x16x16"]) == 1
    assert capsys.readouterr().out == "MLX offers no CUDA GPU here\n"


@pytest.mark.parametrize("text", ["8x8", "0x8x8", "8x8x8x8", "8,8,8", "-1x8x8"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--dtype", "float16", "--", text])


def test_sizes() -> None:
    assert command.sizes("8192x16384x4096") == (8192, 16384, 4096)
