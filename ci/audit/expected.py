"""The text files of a wheel as its build writes them, made again from this checkout: the audit compares bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import ndiff
from typing import Any

from packaging.requirements import Requirement

from ..build.description import dynamic_metadata
from ..errors import EnvironmentProblem
from ..wheelfile.wheel import Wheel

GENERATOR = re.compile(r"^Generator: scikit-build-core \d+(\.\d+)*$", re.MULTILINE)
REQUIRED = {"name", "version", "description", "license", "license-files", "requires-python"}  # keys of pyproject.toml's [project]
OPTIONAL = {"keywords", "classifiers", "dependencies", "optional-dependencies", "dynamic"}
LONGEST, MOST = 160, 20  # characters of a line that is shown, and such lines


def metadata(project: Mapping[str, Any], version: str) -> str:
    """METADATA, of pyproject.toml's table `project`."""
    if missing := sorted(REQUIRED - project.keys()):
        raise EnvironmentProblem(f"pyproject.toml: [project] lacks {', '.join(missing)}, which the audit needs", fix="add it")
    if unknown := sorted(project.keys() - REQUIRED - OPTIONAL):
        raise EnvironmentProblem(
            f"pyproject.toml: the audit does not support {', '.join(unknown)} in [project]",
            fix="remove it, or write its lines of METADATA in ci/audit/expected.py",
        )
    dynamic = dynamic_metadata({}, {"version": version})
    lines = [
        *("Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {version}", f"Summary: {project['description']}"),
        *(f"Keywords: {','.join(words)}" for words in [project.get("keywords")] if words),
        f"License-Expression: {project['license']}",
        *(f"License-File: {each}" for each in project["license-files"]),
        *(f"Classifier: {each}" for each in project.get("classifiers", [])),
        *(f"Project-URL: {name}, {address}" for name, address in dynamic["urls"].items()),
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {Requirement(each)}" for each in project.get("dependencies", [])),
    ]
    for extra, requirements in project.get("optional-dependencies", {}).items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {Requirement(each)}; extra == "{extra}"' for each in requirements)]
    lines.append(f"Description-Content-Type: {dynamic['readme']['content-type']}")
    return "\n".join([*lines, "", dynamic["readme"]["text"]])


def wheel_file(wheel: Wheel) -> str:
    """WHEEL. The version of the backend that wrote it, and the order of its tags, are its own."""
    found = wheel.information("WHEEL")
    generator = GENERATOR.search(found)
    written = re.findall(r"^Tag: (.*)$", found, re.MULTILINE)
    tags = sorted(map(str, wheel.tags), key=lambda tag: written.index(tag) if tag in written else len(written))
    lines = ["Wheel-Version: 1.0", generator.group() if generator else "Generator: scikit-build-core VERSION", "Root-Is-Purelib: false"]
    return "\n".join([*lines, *(f"Tag: {tag}" for tag in tags), "", ""])


def build_facts(facts: Mapping[str, Any]) -> str:
    """``_build.json``, as CMake's string(JSON) writes it."""
    return f"{_written(facts)}\n"


def _written(value: Any, indent: str = "") -> str:
    if not isinstance(value, dict):
        return f'"{value}"'
    inner = indent + "  "
    items = []
    for key, each in sorted(value.items()):
        before = f"\n{inner}" if isinstance(each, dict) else ""
        items.append(f'{inner}"{key}" : {before}{_written(each, inner)}')
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


def differences(found: str, expected: str) -> Iterator[str]:
    """Each line that is in one and not in the other, up to a number; line ends and white space count."""
    if found == expected:
        return
    lines = [line for line in ndiff(found.split("\n"), expected.split("\n")) if line.startswith(("- ", "+ "))]
    for line in lines[:MOST]:
        told = f"{line[2 : LONGEST + 2]!r}"
        yield f"has the line {told}, expected no such line there" if line[0] == "-" else f"lacks the line {told}, expected it there"
    if len(lines) > MOST:
        yield f"differs in {len(lines) - MOST} more lines, expected none"
