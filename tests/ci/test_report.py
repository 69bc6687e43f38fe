"""The report: its data is right, the page asks nothing of a network, shows what wheels say as text, and fits a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from ci import __main__ as cli
from ci.audit import providers
from ci.audit.checks import CHECKS, SAME_METADATA
from ci.audit.wheel import read
from ci.errors import EnvironmentProblem
from ci.report import bill, page, verdict, write
from ci.report.contents import Label, examine, parts
from ci.report.libraries import ROW, Supplier, Use, layout
from ci.report.model import Report, make
from ci.report.page import SHAPES, bytes_by_kind, render, treemap
from ci.report.treemap import Box, squarify

from .audit_support import (
    CU12,
    CU13,
    DIST_INFO,
    MATRIX,
    NAMES,
    QUICK,
    Files,
    World,
    container,
    entry,
    fatbin,
    good_files,
    make_world,
    replaced,
    with_module,
    write_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOSTILE = 'mlx_cuda/"><img src=x onerror=alert(1)></style><script>alert(1)</script>\u202e\x1b[2J.py'


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks that run another process or need a real build."""
    monkeypatch.setattr(verdict, "CHECKS", {identifier: CHECKS[identifier] for identifier in QUICK})


@pytest.fixture
def wheel(tmp_path: Path, world: World, files: Files, locked_roots: None) -> Callable[..., Path]:
    """Write the good wheel after changes, into a folder of its own where several are wanted."""

    def build(*changes: Callable[[Files], None], folder: str = "new", name: str = NAMES["linux"]) -> Path:
        changed = dict(files)
        for change in changes:
            change(changed)
        return write_wheel(tmp_path / folder / name, changed)

    return build


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("windows"), "windows")


@pytest.fixture
def windows_wheel(tmp_path: Path, world: World, windows: World, locked_roots: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The same for Windows."""
    monkeypatch.setattr(providers, "site", lambda root, platform: (windows if platform.system == "windows" else world).site(root))

    def build(*changes: Callable[[Files], None]) -> Path:
        changed = good_files(windows)
        for change in changes:
            change(changed)
        return write_wheel(tmp_path / NAMES["windows"], changed)

    return build


# --------------------------------------------------------------------------------------------------------------------- treemap


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.floats(1, 2000), st.floats(1, 2000))
def test_a_treemaps_areas_are_the_sizes(sizes: list[int], width: float, height: float) -> None:
    boxes = squarify(sizes, Box(3, 5, width, height))
    for size, box in zip(sizes, boxes, strict=True):
        assert box.area == pytest.approx(size / sum(sizes) * width * height, rel=1e-6)
    assert sum(box.area for box in boxes) == pytest.approx(width * height)


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=25))
def test_a_treemaps_boxes_do_not_overlap(sizes: list[int]) -> None:
    whole = Box(0, 0, 300, 200)
    assert_apart(squarify(sizes, whole), whole)


def assert_apart(boxes: list[Box], whole: Box, slack: float = 1e-6) -> None:
    for index, box in enumerate(boxes):
        assert box.x >= whole.x - slack
        assert box.y >= whole.y - slack
        assert box.x + box.width <= whole.x + whole.width + slack
        assert box.y + box.height <= whole.y + whole.height + slack
        for other in boxes[:index]:
            across = min(box.x + box.width, other.x + other.width) - max(box.x, other.x)
            down = min(box.y + box.height, other.y + other.height) - max(box.y, other.y)
            assert min(across, down) <= slack


def test_equal_sizes_become_squares() -> None:
    assert squarify([1, 1, 1, 1], Box(0, 0, 2, 2)) == [Box(0, 0, 1, 1), Box(0, 1, 1, 1), Box(1, 0, 1, 1), Box(1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_the_treemap_holds_every_byte(wheel: Callable[..., Path], shape: Box) -> None:
    contents = examine(read(wheel()))
    groups = treemap(contents, shape)
    assert sum(group.size for group in groups) == sum(bytes_by_kind(contents).values()) == contents.unpacked
    assert sum(group.box.area for group in groups) == pytest.approx(100 * 100)
    hundred = Box(0, 0, 100, 100)
    assert_apart([group.box for group in groups], hundred)
    for group in groups:
        assert sum(cell.piece.size for cell in group.cells) == group.size
        assert_apart([cell.box for cell in group.cells], hundred)
        assert all(cell.box.area == pytest.approx(1e4 * cell.piece.size / group.size) for cell in group.cells)


def test_many_small_files_are_one_cell(wheel: Callable[..., Path]) -> None:
    path = wheel(lambda files: files.update({f"mlx_cuda/m{number:03}.py": b"x" * (200 - number) for number in range(100)}))
    contents = examine(read(path))
    (group,) = (group for group in treemap(contents, SHAPES["wide"]) if group.name == "package")
    others = len([each for each in contents.members if each.size and not each.name.startswith(DIST_INFO)]) - len(contents.modules)
    assert [cell.piece.name for cell in group.cells if cell.piece.name.endswith(" more")] == [f"{others - page.MOST} more"]
    assert len(group.cells) == page.MOST + 1
    assert sum(each.size for each in treemap(contents, SHAPES["wide"])) == contents.unpacked


def test_gpu_code_stands_together_in_the_order_of_architectures(wheel: Callable[..., Path]) -> None:
    (group,) = (group for group in treemap(examine(read(wheel())), SHAPES["wide"]) if group.name.startswith("_cu13"))
    gpu = [cell.piece.short for cell in group.cells if cell.piece.kind == "sass"]
    assert gpu == [str(each) for each in CU13.sass]
    assert [cell.piece.shade for cell in group.cells if cell.piece.kind == "sass"] == pytest.approx([rank / 6 for rank in range(7)])


# ------------------------------------------------------------------------------------------------------------- what bytes are


def test_every_byte_of_a_module_has_one_label(world: World) -> None:
    code = container([entry(2, "90a", b"\x5a" * 800), entry(1, "120", b"\x5a" * 80), entry(8, "120")]) + fatbin(["90a"], [])
    data = world.module("labels.so", CU13, gpu_code=code)
    found = {part.label: part.size for part in parts(data)}
    assert sum(found.values()) == len(data)
    assert found[Label("sass", "sm_90a", "90a")] == 864 + 88
    assert found[Label("ptx", "compute_120", "120")] == 144
    assert found[Label("other", "kind 8 for 120")] == 88
    assert found[Label("code", "host code")] > 0


def test_overlapping_sections_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from ci.report import contents

    monkeypatch.setattr(contents, "_sections", lambda _: iter([(0, 60, ".text"), (40, 1000, ".rodata"), (50, 5, ".debug_info")]))
    assert {part.label.kind: part.size for part in parts(b"x" * 100)} == {"code": 60, "data": 40}


def test_gpu_code_is_not_counted_with_the_section_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ci.report import contents

    data = b"x" * 100 + fatbin([80, 90], [])
    monkeypatch.setattr(contents, "_sections", lambda _: iter([(0, len(data), ".rodata")]))
    assert {part.label.name: part.size for part in parts(data)} == {"sm_80": 88, "sm_90": 88, "constants": 100 + 16}


def test_windows_modules_have_labels_too(windows: World) -> None:
    data = windows.module("_cu12.pyd", CU12)
    found = parts(data)
    assert sum(part.size for part in found) == len(data)
    assert {"sass", "ptx", "code", "tables"} <= {part.label.kind for part in found}


# -------------------------------------------------------------------------------------------------------------------- verdicts


def test_a_good_set(wheel: Callable[..., Path], windows_wheel: Callable[..., Path]) -> None:
    report = make([windows_wheel(), wheel()])
    assert (report.violations, report.unknown) == (0, 0)
    assert [each.contents.platform for each in report.wheels] == ["Linux x86_64", "Windows amd64"]  # in the order of the matrix
    assert [result.check for result in report.results] == [*QUICK, SAME_METADATA]
    assert len(report.absent) == len(MATRIX.platforms) * len(MATRIX.builds) - 2
    html = render(report)
    assert f"All {len(QUICK) + 1} checks passed" in html
    assert "declared, no wheel in this set" in html
    assert "code missing" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


def test_a_violation_is_shown(wheel: Callable[..., Path], world: World) -> None:
    report = make([wheel(with_module(world, gpu_code=fatbin([75, 80, 86], CU13.ptx)))])
    (result,) = (result for result in report.results if result.violations)
    assert (result.check, result.state) == ("architectures", "bad")
    html = render(report)
    assert "All " not in html.split("<main")[0]
    assert f">{len(result.violations)} violation" in html
    assert all(escape(violation.message) in html for violation in result.violations)
    states = {code.state for row in report.wheels[0].covered for pair in row.codes for code in pair}
    assert states == {"present", "absent", "missing", "surplus"}
    assert "machine code missing" in html
    assert 'class="code missing"' in html
    assert "machine code, not declared" in html


def test_code_that_some_fatbins_lack_is_partial(wheel: Callable[..., Path], world: World) -> None:
    report = make([wheel(with_module(world, gpu_code=fatbin(CU13.sass, CU13.ptx) + fatbin(CU13.sass[1:], CU13.ptx)))])
    (row,) = (row for row in report.wheels[0].covered if row.title == "CUDA 13.0")
    assert [pair[0].state for pair in row.codes] == ["partial", *["present"] * 6]
    assert "<b>1/2</b>" in render(report)


def test_a_check_that_cannot_run_here_says_so(wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_root(*_: object) -> None:
        raise EnvironmentProblem("no root", cure="install it")

    monkeypatch.setattr(verdict, "CHECKS", {"size": CHECKS["size"], "provider": no_root})
    report = make([wheel()])
    assert (report.violations, report.unknown) == (0, 1)
    html = render(report)
    assert "Not fully checked" in html
    assert "no root" in html
    assert "install it" in html
    assert "checks passed" not in html


def test_wheels_that_disagree(wheel: Callable[..., Path], windows_wheel: Callable[..., Path]) -> None:
    changed = windows_wheel(replaced(f"{DIST_INFO}/METADATA", "Requires-Python: >=3.10", "Requires-Python: >=3.11"))
    report = make([wheel(), changed])
    assert {result.check for result in report.results if result.violations} == {"metadata", SAME_METADATA}
    assert report.violations_of(NAMES["windows"]) == report.violations


def test_every_check_is_explained() -> None:
    assert verdict.proofs().keys() == {*CHECKS, SAME_METADATA}


def test_explanations_become_html() -> None:
    assert page.prose("No `a<b>` in *any* [doc](doc.md) & more") == "No <code>a&lt;b&gt;</code> in <em>any</em> doc &amp; more"


def test_the_same_wheel_twice(wheel: Callable[..., Path]) -> None:
    with pytest.raises(EnvironmentProblem, match="given twice"):
        make([wheel(), wheel(folder="again")])


# ------------------------------------------------------------------------------------------------------------------- libraries


def test_who_supplies_what(wheel: Callable[..., Path], world: World) -> None:
    stranger = world.library(world.folder / "made" / "libstranger.so.1", "int stranger(void) { return 1; }")
    uses = make([wheel(with_module(world, arguments=[stranger]))]).wheels[0].uses
    found = {(use.library, use.supplier.kind, use.supplier.name, use.directory, use.modules) for use in uses}
    both = ("_cu12.abi3.so", "_cu13.abi3.so")
    assert ("libcudart.so.13", "package", "nvidia-cuda-runtime", "nvidia/cu13/lib", both[1:]) in found
    assert ("libmlx.so", "package", "mlx-cuda-12", "mlx/lib", both[:1]) in found
    assert ("libcuda.so.1", "driver", "NVIDIA driver", "", both) in found
    assert ("libc.so.6", "system", "every Linux of the tag", "", both) in found
    assert ("libstranger.so.1", "nobody", "nobody", "", both[1:]) in found


def test_the_graphs_nodes_do_not_overlap(wheel: Callable[..., Path]) -> None:
    graph = make([wheel()]).wheels[0].graph
    boxes = [Box(node.x, node.y - node.height / 2, node.width, node.height) for node in graph.nodes]
    assert_apart(boxes, Box(0, 0, graph.width, graph.height))


def test_modules_of_the_last_library_stay_in_the_graph() -> None:
    system = Supplier("system", "Linux")
    graph = layout([Use("a", ("m",), system, ""), Use("b", ("m",), system, ""), Use("c", ("x", "y", "z"), system, "")])
    boxes = [Box(node.x, node.y - node.height / 2, node.width, node.height) for node in graph.nodes]
    assert_apart(boxes, Box(0, 0, graph.width, graph.height))


@pytest.mark.parametrize("modules", [1, 9])
def test_a_graph_with_more_modules_than_libraries(modules: int) -> None:
    names = tuple(f"m{number}.so" for number in range(modules))
    graph = layout([Use("libc.so.6", names, Supplier("system", "Linux"), "")])
    assert graph.height == ROW * modules
    assert_apart(
        [Box(node.x, node.y - node.height / 2, node.width, node.height) for node in graph.nodes], Box(0, 0, graph.width, graph.height)
    )
    assert len(graph.edges) == modules + 1


@pytest.mark.parametrize("name", ["libc.so.6", "libopenblas64_p-r0-0123456789abcdef.3.23.dev.so.0.3.0"])
def test_long_names_fit_their_box(name: str) -> None:
    shown = page.elided(name, 210)
    assert len(shown) <= 24
    assert (shown == name) == (len(name) <= 24)
    assert shown[:9] == name[:9]
    assert shown[-6:] == name[-6:]


# ---------------------------------------------------------------------------------------------------------------------- change


def test_what_changed(wheel: Callable[..., Path], world: World) -> None:
    old = with_module(world, gpu_code=fatbin([80, 90], [80]), without=["libcudnn"])
    before = wheel(old, lambda files: files.update({"mlx_cuda/old.py": b"x" * 7, "mlx_cuda/__init__.py": b"ab"}), folder="old")
    after = wheel(lambda files: files.update({"mlx_cuda/new.py": b"x" * 5}))
    changes = make([after], against=[before]).changes
    assert changes is not None
    (change,) = changes.pairs
    members = {each.name: (each.before, each.after, each.delta) for each in change.members}
    assert members["mlx_cuda/old.py"] == (7, None, -7)
    assert members["mlx_cuda/new.py"] == (None, 5, 5)
    assert members["mlx_cuda/__init__.py"] == (2, 0, -2)
    assert "mlx_cuda/_cu12.abi3.so" not in members
    parts_changed = {each.name: each.delta for each in change.parts}
    assert parts_changed["_cu13.abi3.so: sm_75"] == 88
    assert parts_changed["_cu13.abi3.so: compute_120"] == 88
    assert "_cu13.abi3.so: sm_90" not in parts_changed
    assert set(change.added) == {"_cu13.abi3.so needs libcudnn.so.9"}
    assert change.removed == ()
    assert change.download.delta == after.stat().st_size - before.stat().st_size
    html = render(make([after], against=[before]))
    assert "_cu13.abi3.so needs libcudnn.so.9" in html
    assert "Change against 0.32.4.1" in html


def test_another_version_is_compared_by_platform(
    wheel: Callable[..., Path], files: Files, windows_wheel: Callable[..., Path], tmp_path: Path
) -> None:
    renamed = {name.replace("0.32.4.1", "0.32.4.0"): data.replace(b"0.32.4.1", b"0.32.4.0") for name, data in files.items()}
    before = tmp_path / "mlx_cuda-0.32.4.0-cp310-abi3-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(before, "w") as archive:
        for name, data in renamed.items():
            archive.writestr(name, data)
    windows = windows_wheel()
    changes = make([windows, wheel()], against=[before]).changes
    assert changes is not None
    assert [pair.before.version for pair in changes.pairs] == ["0.32.4.0"]
    assert [each.name for each in changes.pairs[0].members] == [f".dist-info/{name}" for name in ("RECORD",)] or not changes.pairs[
        0
    ].members
    assert "tagged cp310-abi3-manylinux_2_28_x86_64" in changes.pairs[0].added
    assert [each.platform for each in changes.added] == ["Windows amd64"]
    assert changes.removed == ()
    back = make([windows], against=[before]).changes
    assert back is not None
    assert [each.platform for each in back.removed] == ["Linux x86_64"]


def test_no_change(wheel: Callable[..., Path]) -> None:
    report = make([wheel()], against=[wheel(folder="old")])
    assert report.changes is not None
    assert report.changes.pairs[0].same_bytes
    assert "same bytes" in render(report)


@pytest.mark.parametrize(("percent", "shown"), [(12.34, "+12.3 %"), (-5.0, "−5.0 %"), (999.0, "+999.0 %"), (1900.0, "× 20")])  # noqa: RUF001
def test_ratios(percent: float, shown: str) -> None:
    assert page.ratio(percent) == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (15 * 2**20, "15.0 MiB"), (500 * 2**20, "500 MiB")]
)
def test_sizes(number: int, shown: str) -> None:
    assert page.size(number) == shown


@pytest.mark.parametrize(
    ("number", "digits", "shown"), [(100, 0, "100"), (100, 3, "100"), (1 / 3, 3, "0.333"), (12.5, 3, "12.5"), (0, 3, "0")]
)
def test_coordinates(number: float, digits: int, shown: str) -> None:
    assert page.places(number, digits) == shown


# ------------------------------------------------------------------------------------------------------------ bill of materials


def test_the_bill_of_materials(wheel: Callable[..., Path]) -> None:
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "components": [
            {
                "type": "library",
                "name": "cccl",
                "version": "3.0",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256"}],
            },
            {"type": "application", "name": "NVRTC", "version": "12.8", "licenses": [{"expression": "A OR B"}]},
        ],
    }
    path = wheel(lambda files: files.update({f"{DIST_INFO}/sboms/x.cdx.json": json.dumps(document).encode()}))
    (found,) = make([path]).wheels[0].bills
    assert found.format == "CycloneDX 1.6"
    assert [(each.name, each.licence, each.hashed) for each in found.components] == [
        ("cccl", "Apache-2.0", True),
        ("NVRTC", "A OR B", False),
    ]
    html = render(make([path]))
    assert "2 components" in html
    assert "A OR B" in html


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"components": 5}',
        '{"components": [1, {"name": 3, "licenses": "x"}, {"licenses": [{"license": []}], "hashes": {}}]}',
        "\udcff",
    ],
)
def test_a_strange_bill_of_materials(wheel: Callable[..., Path], text: str) -> None:
    path = wheel(lambda files: files.update({f"{DIST_INFO}/sboms/x.cdx.json": text.encode("utf-8", "surrogateescape")}))
    report = make([path])
    assert isinstance(report.wheels[0].bills[0], bill.Bill)
    assert "Bill of materials" in render(report)


# -------------------------------------------------------------------------------------------------------------------- the page


class Reader(HTMLParser):
    """What a browser would see: tags, ids, links; asserts that all that is opened is closed."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] or "" for _, attributes in self.tags if attribute in attributes]


@pytest.fixture
def everything(wheel: Callable[..., Path], world: World, windows_wheel: Callable[..., Path]) -> Report:
    """A report with all that a report can have: violations, hostile names, a bill of materials, several wheels, changes."""
    sbom = {"components": [{"name": "<b>bold</b>", "licenses": [{"expression": "\ud800"}]}]}
    path = wheel(
        with_module(world, gpu_code=fatbin([75, 86], []) * 2, without=["libcudnn"]),
        lambda files: files.update({HOSTILE: b"x" * 20_000, f"{DIST_INFO}/sboms/a.cdx.json": json.dumps(sbom).encode()}),
        replaced(f"{DIST_INFO}/METADATA", "Provides-Extra: cu12", "Provides-Extra: <i>italic</i>"),
    )
    return make([path, windows_wheel()], against=[wheel(folder="old")])


def test_what_wheels_say_stays_text(everything: Report) -> None:
    html = render(everything)
    tags = {tag for tag, _ in Reader(html).tags}
    assert not tags & {"script", "img", "iframe", "object", "form", "input", "base"}
    assert "<b>bold" not in html
    assert "<i>italic" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\u202e\\x1b[2J.py" in html
    assert all(character.isprintable() or character == "\n" for character in html)


def test_the_page_is_self_contained(everything: Report) -> None:
    html = render(everything)
    reader = Reader(html)
    assert reader.values("src") == reader.values("srcset") == reader.values("xlink:href") == []
    links = reader.values("href")
    assert [link for link in links if not link.startswith("#")] == ["data:,"]
    ids = reader.values("id")
    assert len(set(ids)) == len(ids)
    assert {link.removeprefix("#") for link in links} - {"data:,"} <= set(ids)
    assert {each for value in reader.values("aria-labelledby") for each in value.split()} <= set(ids)
    assert not re.search(r"url\(|@import|https?:|\bon\w+=", re.sub(r"<(?:li|td|th)\b.*?</(?:li|td|th)>|title=\"[^\"]*\"", "", html))
    assert "default-src 'none'" in html


def test_the_page_can_be_read_aloud(everything: Report) -> None:
    html = render(everything)
    reader = Reader(html)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("table") == tags.count("caption")
    assert tags.count("h1") == 1
    assert dict(reader.tags)["html"] == {"lang": "en"}
    assert all("scope" in attributes for tag, attributes in reader.tags if tag == "th")
    assert all(
        "aria-hidden" in attributes or {"role", "aria-labelledby"} <= attributes.keys() for tag, attributes in reader.tags if tag == "svg"
    )
    assert tags.count("desc") == len(everything.wheels)


def test_the_same_wheels_give_the_same_bytes(wheel: Callable[..., Path], windows_wheel: Callable[..., Path], tmp_path: Path) -> None:
    paths = [wheel(), windows_wheel()]
    first = render(make(paths))
    os.utime(paths[0], (1, 1))
    assert render(make(paths[::-1])) == first
    assert str(tmp_path) not in first


# ------------------------------------------------------------------------------------------------------------------- the command


def test_the_command(wheel: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "page.html"
    assert cli.main(["report", str(wheel()), "-o", str(output), "--against", str(wheel(folder="old"))]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_text("utf-8").startswith("<!doctype html>\n")
    assert [each.name for each in output.parent.iterdir()] == ["page.html"]


def test_a_failure_leaves_the_old_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, broken = tmp_path / "report.html", tmp_path / NAMES["linux"]
    output.write_text("old")
    broken.write_bytes(b"no zip")
    assert cli.main(["report", str(broken), "-o", str(output)]) == 2
    assert "is not a readable wheel" in capsys.readouterr().err
    assert output.read_text() == "old"


def test_half_a_page_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "report.html"
    output.write_text("old")

    def full(self: Path, text: str, *_: object, **__: object) -> int:
        self.write_bytes(text[:3].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(EnvironmentProblem, match="No space left on device"):
        write(output, "new page")
    assert output.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write(tmp_path / "file" / "report.html", "page")


# --------------------------------------------------------------------------------------------------------------------- a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize("width", [320, 360, 390, 760, 761, 1280])
def test_nothing_scrolls_sideways(everything: Report, browser: Any, tmp_path: Path, width: int) -> None:
    (tmp_path / "report.html").write_text(render(everything), "utf-8")
    requests, messages = [], []
    tab = browser.new_page(viewport={"width": width, "height": 800})
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto((tmp_path / "report.html").as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    right = "Math.max(...[...document.querySelectorAll('main table, .graph, .treemap')].map(each => each.getBoundingClientRect().right))"
    assert tab.evaluate(right) <= width
    shown = "[...document.querySelectorAll('.treemap')].filter(each => each.offsetHeight).map(each => each.classList[1])"
    assert set(tab.evaluate(shown)) == ({"tall"} if width <= 760 else {"wide"})
    graphs, tables = (f"[...document.querySelectorAll('{name}')].some(each => each.checkVisibility())" for name in (".graph", ".uses"))
    assert (tab.evaluate(graphs), tab.evaluate(tables)) == (width > 760, width <= 760)
    assert requests == [(tmp_path / "report.html").as_uri()]
    assert messages == []
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(everything: Report, browser: Any, tmp_path: Path, scheme: str) -> None:
    """Contrast of 4.5 to 1 between ordinary text and what is behind it."""
    (tmp_path / "report.html").write_text(render(everything), "utf-8")
    tab = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    tab.goto((tmp_path / "report.html").as_uri())
    colours = tab.evaluate(
        """() => {
          const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true})
          const rgb = colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data] }
          const layers = each => each ? [...layers(each.parentElement), getComputedStyle(each).backgroundColor] : ['white']
          const behind = each => layers(each).map(rgb).at(-1)
          return [...document.querySelectorAll('main :is(h2, h3, p, th, td, small, summary, li, b), main .cell span, footer p')]
            .filter(each => each.offsetHeight && each.textContent.trim() && !each.closest('.k-ptx'))
            .map(each => [each.tagName + ' ' + each.textContent.trim().slice(0, 30), rgb(getComputedStyle(each).color), behind(each)])
        }"""
    )
    assert len(colours) > 100
    assert [name for name, text, ground in colours if contrast(text, ground) < 4.5] == []
    tab.close()


def contrast(first: list[int], second: list[int]) -> float:
    """By the Web Content Accessibility Guidelines."""

    def luminance(colour: list[int]) -> float:
        linear = [value / 255 / 12.92 if value / 255 <= 0.04045 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in colour[:3]]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)
