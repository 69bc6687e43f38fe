"""The index that a release goes to: what it is called, how it is asked, and what on it stands in the way of a release."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ci import __main__ as cli
from ci.errors import CheckFailed, EnvironmentProblem
from ci.index import Index, named
from ci.release import check, standing
from ci.release.dist import complete
from ci.release.upload import plan

from .index_support import Silent, serving
from .release_support import EXTRAS, MATRIX, VERSION, make_dist, metadata, wheel_name, write_wheel

NAME = wheel_name(next(iter(MATRIX.platforms.values())), MATRIX.builds[0])


def test_twines_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYPI", "TESTPYPI"):
        monkeypatch.delenv(f"MLX_CUDA_INDEX_{name}_UPLOAD", raising=False)
    assert named("pypi") == Index("pypi", ("--repository", "pypi"), "https://pypi.org/simple/", 30, rehearsals=False)
    assert named("testpypi") == Index("testpypi", ("--repository", "testpypi"), "https://test.pypi.org/simple/", 30, rehearsals=True)


def test_an_index_of_the_environment_may_stand_for_the_public_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_CUDA_INDEX_PYPI_UPLOAD", "http://127.0.0.1/")
    monkeypatch.setenv("MLX_CUDA_INDEX_PYPI_SIMPLE", "http://127.0.0.1/simple/")
    index = named("pypi")
    assert (index.target, index.simple) == (("--repository-url", "http://127.0.0.1/"), "http://127.0.0.1/simple/")
    assert not index.rehearsals, "it takes what the public one takes"
    assert named("testpypi").simple.endswith("/simple/")
    assert not named("pypi").rehearsals
    assert named("testpypi").rehearsals


def test_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_CUDA_INDEX_OUR_MIRROR_UPLOAD", "http://127.0.0.1/upload/")
    monkeypatch.setenv("MLX_CUDA_INDEX_OUR_MIRROR_SIMPLE", "http://127.0.0.1/simple/")
    assert named("our-mirror") == Index("our-mirror", ("--repository-url", "http://127.0.0.1/upload/"), "http://127.0.0.1/simple/")
    variables = [f"MLX_CUDA_INDEX_PYPY_{use}" for use in ("UPLOAD", "SIMPLE")]
    for variable in (None, *variables):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv(variable, "http://127.0.0.1/")
            with pytest.raises(EnvironmentProblem) as problem:
                named("pypy")
        fix = f"use pypi, testpypi, a URL, or set {' and '.join(variables)} in the environment"
        assert str(problem.value) == f"unknown index 'pypy'\n  fix: {fix}"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_passwords_in_urls_are_not_shown(scheme: str) -> None:
    url = f"{scheme}://someone:secret@127.0.0.1:8080/"
    index = named(url)
    assert (index.name, index.target) == (f"{scheme}://********@127.0.0.1:8080/", ("--repository-url", url))
    assert index.simple == f"{url}simple/"


class Page:
    """An index of one page, as JSON, for what pypiserver does not do."""

    def __init__(self) -> None:
        self.files: list[dict[str, object]] = []
        page = self

        class Handler(Silent, BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = json.dumps({"meta": {"api-version": "1.1"}, "name": MATRIX.name, "files": page.files}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.handler = Handler

    def stands_at(self, url: str) -> None:
        self.index = Index("page", (), f"{url}simple/", timeout=10)

    def add(self, name: str, *, sha256: str | None = "0" * 64, size: int | None = 1, yanked: str | bool = False) -> None:
        url, hashes = f"{self.index.simple}{name}", {"sha256": sha256} if sha256 else {"md5": "0"}
        self.files.append({"filename": name, "url": url, "hashes": hashes, "size": size, "yanked": yanked})


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    with serving(made.handler) as url:
        made.stands_at(url)
        yield made


def against(page: Page, *tags: str, of: str = VERSION) -> dict[str, str]:
    files = page.index.files(MATRIX.name)
    return {
        each.check: f"{each.message}\n    fix: {each.fix}"
        for each in standing.against(Version(of), page.index, files, tags=[*map(Version, tags)])
    }


@pytest.fixture
def real(page: Page) -> Page:
    """An index that gets releases only."""
    page.index = replace(page.index, rehearsals=False)
    return page


def test_a_free_name(real: Page) -> None:
    assert against(real) == {}


def test_a_name_of_ours(real: Page) -> None:
    real.add("mlx_cuda-0.1-py3-none-any.whl")
    assert against(real, "0.1") == {}


def test_a_name_of_others(page: Page) -> None:
    for version in ("0.27.1", "0.28.0", "0.29.0", "0.30.0"):
        page.add(f"mlx_cuda-{version}-py3-none-any.whl")
    fix = "another name, or this one from its owner: docs/factory/releasing.md; in a clone without tags: git fetch --tags"
    foreign = "it has versions that were never tagged here (3: 0.27.1, 0.28.0, 0.30.0)"
    assert against(page, "0.29.0") == {"owner": f"mlx-cuda on page is not ours: {foreign}\n    fix: {fix}"}
    page.add("mlx_cuda-0.31.0-py3-none-any.whl")
    (said,) = against(page, "0.29.0").values()
    assert "(4: …, 0.28.0, 0.30.0, 0.31.0)" in said


def test_a_name_that_was_handed_over(real: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    real.add("mlx_cuda-0.30.0-py3-none-any.whl")
    monkeypatch.setattr(standing, "load", lambda: replace(MATRIX, inherited=("0.30.0",)))
    assert against(real) == {}


def test_files_of_this_version_are_for_the_plan(real: Page) -> None:
    real.add(f"mlx_cuda-{VERSION}-py3-none-any.whl")
    real.add("no-version.txt")
    assert against(real) == {}


def test_the_version_must_be_the_newest(real: Page) -> None:
    real.add("mlx_cuda-1.0-py3-none-any.whl")
    assert against(real, "1.0") == {
        "version": f"{VERSION} does not sort above 1.0, which is on page: installers would not choose it\n    fix: a version after 1.0"
    }


def test_development_versions_go_to_indexes_of_rehearsals_only(page: Page) -> None:
    assert against(page, of=f"{VERSION}.dev1") == {}
    page.index = replace(page.index, rehearsals=False)
    fix = "--index testpypi, or a version of its own: python -m ci release stamp VERSION"
    said = f"{VERSION}.dev1 is a development version, page gets releases and candidates\n    fix: {fix}"
    assert against(page, of=f"{VERSION}.dev1") == {"version": said}
    assert against(page, of=f"{VERSION}rc1") == {}


def test_rehearsals_of_before_stand_in_nobodys_way(page: Page) -> None:
    """They were never tagged, and a development version sorts before a candidate."""
    page.add(f"mlx_cuda-{VERSION}rc1-py3-none-any.whl")
    page.add(f"mlx_cuda-{VERSION}.dev9-py3-none-any.whl")
    assert against(page, of=f"{VERSION}.dev1") == {}
    page.index = replace(page.index, rehearsals=False)
    assert set(against(page)) == {"owner"}
    assert against(page, f"{VERSION}rc1", f"{VERSION}.dev9") == {}


def test_findings_are_told_together() -> None:
    standing.report([])
    with pytest.raises(CheckFailed, match=r"^this release cannot be published:\n  a: b\n    fix: c\n  d: e\n    fix: f$"):
        standing.report([standing.finding("a", "b", "c"), standing.finding("d", "e", "f")])


def test_what_is_listed(page: Page) -> None:
    page.add("mlx_cuda-1.0-py3-none-any.whl", size=None)
    page.add("mlx_cuda-1.1.tar.gz", size=7)
    page.add("mlx_cuda.txt")
    found = page.index.files(MATRIX.name)
    assert [(each.version, each.size) for each in found] == [(Version("1.0"), 0), (Version("1.1"), 7), (None, 1)]


@pytest.mark.parametrize("name", ["../mlx_cuda-1.0-py3-none-any.whl", "..\\mlx.whl", "..", ".", ""])
def test_names_that_lead_elsewhere(page: Page, name: str) -> None:
    page.add(name)
    with pytest.raises(EnvironmentProblem) as problem:
        page.index.files(MATRIX.name)
    assert str(problem.value) == f"page lists a file that is called {name!r}\n  fix: do not use this index"


def test_an_index_without_sha256(page: Page) -> None:
    page.add(name := "mlx_cuda-1.0-py3-none-any.whl", sha256=None)
    with pytest.raises(EnvironmentProblem, match=f"^page lists {name} without a sha256\n  fix: use an index that gives one$"):
        page.index.files(MATRIX.name)


def test_an_index_that_serves_what_it_does_not_list(page: Page, tmp_path: Path) -> None:
    page.add(name := "mlx_cuda-1.0-py3-none-any.whl")
    with pytest.raises(CheckFailed, match=f"^page serves other bytes of {name} than it lists: .*{'0' * 64}"):
        page.index.fetch(page.index.files(MATRIX.name)[0], tmp_path)


def test_what_is_yanked_and_newer_stands_in_nobodys_way(real: Page) -> None:
    """Installers pass it over: this version is what they get. A version of which one file is left is one all the same."""
    for tag in ("py3", "cp313"):
        real.add(f"mlx_cuda-1.0-{tag}-none-any.whl", yanked="broken")
    assert against(real, "1.0") == {}
    real.files[0]["yanked"] = False
    assert set(against(real, "1.0")) == {"version"}


def test_what_is_yanked_still_says_whose_the_name_is(real: Page) -> None:
    real.add("mlx_cuda-0.1-py3-none-any.whl", yanked=True)
    assert set(against(real)) == {"owner"}


@pytest.mark.parametrize("yanked", [True, "a bad build", ""])
def test_a_release_that_was_yanked(tmp_path: Path, page: Page, yanked: str | bool) -> None:
    """It is there, byte-identical, but installers skip it."""
    dist = complete(make_dist(tmp_path))
    for entry in dist.entries:
        page.add(entry.name, sha256=entry.sha256, yanked=yanked if entry.name == NAME else False)
    with pytest.raises(CheckFailed) as failure:
        plan(dist, page.index.files(MATRIX.name))
    fix = "find out why they were yanked; un-yank them on the index, or release a new version"
    assert str(failure.value) == f"version {VERSION} was yanked, so installers skip it: {NAME}\n  fix: {fix}"


def test_a_digest_in_upper_case_is_the_same_digest(tmp_path: Path, page: Page) -> None:
    dist = complete(make_dist(tmp_path))
    for entry in dist.entries:
        page.add(entry.name, sha256=entry.sha256.upper())
    assert plan(dist, page.index.files(MATRIX.name)).missing == ()


@pytest.mark.parametrize("digest", ["0" * 63, "g" * 64, "0" * 64 + "\n"])
def test_a_digest_that_is_none(page: Page, digest: str) -> None:
    page.add(name := "mlx_cuda-1.0-py3-none-any.whl", sha256=digest)
    with pytest.raises(EnvironmentProblem, match=f"^page lists {name} with the sha256 '"):
        page.index.files(MATRIX.name)


@pytest.mark.parametrize("last", ["0" * 64, "1" * 64])
def test_a_name_that_is_listed_twice(page: Page, last: str) -> None:
    """Which of them an installer takes nobody knows; the last one would have hidden the others from us."""
    page.add(NAME, sha256="0" * 64)
    page.add(NAME, sha256=last)
    with pytest.raises(EnvironmentProblem) as problem:
        page.index.files(MATRIX.name)
    fix = "ask its owner which one is right; do not use it until then"
    assert str(problem.value) == f"page lists {NAME} 2 times\n  fix: {fix}"


def test_a_file_of_another_project_has_no_version_here(page: Page) -> None:
    page.add("evil-99-py3-none-any.whl")
    assert [each.version for each in page.index.files(MATRIX.name)] == [None]
    assert against(page) == {}


def test_a_strangers_file_under_our_version(tmp_path: Path, page: Page) -> None:
    page.add(f"mlx_cuda-{VERSION}-py3-none-any.whl")
    page.add(f"mlx_cuda-{VERSION}.tar.gz")
    page.add(NAME)
    with pytest.raises(CheckFailed) as failure:
        plan(dist := complete(make_dist(tmp_path)), page.index.files(MATRIX.name))
    fix = "an index accepts no other bytes under a used name: find out whose files these are, and release a new version"
    assert str(failure.value).split("\n  ") == [
        f"version {VERSION} is on the index already, and differs:",
        f"{NAME}: the index has other bytes, sha256 {'0' * 64}, expected {dist.entries[-1].sha256}",
        *(
            f"mlx_cuda-{VERSION}{rest}: is on the index under {VERSION}, but no file of this release"
            for rest in ("-py3-none-any.whl", ".tar.gz")
        ),
        f"fix: {fix}",
    ]


def test_the_command_asks_the_index(
    tmp_path: Path, page: Page, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there already, what stands against the version, and what each extra requires of the Python that is the oldest."""
    asked = []

    def note(extras: dict[str, Any], python: str) -> list[Any]:
        asked.append((extras, python))
        return [standing.finding("dependencies", "no mlx", "wait")]

    monkeypatch.setattr("ci.release.dependencies.dependencies", note)
    monkeypatch.setattr("ci.release.version.current", lambda _: Version(VERSION))
    monkeypatch.setattr(standing, "tagged", lambda _: {Version("99")})
    for path in complete(folder := make_dist(tmp_path)).paths:
        changes = {"METADATA": metadata(requires="innocent==1.0").replace("3.10", "3.11")}
        write_wheel(path, changes=changes)
    page.add("mlx_cuda-99-py3-none-any.whl")
    monkeypatch.setattr(check, "twine", lambda _: ())
    monkeypatch.setattr(check, "WITHOUT_TOOLKITS", ["record"])
    arguments = ["release", "check", str(folder), "--without-toolkits", "--index", page.index.simple.removesuffix("simple/")]
    assert cli.main(arguments) == 1
    words = [line.split(":")[0].strip() for line in capsys.readouterr().err.splitlines()]
    assert words == ["error", "version", "fix", "dependencies", "fix"]
    assert asked == [({extra: [Requirement("innocent==1.0")] for extra in EXTRAS}, "3.11")]
    page.add(NAME)
    assert cli.main(arguments) == 1
    assert f"error: version {VERSION} is on the index already, and differs:" in capsys.readouterr().err
