"""ci.device.store: what was put is found, whole or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from ci.device import store
from ci.errors import EnvironmentProblem

KEYS = [f"{number:02x}" * 32 for number in range(8)]


def stored(kept: store.Store) -> list[Path]:
    return [path for path in kept.folder.rglob("*") if path.is_file()]


def test_what_was_put_is_found(tmp_path: Path) -> None:
    kept = store.Store(tmp_path / "a" / "b")
    assert kept.get(KEYS[0]) is None
    for data in (b"first", b"", b"second"):
        kept.put(KEYS[0], data)
        assert kept.get(KEYS[0]) == data
    assert kept.get(KEYS[1]) is None
    assert len(stored(kept)) == 1


@pytest.mark.parametrize("damage", [lambda entry: entry[:-1], lambda entry: entry[:-1] + b"!", lambda entry: entry[:5], lambda _: b""])
def test_a_damaged_entry_is_told_and_forgotten(tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture[str]) -> None:
    kept = store.Store(tmp_path)
    kept.put(KEYS[0], b"data")
    (path,) = stored(kept)
    path.write_bytes(damage(path.read_bytes()))
    assert kept.get(KEYS[0]) is None
    assert capsys.readouterr().err == f"{path} is damaged: what it held is compiled again\n"
    assert stored(kept) == []


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    kept = store.Store(tmp_path, limit=4 * (100 + 32))
    for number, key in enumerate(KEYS):
        kept.put(key, bytes(100))
        os.utime(kept._path(key), (number, number))
    kept.get(KEYS[1])
    kept.prune()
    assert [kept.get(key) is not None for key in KEYS] == [False, True, False, False, False, True, True, True]
    kept.prune()
    assert len(stored(kept)) == 4


def _put_and_get(folder: Path, data: bytes) -> bool:
    kept = store.Store(folder)
    for _ in range(100):
        kept.put(KEYS[0], data)
        if kept.get(KEYS[0]) not in {b"1" * 5000, b"2" * 7000}:
            return False
    return True


def test_two_may_write_at_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2) as pool:
        assert all(pool.map(_put_and_get, [tmp_path] * 2, [b"1" * 5000, b"2" * 7000]))
    assert len(stored(store.Store(tmp_path))) == 1


def test_an_interrupted_put_leaves_the_old_entry_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store.Store(tmp_path)
    kept.put(KEYS[0], b"old")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    for key in KEYS[:2]:
        with pytest.raises(KeyboardInterrupt):
            kept.put(key, b"new")
    assert len(stored(kept)) == 1
    assert kept.get(KEYS[0]) == b"old"


def test_a_folder_that_cannot_be_written_is_told_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match=r"cannot write .*file.*\n  fix: MLX_CUDA_DEVICE_STORE=off"):
        store.Store(tmp_path / "file" / "store").put(KEYS[0], b"data")

    def read_only(*_: object) -> int:  # permissions do not stop root
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(EnvironmentProblem, match=r"Permission denied\n  fix: MLX_CUDA_DEVICE_STORE=off"):
        store.Store(tmp_path).put(KEYS[0], b"data")


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(store.VARIABLE, raising=False)
    output = Path("build/device")
    assert store.chosen(output).folder == Path(platformdirs.user_cache_dir("mlx-cuda")) / "device"
    monkeypatch.setenv(store.VARIABLE, "mine")
    assert store.chosen(output).folder == tmp_path / "mine"
    monkeypatch.setenv(store.VARIABLE, "off")
    assert store.chosen(output).folder == tmp_path / "build" / "device-objects"


def test_an_entry_may_be_read_by_others(tmp_path: Path) -> None:
    """A container's root and the user outside share the store."""
    store.Store(tmp_path).put("k" * 64, b"data")
    assert (tmp_path / "kk" / ("k" * 64)).stat().st_mode & 0o444 == 0o444


def test_without_a_cache_to_write_to_the_build_tree_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: str(tmp_path / "file" / "cache"))
    assert store.chosen(tmp_path / "device").folder == tmp_path / "device-objects"


@pytest.mark.usefixtures("_no_home")
def test_without_a_home_the_build_tree_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(store.VARIABLE, raising=False)
    assert store.chosen(tmp_path / "device").folder == tmp_path / "device-objects"
    assert list(tmp_path.iterdir()) == []
