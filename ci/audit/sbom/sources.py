"""``sources.toml``: whose work goes into a wheel, and under which license."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ...errors import CheckFailed
from ...files import tomllib

Use = Literal["headers", "library", "tool"]


@dataclass(frozen=True)
class Source:
    """Packages of one origin and license."""

    title: str
    packages: tuple[str, ...]
    use: frozenset[Use]
    license: str  # an SPDX expression
    text: str  # its file in licenses/
    purl: str = ""  # of what third_party/ holds


@cache
def load() -> tuple[Source, ...]:
    """Read ``ci/audit/sbom/sources.toml``."""
    tables = tomllib.loads((Path(__file__).parent / "sources.toml").read_text("utf-8"))["source"]
    return tuple(Source(**{**table, "packages": tuple(table["packages"]), "use": frozenset(table["use"])}) for table in tables)


def of(package: str) -> Source:
    """The source of a package that a build takes in."""
    for source in load():
        if package in source.packages:
            return source
    raise CheckFailed(f"ci/audit/sbom/sources.toml has no entry for {package}: add its use and its license")
