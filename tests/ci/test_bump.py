"""``python -m ci bump``: every file that names the pinned MLX moves with it, all of them or none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ci import __main__ as cli
from ci import index, matrix
from ci.errors import CheckFailed, EnvironmentProblem
from ci.maintain import bump, tools
from ci.matrix import package_table
from ci.release import version
from ci.toolkit.roots import Root

OLD = matrix.load().mlx
NEW = "99.1.0"
VERSION = (matrix.REPOSITORY / version.PACKAGE).read_text("utf-8").split('"')[-2]
LOCKS = {f"ci/toolkit/locks/{root}.txt" for root in ("mlx-cu12", "mlx-cu13")}
TOOLS = "requirements/lint.txt"  # of the tools' locks the only one that holds MLX
FILES = {path.as_posix() for path in (version.PROJECT, bump.MATRIX, bump.TOOLKITS, version.PACKAGE, bump.LIBRARIES)} | LOCKS | {TOOLS}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for file in FILES | {"requirements/uv.txt"}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(matrix.REPOSITORY / file, tmp_path / file)
    return tmp_path


def contents(tree: Path) -> dict[str, bytes]:
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def locked(root: Root) -> str:
    return f"locked {' '.join(root.packages)}\n"


def relocked(project: str, keep: Iterable[Requirement]) -> dict[Path, str]:
    """As uv would: everything as it was, but for MLX, and a wheel that was added to a release of uv."""
    mlx = re.findall(r'"mlx==(\S+)"', project)[-1]
    texts = {Path(file): (matrix.REPOSITORY / file).read_text("utf-8") for file in (TOOLS, "requirements/uv.txt")}
    texts[Path("requirements/uv.txt")] += "    --hash=sha256:0\n"
    return {path: re.sub(r"^(mlx[\w-]*==)\S+", rf"\g<1>{mlx}", text, flags=re.MULTILINE) for path, text in texts.items()}


def bumped(tree: Path) -> bump.Bump:
    result = bump.plan(tree, NEW, locked, relocked)
    bump.write(tree, result.texts)
    return result


def test_only_the_versions_change(tree: Path) -> None:
    def moved(quoted: re.Match[str]) -> str:  # a comment says what was true of the old one
        return quoted[0].replace(f'"{VERSION}"', f'"{NEW}.1"').replace(OLD, NEW)

    before = contents(tree)
    result = bumped(tree)
    assert {path.as_posix() for path in result.texts} == FILES
    for file in FILES - LOCKS - {TOOLS}:  # comments, order and layout are as they were
        expected = re.sub(r'"[^"\n]*"', moved, before[file].decode())
        assert (tree / file).read_text("utf-8") == expected, file


def test_the_version_starts_again_at_one(tree: Path) -> None:
    result = bumped(tree)
    assert result.version == f"{NEW}.1"
    assert f'version = "{NEW}.1"\n' in (tree / version.PROJECT).read_text()
    assert f'__version__ = "{NEW}.1"\n' in (tree / version.PACKAGE).read_text()


def test_what_repeats_the_matrix_still_equals_it(tree: Path) -> None:
    bumped(tree)
    moved = matrix.parse((tree / bump.MATRIX).read_text())
    assert moved.mlx == NEW
    assert (tree / bump.LIBRARIES).read_text() == package_table.render(moved)
    project = (tree / version.PROJECT).read_text()
    for cuda in moved.cuda.values():
        assert all(f'"{requirement}"' in project for requirement in cuda.requires)
        assert f"mlx-cuda-{cuda.major}=={NEW}" in cuda.requires


def test_only_the_roots_of_mlx_are_locked_again(tree: Path) -> None:
    asked = []
    bump.plan(tree, NEW, lambda root: asked.append(root.packages) or locked(root), relocked)  # type: ignore[func-returns-value]
    assert asked == [(f"mlx-cuda-12=={NEW}",), (f"mlx-cuda-13=={NEW}",)]


def test_the_pinned_one_changes_nothing_but_a_lock_that_differs(tree: Path) -> None:
    result = bump.plan(tree, OLD, lambda root: (tree / "ci/toolkit/locks" / root.lock_file.name).read_text(), relocked)
    assert result.texts == {}
    assert bump.plan(tree, OLD, locked, relocked).texts.keys() == {Path(file) for file in LOCKS}


def test_a_second_release_for_the_same_mlx_keeps_its_number(tree: Path) -> None:
    project = tree / version.PROJECT
    project.write_text(project.read_text().replace(VERSION, f"{OLD}.7"))
    assert bump.plan(tree, OLD, locked, relocked).version == f"{OLD}.7"


def test_an_older_one_is_refused(tree: Path) -> None:
    with pytest.raises(CheckFailed, match="older than the pinned"):
        bump.plan(tree, "0.1", locked, relocked)


def test_nothing_is_written_when_locking_fails(tree: Path) -> None:
    def refuse(*_: object) -> Any:
        raise EnvironmentProblem("no wheel for win-amd64")

    before = contents(tree)
    for resolve, relock in ((refuse, relocked), (locked, refuse)):
        with pytest.raises(EnvironmentProblem):
            bump.plan(tree, NEW, resolve, relock)
        assert contents(tree) == before


def test_of_the_tools_only_mlx_moves(tree: Path) -> None:
    given: list[tuple[str, list[str]]] = []

    def relock(project: str, keep: Iterable[Requirement]) -> dict[Path, str]:
        given.append((project, [str(pin) for pin in keep]))
        return relocked(project, keep)

    held = [str(pin) for text in tools.read(tree).values() for pin in tools.pins(text)]
    result = bump.plan(tree, NEW, locked, relock)
    ((project, kept),) = given
    assert f'"mlx=={NEW}"' in project
    assert kept == [pin for pin in held if not pin.startswith("mlx")]
    assert any(pin.startswith("uv==") for pin in kept)
    assert Path(TOOLS) in result.texts
    assert Path("requirements/uv.txt") not in result.texts


def relocked_otherwise(monkeypatch: pytest.MonkeyPatch, tree: Path) -> Path:
    """A tree whose tools may move: ruff, in the one file that this gives."""
    path = Path("requirements/lint.txt")

    def resolve(project: str, keep: list[Requirement]) -> dict[Path, str]:
        assert keep == []
        assert project == (tree / version.PROJECT).read_text("utf-8")
        return tools.read(tree) | {path: re.sub(r"^ruff==\S+", "ruff==99", (tree / path).read_text("utf-8"), flags=re.MULTILINE)}

    monkeypatch.setattr(matrix, "REPOSITORY", tree)
    monkeypatch.setattr(tools, "resolve", resolve)
    return path


def test_newer_tools(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = relocked_otherwise(monkeypatch, tree)
    before = contents(tree)
    assert cli.main(["bump", "--tools", "--check"]) == 1
    said = capsys.readouterr().out
    assert re.fullmatch(r"ruff [\d.]+ -> 99\nrequirements/lint\.txt\n", said)
    assert contents(tree) == before
    assert cli.main(["bump", "--tools"]) == 0
    assert capsys.readouterr().out == said
    assert {file for file, data in contents(tree).items() if data != before[file]} == {path.as_posix()}
    assert b"\nruff==99 " in contents(tree)[path.as_posix()]
    for check in ([], ["--check"]):
        assert cli.main(["bump", "--tools", *check]) == 0
        assert capsys.readouterr().out == "the tools are pinned: nothing to do\n"


def test_tools_are_kept(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, so that nothing moves but what was added."""
    kept: list[Requirement] = []

    def resolve(_: str, keep: list[Requirement]) -> dict[Path, str]:
        kept.extend(keep)
        return tools.read(tree)

    monkeypatch.setattr(matrix, "REPOSITORY", tree)
    monkeypatch.setattr(tools, "resolve", resolve)
    assert cli.main(["bump", "--tools", "kept"]) == 0
    assert kept == [pin for text in tools.read(tree).values() for pin in tools.pins(text)]
    assert "nothing to do" in capsys.readouterr().out


def test_a_group_that_is_new_gets_its_file(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "REPOSITORY", tree)
    monkeypatch.setattr(tools, "resolve", lambda *_: {Path("requirements/other.txt"): "a==1 \\\n"})
    assert cli.main(["bump", "--tools"]) == 0
    assert contents(tree)["requirements/other.txt"] == b"a==1 \\\n"


@pytest.mark.parametrize("arguments", [[], ["--mlx", OLD, "--tools"], ["--tools", "new"]])
def test_either_mlx_or_the_tools(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bump", *arguments])
    assert "--tools" in capsys.readouterr().err


def test_a_project_that_is_not_built_for_mlx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bump, "pinned", lambda _: ("", []))
    assert cli.main(["bump", "--mlx", "newest"]) == 2
    assert capsys.readouterr().err.startswith("error: ci/matrix/matrix.toml pins no MLX\n  fix: ")


def test_optional_keys_of_a_project(tree: Path) -> None:
    (tree / version.PROJECT).write_text('[project]\nversion = "1"\n', "utf-8")
    assert bump.pinned(tree)[1] == []


def test_newest_is_one_that_all_packages_have_for_all_platforms() -> None:
    found = {
        "mlx": {Version("2"): {"a", "b"}, Version("1"): {"a", "b"}, Version("0.9"): {"a", "b"}},
        "backend": {Version("3"): {"a", "b"}, Version("2"): {"a"}, Version("1"): {"a", "b"}, Version("1.5rc1"): {"a", "b"}},
    }
    assert bump.newest(found, ["a", "b"], found.__getitem__) == "1"
    assert bump.newest(found, ["a"], found.__getitem__) == "2"
    with pytest.raises(CheckFailed, match="no release that all of mlx, backend have for c"):
        bump.newest(found, ["c"], found.__getitem__)


def test_prereleases_are_not_taken() -> None:
    assert bump.newest(["mlx"], ["a"], lambda _: {Version("2rc1"): {"a"}, Version("1"): {"a"}}) == "1"


@pytest.mark.parametrize(
    ("mlx", "version"),
    [
        ("0.33.0", "0.33.0.1"),
        ("0.33.0rc1", "0.33.0.1rc1"),
        ("0.33.0.dev5", "0.33.0.1.dev5"),
        ("0.33.0.post2", "0.33.0.1.post2"),
    ],
)
def test_the_first_version_for_an_mlx(mlx: str, version: str) -> None:
    assert bump.first(Version(mlx)) == version
    assert Version(version).release[:-1] == Version(mlx).release
    assert Version(version).is_prerelease == Version(mlx).is_prerelease


def test_one_for_a_pre_release_is_a_pre_release(tree: Path) -> None:
    assert bump.plan(tree, f"{NEW}rc1", locked, relocked).version == f"{NEW}.1rc1"


def test_what_the_index_has(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["1-py3-none-manylinux_2_35_x86_64.whl", "1-py3-none-win_amd64.whl", "1-py3-none-macosx_14_0_arm64.whl", "1.tar.gz", "2.tar.gz"]
    files = [(f"mlx-{name}", False) for name in names] + [("mlx-1-py3-none-manylinux_2_35_aarch64.whl", True)]
    remotes = tuple(index.Remote(name, Version("1"), "", 0, yanked=yanked) for name, yanked in files)
    monkeypatch.setattr(index.Index, "files", lambda *_: remotes)
    assert bump.on_index("mlx") == {Version("1"): {"linux-x86_64", "win-amd64"}}


@pytest.mark.parametrize(("found", "code"), [(OLD, 0), (NEW, 1)])
def test_check_says_whether_one_is_due(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: str, code: int) -> None:
    platforms = set(matrix.load().platforms)
    monkeypatch.setattr(bump, "on_index", lambda _: {Version(found): platforms})
    monkeypatch.setattr(bump, "write", lambda *_: pytest.fail("--check writes nothing"))
    assert cli.main(["bump", "--mlx", "newest", "--check"]) == code
    assert capsys.readouterr().out == (f"mlx {OLD} is pinned, {found} is due\n" if code else f"mlx {OLD} is pinned\n")


def test_no_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bump", "--mlx", "next"]) == 2
    assert "give one such as" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
def test_the_pinned_one_is_what_the_index_has(capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: (matrix.REPOSITORY / file).read_bytes() for file in FILES}
    assert cli.main(["bump", "--mlx", OLD]) == 0
    assert {file: (matrix.REPOSITORY / file).read_bytes() for file in FILES} == before
    assert capsys.readouterr().out == f"mlx {OLD} is pinned: nothing to do\n"
