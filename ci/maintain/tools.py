"""The tools' locks: ``requirements/GROUP.txt`` has a dependency group of pyproject.toml and all that it needs, with the hash of each file.

uv resolves all groups at once, for every platform and CPython, so that a package is the same in all of them. Wheels only: to build
anything else would take tools that no hash holds. A release has to be a week old: time for a bad one to be noticed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.dependency_groups import resolve_dependency_groups
from packaging.requirements import Requirement
from packaging.version import Version

from ..errors import EnvironmentProblem
from ..files import tomllib
from ..matrix import load
from ..toolkit import uv

FOLDER = Path("requirements")
AGE = "7 days"
AT_ONCE = ("mlx", *(Requirement(each).name for each in load().cpu.requires), "mlx-metal")  # what is built for them is what they are for

OLDEST_PIP = "23.3"  # the first that takes `pydantic==…` for the `pydantic[email]` that a package asks for: uv writes no extras

_HEAD = """\
# Written by `python -m ci bump --tools`, with uv. For uv, or pip {pip} or newer. The dependency group `{group}` of pyproject.toml:
{requirements}
--only-binary :all:

"""
_PIN = re.compile(r"^(\S+==.+) \\$", re.MULTILINE)
_HASH = re.compile(r"sha256:([0-9a-f]+)")


def groups(project: str) -> dict[str, tuple[str, ...]]:
    """The dependency groups of a pyproject.toml, each with what it includes."""
    table = tomllib.loads(project).get("dependency-groups")
    if not table:
        fix = f"copy the groups that {FOLDER.name}/ was locked from, then change them"
        raise EnvironmentProblem("pyproject.toml has no [dependency-groups]", fix=fix)
    return {name: tuple(dict.fromkeys(resolve_dependency_groups(table, name))) for name in table}


def pins(text: str) -> list[Requirement]:
    return [Requirement(pin) for pin in _PIN.findall(text)]


def read(root: Path) -> dict[Path, str]:
    """The files that a working tree has."""
    return {path.relative_to(root): path.read_text("utf-8") for path in sorted((root / FOLDER).glob("*.txt"))}


def holds(before: str, after: str) -> bool:
    """Whether a file says the same as the new one: another uv words markers otherwise, and wheels are added to releases."""
    declared = [text.partition("--only-binary")[0] for text in (before, after)]
    return declared[0] == declared[1] and not moved([before], [after]) and set(_HASH.findall(before)) <= set(_HASH.findall(after))


def moved(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """A line for each package whose versions differ: there may be one for the older CPythons and one for the others."""
    old, new = _versions(before), _versions(after)
    return [f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in sorted(old | new) if old.get(name) != new.get(name)]


def _versions(texts: Iterable[str]) -> dict[str, str]:
    found: dict[str, set[Version]] = {}
    for pin in (pin for text in texts for pin in pins(text)):
        found.setdefault(pin.name, set()).add(Version(str(pin.specifier).removeprefix("==")))
    return {name: ", ".join(map(str, sorted(versions))) for name, versions in found.items()}


def head(group: str, requirements: Iterable[str]) -> str:
    return _HEAD.format(group=group, pip=OLDEST_PIP, requirements="\n".join(f"#   {each}" for each in requirements))


def resolve(project: str, keep: Iterable[Requirement] = ()) -> dict[Path, str]:
    """The files for a pyproject.toml, by their paths: with the pins to keep, else with the newest of everything."""
    kept = sorted(set(map(str, keep)))
    age = [] if kept else ["--exclude-newer", AGE, *(word for name in AT_ONCE for word in ("--exclude-newer-package", f"{name}=false"))]
    declared = groups(project)
    table = [  # a list of strings is the same in JSON and TOML
        *("[project]", 'name = "tools"', 'version = "0"'),
        f"requires-python = {json.dumps(tomllib.loads(project)['project']['requires-python'])}",
        *("[tool.uv]", "package = false", f"constraint-dependencies = {json.dumps(kept)}"),
        *("[dependency-groups]", *(f"{name} = {json.dumps(requirements)}" for name, requirements in declared.items())),
    ]
    with tempfile.TemporaryDirectory(prefix=f"{load().name}-tools-") as folder:
        here = Path(folder)
        (here / "pyproject.toml").write_text("\n".join(table) + "\n", "utf-8")
        uv.run("lock", "--quiet", "--python", sys.executable, "--no-build", *age, cwd=here)
        for group in declared:
            uv.run("export", "--quiet", "--frozen", "--only-group", group, "--no-header", "--output-file", f"{group}.txt", cwd=here)
        return {FOLDER / f"{group}.txt": head(group, each) + (here / f"{group}.txt").read_text("utf-8") for group, each in declared.items()}
