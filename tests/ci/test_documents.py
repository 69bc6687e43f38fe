"""What documents say of the sources: symbols, checks, steps, environment variables, messages, and the fields of the matrix."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import architecture
from ci.device import plan
from ci.errors import CheckFailed
from ci.files import tomllib
from ci.matrix import REPOSITORY, Extra

CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")


def rows(document: str) -> list[str]:
    """The first cells of all tables of a page, where they are code."""
    return re.findall(r"^\| `([^`|]+)` \|", (REPOSITORY / "docs" / document).read_text("utf-8"), re.MULTILINE)


PLACED = re.compile(r"(`\w+`(?:(?:, | and )`\w+`)*) in `((?:src|python|benchmarks|ci|tests)/[\w./]+\.(?:py|h|cuh|cpp|toml))`")


def placed() -> list[tuple[str, str, str]]:
    """Page, symbol and file, wherever a document says "`symbol` in `file`"."""
    pages = {path: path.read_text("utf-8") for path in (REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md")))}
    return [
        (page.name, symbol, path)
        for page, text in pages.items()
        for symbols, path in PLACED.findall(" ".join(text.split()))
        for symbol in re.findall(r"`(\w+)`", symbols)
    ]


def defined(symbol: str, path: Path) -> bool:
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        nodes = ast.parse(text).body
        targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
        names = [ast.unparse(each) for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        names += [ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)]
        return symbol in {*names, *(node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))}
    if path.suffix == ".toml":
        return re.search(rf"^{symbol} = ", text, re.MULTILINE) is not None
    return re.search(rf"^(?!.*\breturn {symbol}\b)[^/\n]*[\w>] {symbol}\b(?!;)", text, re.MULTILINE) is not None


@pytest.mark.parametrize(("page", "symbol", "path"), placed())
def test_symbols_are_in_the_files_that_documents_name(page: str, symbol: str, path: str) -> None:
    assert defined(symbol, REPOSITORY / path), page


def test_symbols_that_are_elsewhere_are_found() -> None:
    assert len(placed()) > 20
    assert not defined("OPERATIONS", REPOSITORY / "python/mlx_cuda/_explain.py")  # which imports it
    assert not defined("workspace_bytes", REPOSITORY / "src/recurrence/calls.cpp")


def test_the_picture_is_of_these_folders() -> None:
    assert architecture.PICTURE.read_text("utf-8") == architecture.drawing(), "run: python -m benchmarks.architecture"


def test_the_picture_follows_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What uses another stands below it; a folder that the list lacks, or has and is not there, is told."""
    contributing = tmp_path / "CONTRIBUTING.md"
    monkeypatch.setattr(architecture, "REPOSITORY", tmp_path)
    monkeypatch.setattr(architecture, "CONTRIBUTING", contributing)
    contributing.write_text(
        "    src/    said\n        two/ three/  of both,\n              and more\n        one/         x\n    ci/\n", "utf-8"
    )
    for name, text in {"one": "", "two": '#include "one/a.h"\n', "three": '#include "two/a.h"\n'}.items():
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "a.h").write_text(text, "utf-8")
    both = architecture.Row(("two/", "three/"), "of both, and more")
    assert architecture.layers("src") == [[architecture.Row(("one/",), "x")], [both]]
    (tmp_path / "src" / "one" / "a.h").write_text('#include "three/a.h"\n', "utf-8")
    with pytest.raises(CheckFailed, match="parts of src use each other in a circle"):
        architecture.layers("src")
    (tmp_path / "src" / "one").rename(tmp_path / "src" / "four")
    with pytest.raises(CheckFailed, match=r"CONTRIBUTING\.md's list and src differ in four, one"):
        architecture.rows("src")


def test_every_import_of_a_run_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ci").mkdir()
    text = "from . import one  # said\nfrom .two import f\nfrom .three import (\n    g,\n)\nfrom . import (\n    four,\n    five,\n)\n"
    (tmp_path / "ci" / "all.py").write_text(text, "utf-8")
    monkeypatch.setattr(architecture, "REPOSITORY", tmp_path)
    assert architecture.uses("ci", "all") - {""} == {"one", "two", "three", "four", "five"}


def test_the_doctors_page_has_its_checks() -> None:
    """Those of the two tuples `CHECKS` and `CHECKS_OF_CUDA`, in their order."""
    tree = ast.parse((REPOSITORY / "python" / "mlx_cuda" / "_loader" / "checks.py").read_text("utf-8"))
    tuples = [node.value for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Tuple)]
    names = [each.id for found in tuples for each in found.elts if isinstance(each, ast.Name)]
    checks = [name.removeprefix("check_") for name in names if name.startswith("check_")]
    assert checks
    assert [name for name in rows("guides/doctor.md") if name in checks] == checks


def test_the_steps_of_compiling_are_those_of_the_plan() -> None:
    sources = plan.sources(["declared"])
    compiled = sum(len({*each.fronts.values(), *each.targets.ptx}) for each in sources)
    assembled = sum(len(each.targets.sass) for each in sources)
    text = " ".join((REPOSITORY / "docs" / "internals" / "design.md").read_text("utf-8").split())
    assert f"{compiled} runs of NVRTC and {assembled} of ptxas" in text


def test_variants_name_the_locked_uv() -> None:
    (locked,) = re.findall(r"^uv==(\S+)", (REPOSITORY / "requirements" / "uv.txt").read_text("utf-8"), re.MULTILINE)
    assert f"uv {locked}" in (REPOSITORY / "docs" / "factory" / "variants.md").read_text("utf-8")


# In the package and the factory whatever is a name of these; the last is of a name that is put together.
NAMED = r"[\"'](?:CIBW|CMAKE_BUILD|CUDA|GH|GITHUB|LD|MLX|SOURCE_DATE)_[A-Z0-9_]+[\"']|f\"(?:CIBW|MLX_CUDA)_[A-Z]+_(?=\{)"
READ = r"environ(?:\.get\(|\[)\"(?:MLX_CUDA|CUDA|PIPELINE|XDG|LOCAL)_?\w+|^VARIABLE = \"MLX_CUDA_\w+"
NO_VARIABLES = {"MLX_ROOT"}  # but CMake's


def variables() -> set[str]:
    """The environment variables that the package, its native modules, the factory, the tests and the benchmarks read."""
    found = set()
    for pattern, reading in {
        "python/**/*.py": NAMED,
        "ci/**/*.py": NAMED,
        "wheel_hooks/**/*.py": READ,
        "noxfile.py": NAMED,
        "pyproject.toml": NAMED,
        "src/**/*.cpp": r"getenv\(\"\w+",
        "tests/**/*.py": READ,
        "benchmarks/**/*.py": READ,
    }.items():
        for path in REPOSITORY.glob(pattern):
            for match in re.findall(reading, path.read_text("utf-8"), re.MULTILINE):
                found.update(re.findall(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+|LOCALAPPDATA", match))
    return found - NO_VARIABLES


def test_the_environment_variables_are_those_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "reference" / "environment.md").read_text("utf-8")
    cells = re.findall(r"^\| (`[A-Z][^|]*`) \|", text, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([A-Z0-9_]+)", cell)} == variables()


def messages(page: str) -> list[str]:
    """The first cells of a page's tables of messages, `…` for what differs, up to the messages of other programs."""
    text = (REPOSITORY / "docs" / page).read_text("utf-8")
    own = [section for section in text.split("\n## ") if section.startswith(("Messages of mlx-cuda", "Building"))]
    return [message for section in own for message in re.findall(r"^\| `([^|]+)` \|", section, re.MULTILINE)]


@pytest.fixture(scope="module")
def code() -> str:
    return "\n".join(path.read_text("utf-8") for folder in ("python", "ci") for path in sorted((REPOSITORY / folder).rglob("*.py")))


@pytest.mark.parametrize("message", messages("start/faq.md"))
def test_the_messages_of_the_faq_are_those_of_the_code(message: str, code: str) -> None:
    parts = [part.strip() for part in message.split("…")]
    assert max(map(len, parts)) > 9
    assert not [part for part in parts if part not in code]


MAPS = ("platforms", "compilers", "cuda", "gpus")  # whose names are free


def fields(value: Any, path: str = "") -> set[str]:
    """The paths of a table's values, as documents name them."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return set().union(*(fields(each, path) for each in value))
    if not isinstance(value, dict) or path.endswith((".files", ".directories")):
        return {path}
    return set().union(*(fields(each, f"{path}.{'*' if path in MAPS else key}".strip(".")) for key, each in value.items()))


def test_the_fields_of_the_matrix_are_those_of_its_file() -> None:
    text = (REPOSITORY / "docs" / "reference" / "matrix.md").read_text("utf-8")
    cells = re.findall(r"^\| (`\w+\.[^|]+`) \|", text, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    declared = fields(tomllib.loads((REPOSITORY / "ci" / "matrix" / "matrix.toml").read_text("utf-8")))
    declared |= {f"cpu.{field.name}" for field in dataclasses.fields(Extra) if field.name not in {"extra", "requires"}}  # optional
    assert (set(listed), len(listed)) == (declared, len(declared))
