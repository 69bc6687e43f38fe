"""The order of the modules: none uses itself by a circle, and each part of ci/ and of the package uses only those that come before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ci.matrix import REPOSITORY

LAYERS = {  # what stands in one line knows nothing of its neighbours
    "ci": [
        *("errors", "process", "files", "matrix", "console", "gh", "index", "toolkit", "device"),
        *("build", "wheelfile", "audit", "repair", "wheel", "trial", "release", "nightly", "report", "maintain"),
    ],
    "python/mlx_cuda": [
        "_version _common",
        "_loader",
        "_operation",
        "_all_sum _matmul _recurrence _swiglu",
        "_attention",
        "_operations",
        "_replay _tuning",
        "_mlx_lm",
        "_invariant",
        "_doctor _patch _run nn",
        "_decode_step",
        "_explain",
        "_explain_command",
        "_check",
    ],
}


def modules(top: str) -> dict[str, Path]:
    """The modules of a package by their names, a package itself by the name of its folder."""
    folder = REPOSITORY / top
    found = {path.relative_to(folder.parent).with_suffix(""): path for path in folder.rglob("*.py")}
    return {".".join(place.parts).removesuffix(".__init__"): path for place, path in found.items()}


def imported(name: str, path: Path) -> Iterator[str]:
    """Whatever it imports, inside functions and for types only too; of a package perhaps a name, perhaps a module."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{each.name}" for each in node.names)


def uses(top: str) -> dict[str, set[str]]:
    """Of each module, the modules of the same tree that it imports."""
    known = modules(top)
    found = {name: {each if each in known else each.rpartition(".")[0] for each in imported(name, path)} for name, path in known.items()}
    return {name: names & known.keys() - {name} for name, names in found.items()}


@pytest.mark.parametrize("top", ["ci", "benchmarks", "python/mlx_cuda"])
def test_no_circles(top: str) -> None:
    TopologicalSorter(uses(top)).prepare()  # CycleError names the circle


def upward(top: str, layers: list[str]) -> list[str]:
    """Where a part uses one that does not come before it; what ties them together, the package itself and __main__, uses any."""
    known = {name: name.split(".")[1] for name in modules(top) if name.partition(".")[2] not in {"", "__main__"}}
    rank = {part: number for number, line in enumerate(layers) for part in line.split()}
    pairs = [(name, each) for name, found in uses(top).items() if name in known for each in found if known[name] != known.get(each)]
    return [f"{name} uses {each}" for name, each in pairs if rank.get(known.get(each, ""), len(layers)) >= rank[known[name]]]


@pytest.mark.parametrize(("top", "layers"), LAYERS.items(), ids=LAYERS)
def test_each_layer_uses_those_before_it(top: str, layers: list[str]) -> None:
    assert upward(top, layers) == []


def test_replay_knows_no_library_of_models() -> None:
    """Not even by a module's name in a string: the caches of another one are a folder beside `_mlx_lm`."""
    files = (REPOSITORY / "python" / "mlx_cuda" / "_replay").glob("*.py")
    texts = {path.name: path.read_text("utf-8") for path in files}
    assert len(texts) > 10
    assert [name for name, text in texts.items() if re.search(r"mlx[-_](lm|vlm|audio)", text, re.IGNORECASE)] == []


NATIVE = ["device", "runtime", "all_sum elementwise", "matmul recurrence", "attention", "decoding", "bindings"]


def test_rooms_of_native_code() -> None:
    """A room of src/ includes only those before it, and the operations inside one do not include each other in a circle."""
    sources = REPOSITORY / "src"
    rank = {room: number for number, line in enumerate(NATIVE) for room in line.split()}
    found: dict[str, set[str]] = {}
    for path in (path for path in sources.rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"}):
        place = path.relative_to(sources).parent.as_posix()
        for header in re.findall(r'^#include "([^"]+)/[^/"]+"', path.read_text("utf-8"), re.MULTILINE):
            own, other = place.partition("/")[0], header.partition("/")[0]
            assert own == other or rank[other] < rank[own], f"{place}/{path.name} includes {header}"
            found.setdefault(place, set()).update({header} - {place})
    assert len(found) > 10
    TopologicalSorter(found).prepare()  # CycleError names the circle


def types_of(folder: Path) -> dict[str, set[str]]:
    """Of each type of host code that all of it sees, the files that define one of that name."""
    found: dict[str, set[str]] = {}
    for path in (path for path in sorted(folder.rglob("*")) if path.suffix in {".h", ".cpp"}):
        seen_by_all = re.sub(r"^namespace {$.*?^}  // namespace$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for name in re.findall(
            r"^(?:struct|class|enum class) (?:alignas\(\d+\) )?(\w+)(?: final)? (?::|{)", seen_by_all, flags=re.MULTILINE
        ):
            found.setdefault(name, set()).add(path.relative_to(folder).as_posix())
    return found


def test_types_have_names_of_their_own(tmp_path: Path) -> None:
    """The linker takes the functions of one type, such as its destructor, for those of another of the same name."""
    found = types_of(REPOSITORY / "src")
    assert len(found) > 100
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
    (tmp_path / "a.h").write_text("struct Step {\n};\nenum class Kind : int { one };\n", "utf-8")
    (tmp_path / "b.cpp").write_text("class Step final : public Base {\n};\nnamespace {\nclass Kind {\n};\n}  // namespace\n", "utf-8")
    assert types_of(tmp_path) == {"Step": {"a.h", "b.cpp"}, "Kind": {"a.h"}}


def test_inline_assembly_stands_in_two_files() -> None:
    """Instructions, and those of kernels whose blocks exchange results while they run."""
    sources = REPOSITORY / "src"
    found = {path.relative_to(sources).as_posix() for path in sources.rglob("*.[ch]*") if re.search(r"\basm\b", path.read_text("utf-8"))}
    assert found == {"device/ptx.cuh", "device/relaxed.cuh"}


def test_private_members_of_mlx_are_named_in_one_file() -> None:
    """An explicit instantiation may name them, of which there is one in a program: it stands in no header."""
    sources = REPOSITORY / "src"
    opened = re.compile(r"^template (?:struct|class) \w+<.*&", re.MULTILINE)
    found = [path.relative_to(sources).as_posix() for path in sources.rglob("*.[ch]*") if opened.search(path.read_text("utf-8"))]
    assert found == ["runtime/mlx_internals.cpp"]


def test_a_circle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "__init__.py").touch()
    (tmp_path / "small" / "one.py").write_text("from .two import x\n", "utf-8")
    (tmp_path / "small" / "two.py").write_text("def f() -> None:\n    from . import one\n", "utf-8")
    with pytest.raises(CycleError, match=r"small\.(one|two)"):
        test_no_circles("small")


@pytest.mark.parametrize(
    ("layers", "found"), [(["a", "b"], []), (["b", "a"], ["small.b.two uses small.a"]), (["a b"], ["small.b.two uses small.a"])]
)
def test_a_layer_that_uses_one_above_or_beside_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: list[str], found: list[str]
) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    (tmp_path / "small" / "b").mkdir(parents=True)
    for name, text in {
        "__init__": "from .b import one",
        "a": "",
        "b/__init__": "",
        "b/one": "",
        "b/two": "from .. import a\nfrom . import one",
    }.items():
        (tmp_path / "small" / f"{name}.py").write_text(text, "utf-8")
    assert upward("small", layers) == found
