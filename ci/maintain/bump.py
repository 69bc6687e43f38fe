"""``python -m ci bump``: change the version of MLX, or of the tools, with all pins and locks.

--mlx changes everything that names the pinned MLX: metadata and extras, the matrix, the package's version (to VERSION.1) and table, the
toolkits and their locks, and the locks of tools that contain MLX. --tools locks requirements/ again, to the newest releases that the
dependency groups of pyproject.toml allow and that are a week old; --tools kept changes only what an edit of the groups needs. All files are
computed before the first one is written. Build and test afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from .. import matrix
from ..errors import CheckFailed, EnvironmentProblem
from ..files import whole
from ..matrix import package_table
from ..release.version import PACKAGE, PROJECT
from ..toolkit import roots
from . import tools

Resolve = Callable[[roots.Root], str]  # a root to the text of its lock
Relock = Callable[[str, Iterable[Requirement]], Mapping[Path, str]]  # a pyproject.toml and the pins to keep, to the tools' locks
Available = Callable[[str], Mapping[Version, set[str]]]  # a package to its versions, each with the platforms that have a wheel

MATRIX = Path("ci/matrix/matrix.toml")
TOOLKITS = Path("ci/toolkit/locks/toolkits.toml")
LIBRARIES = package_table.PATH.relative_to(matrix.REPOSITORY)
NEWEST, KEPT = "newest", "kept"


@dataclass(frozen=True)
class Bump:
    """From one MLX to another; ``texts`` are the files that change."""

    old: str
    new: str
    version: str
    texts: Mapping[Path, str]


def pinned(root: Path) -> tuple[str, list[str]]:
    """The MLX that is pinned, and the packages that have its version."""
    import tomlkit

    project: Any = tomlkit.parse((root / PROJECT).read_text("utf-8"))["project"]
    mlx = matrix.parse((root / MATRIX).read_text("utf-8")).mlx
    requirements = list(map(Requirement, chain(project.get("dependencies", []), *project.get("optional-dependencies", {}).values())))
    return mlx, list(dict.fromkeys(each.name for each in requirements if str(each.specifier) == f"=={mlx}"))


def plan(root: Path, mlx: str, resolve: Resolve, relock: Relock) -> Bump:
    """The changes that a working tree needs to build for this MLX; nothing is written."""
    import tomlkit

    old, packages = pinned(root)
    if Version(mlx) < Version(old):
        raise CheckFailed(
            f"mlx {mlx} is older than the pinned {old}: the next version has to sort above the last\n  fix: edit the files yourself"
        )
    pins = {f"{package}=={old}": f"{package}=={mlx}" for package in packages}
    documents: dict[Path, Any] = {path: tomlkit.parse((root / path).read_text("utf-8")) for path in (PROJECT, MATRIX, TOOLKITS)}
    for document in documents.values():
        _repin(document, pins)

    before = str(documents[PROJECT]["project"]["version"])
    version = before if mlx == old else first(Version(mlx))
    documents[PROJECT]["project"]["version"] = version
    documents[MATRIX]["project"]["mlx"] = mlx
    texts = {path: tomlkit.dumps(document) for path, document in documents.items()}
    texts[PACKAGE] = (root / PACKAGE).read_text("utf-8").replace(f'"{before}"', f'"{version}"')
    texts[LIBRARIES] = package_table.render(matrix.parse(texts[MATRIX]))
    for each in roots.parse(texts[TOOLKITS]).values():
        if set(each.packages) & set(pins.values()):
            texts[TOOLKITS.parent / each.lock_file.name] = resolve(each)
    kept = [pin for text in tools.read(root).values() for pin in tools.pins(text) if str(pin.specifier) != f"=={old}"]
    locks = relock(texts[PROJECT], kept)
    texts |= {path: text for path, text in locks.items() if set(map(str, tools.pins(text))) & set(pins.values())}
    return Bump(old, mlx, version, changed(root, texts))


def changed(root: Path, texts: Mapping[Path, str]) -> dict[Path, str]:
    return {path: text for path, text in texts.items() if not _says(root / path, text)}


def _says(file: Path, text: str) -> bool:
    """Whether a file says it already: a lock of the tools may word it in another way."""
    if not file.is_file():
        return False
    before = file.read_text("utf-8")
    return before == text or (file.parent.name == tools.FOLDER.name and tools.holds(before, text))


def write(root: Path, texts: Mapping[Path, str]) -> None:
    for path, text in texts.items():
        with whole(root / path, fix="git restore . puts back what was there") as part:
            part.write_text(text, encoding="utf-8", newline="\n")


def first(mlx: Version) -> str:
    """The first version for an MLX; that for a pre-release is one too."""
    return f"{mlx.base_version}.1{mlx.public.removeprefix(mlx.base_version)}"


def newest(packages: Iterable[str], platforms: Iterable[str], available: Available) -> str:
    """The newest release that every package has for every platform: upstream's packages do not always appear together."""
    releases = [version for version in common(packages, platforms, available) if not version.is_prerelease]
    if not releases:
        raise CheckFailed(f"no release that all of {', '.join(packages)} have for {', '.join(platforms)}")
    return str(max(releases))


def common(packages: Iterable[str], platforms: Iterable[str], available: Available) -> set[Version]:
    """The versions that every package has for every platform."""
    return set.intersection(*({version for version, found in available(each).items() if found >= set(platforms)} for each in packages))


def on_index(package: str) -> dict[Version, set[str]]:
    """The versions of a package on the index that ``pypi`` names, each with the platforms that have a wheel of it."""
    from ..index import named

    declared = matrix.load().platforms
    found: dict[Version, set[str]] = {}
    for file in named("pypi").files(package):
        if file.version and file.name.endswith(".whl") and not file.yanked:
            tags = parse_wheel_filename(file.name)[3]
            platforms = {name for name, each in declared.items() if any(each.takes(tag.platform) for tag in tags)}
            found.setdefault(file.version, set()).update(platforms)
    return found


def _repin(node: Any, pins: Mapping[str, str]) -> None:
    """Exchange whole requirement strings, wherever they stand; comments and layout stay."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, str) and value in pins:
            node[key] = pins[value]
        elif isinstance(value, (dict, list)):
            _repin(value, pins)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--mlx", metavar="VERSION", help="a version, or `newest`: the newest that all of MLX's packages have for all platforms"
    )
    tools_help = "the tools: `newest` (default), or `kept`: the pinned versions, with the groups' additions and removals in pyproject.toml"
    what.add_argument("--tools", nargs="?", const=NEWEST, choices=[NEWEST, KEPT], help=tools_help)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a newer MLX or newer tools are available")


def run(args: argparse.Namespace) -> int:
    return _tools(args.tools == KEPT, args.check) if args.tools else _mlx(args.mlx, args.check)


def _mlx(wanted: str, check: bool) -> int:
    from ..toolkit import lock

    old, packages = pinned(matrix.REPOSITORY)
    if not old:
        raise EnvironmentProblem("ci/matrix/matrix.toml pins no MLX", fix="omit --mlx: it is for projects that are built for one")
    if wanted == NEWEST:
        mlx = newest(packages, matrix.load().platforms, on_index)
    else:
        try:
            mlx = str(Version(wanted))
        except InvalidVersion:
            raise EnvironmentProblem(f"{wanted!r} is no version", fix=f"give one such as {old}, or `{NEWEST}`") from None
    if check:
        print(f"mlx {mlx} is pinned" if mlx == old else f"mlx {old} is pinned, {mlx} is due")
        return mlx != old
    bump = plan(matrix.REPOSITORY, mlx, lock.resolve, tools.resolve)
    write(matrix.REPOSITORY, bump.texts)
    if not bump.texts:
        print(f"mlx {old} is pinned: nothing to do")
        return 0
    print("\n".join([f"mlx {bump.old} -> {bump.new}, {matrix.load().name} {bump.version}", *(path.as_posix() for path in bump.texts)]))
    return 0


def _tools(keep: bool, check: bool) -> int:
    before = tools.read(matrix.REPOSITORY)
    kept = [pin for text in before.values() for pin in tools.pins(text)] if keep else []
    after = tools.resolve((matrix.REPOSITORY / PROJECT).read_text("utf-8"), kept)
    texts = changed(matrix.REPOSITORY, after)
    if not texts:
        print("the tools are pinned: nothing to do")
        return 0
    print("\n".join([*tools.moved(before.values(), after.values()), *(path.as_posix() for path in texts)]))
    if not check:
        write(matrix.REPOSITORY, texts)
    return int(check)
