"""Where the tests come from: MLX's out of its repository, at a commit; mlx-lm's out of its sdist, by a hash of requirements/.

A commit's id is a digest of all that it holds, and git holds what it fetches to it; pins.toml has a SHA-256 of the tests beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from ci.errors import CheckFailed, EnvironmentProblem

PINS = Path(__file__).with_name("pins.toml")
LOCK = Path(__file__).parents[2] / "requirements" / "upstream-tests.txt"
LOCKED = re.compile(r"^mlx-lm==(\S+).*\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", re.MULTILINE)
PLACE = "python/tests"  # in MLX's repository
RECORD = "sources.json"  # in the folder: what was fetched
TEXT = """\
# MLX's tests, which are run with and without patch() (docs/results/upstream-tests.md). Written by `python -m tests.upstream pin`.
repository = "{repository}"
{note}commit = "{commit}"
sha256 = "{sha256}"  # of the names and the bytes of python/tests
"""


def pins(path: Path = PINS) -> dict[str, str]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    found: dict[str, str] = tomllib.loads(path.read_text("utf-8"))
    return found


def fetch(folder: Path, pinned: Mapping[str, str]) -> None:
    """Fill an empty folder with ``mlx`` and ``mlx-lm``."""
    if folder.exists() and any(folder.iterdir()):
        raise EnvironmentProblem(f"{folder} is not empty", fix="give an empty folder, or `run --tests` for one that was fetched")
    write(folder / "mlx", mlx(pinned["repository"], pinned["commit"], pinned["sha256"]))
    version, files = mlx_lm()
    write(folder / "mlx-lm", files)
    (folder / RECORD).write_text(json.dumps({"mlx": pinned["commit"], "mlx-lm": version}), "utf-8")


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def fetched(folder: Path) -> dict[str, str]:
    """What a folder says of itself."""
    path = folder / RECORD
    found: dict[str, str] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


# ------------------------------------------------------------------------------------------------------------------- MLX


def mlx(repository: str, commit: str, sha256: str | None = None) -> dict[str, bytes]:
    """The files of MLX's tests at a commit, by their names."""
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-upstream-") as name:
        git("init", "--quiet", "--bare", name)
        git("-C", name, "fetch", "--quiet", "--depth", "1", repository, commit)
        files = unpacked(git("-C", name, "archive", "--prefix", "mlx/", commit, PLACE), PLACE)
    if sha256 not in {None, digest(files)}:
        raise CheckFailed(f"MLX's tests at {commit} have the SHA-256 {digest(files)}, expected {sha256}")
    return files


def digest(files: Mapping[str, bytes]) -> str:
    lines = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def pin(version: str, pinned: Mapping[str, str]) -> str:
    """The text of pins.toml for a release of MLX, which is tagged in its repository."""
    repository, tag = pinned["repository"], f"refs/tags/v{version}"
    named = dict(line.split("\t")[::-1] for line in git("ls-remote", repository, tag, f"{tag}^{{}}").decode().splitlines())
    commit = named.get(f"{tag}^{{}}") or named.get(tag)  # what an annotated tag stands for
    if not commit:
        raise EnvironmentProblem(f"{repository} has no tag v{version}", fix="wait for it, or write a commit into tests/upstream/pins.toml")
    return TEXT.format(repository=repository, note=f'tag = "v{version}"\n', commit=commit, sha256=digest(mlx(repository, commit)))


def git(*arguments: str) -> bytes:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(["git", "-c", "protocol.version=2", *arguments], env=environment, capture_output=True, check=True)
    except FileNotFoundError as error:
        raise EnvironmentProblem("git is not installed", fix="install git") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        raise EnvironmentProblem(f"git {' '.join(arguments)}: {said}", fix="check the network, then run again") from error
    return done.stdout


# ---------------------------------------------------------------------------------------------------------------- mlx-lm


def locked(text: str) -> tuple[str, set[str]]:
    """The version of mlx-lm in a lock, and the hashes of its files."""
    if not (found := LOCKED.search(text)):
        raise CheckFailed(f"{LOCK.name} does not lock mlx-lm\n  fix: python -m ci bump --tools kept")
    return found[1], set(re.findall(r"sha256:([0-9a-f]{64})", found[2]))


def mlx_lm() -> tuple[str, dict[str, bytes]]:
    """The locked version of mlx-lm, and the files of the tests in its sdist."""
    from ci.index import named

    version, hashes = locked(LOCK.read_text("utf-8"))
    index = named("pypi")
    sdists = [each for each in index.files("mlx-lm") if str(each.version) == version and each.name.endswith(".tar.gz")]
    chosen = [each for each in sdists if each.sha256 in hashes]
    if not chosen:
        raise CheckFailed(f"of mlx-lm {version} the index has no sdist with a hash of {LOCK.name}: {[each.sha256 for each in sdists]}")
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-upstream-") as name:
        return version, unpacked(index.fetch(chosen[0], Path(name)).read_bytes(), "tests")


def unpacked(archive: bytes, place: str) -> dict[str, bytes]:
    """The files below a folder of an archive, whose first folder is the project's."""
    files = {}
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(f"{place}/") and ".." not in name.split("/") and (data := tar.extractfile(member)):
                files[name.removeprefix(f"{place}/")] = data.read()
    if not files:
        raise CheckFailed(f"the archive has no folder {place} with files")
    return files
