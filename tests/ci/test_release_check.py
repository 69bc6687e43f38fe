"""What a release must be before it may go out: the set, the wheels, the manifest, and what stands on the index."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from ci import __main__ as cli
from ci.audit.checks import CHECKS
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import sha256
from ci.release import check, standing
from ci.release.dist import MANIFEST, complete, read_manifest, settle
from ci.release.index import Index, named, plan

from . import index_support
from .release_support import MATRIX, VERSION, make_dist, metadata, wheel_name, write_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINUX, *_ = MATRIX.platforms.values()
BUILD = MATRIX.builds[0]
NAME = wheel_name(LINUX, BUILD)
QUICK = ("record", "size", "tags", "licence")  # of the audit: they read the archive alone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_dist(tmp_path / "dist")


def test_complete(folder: Path) -> None:
    dist = complete(folder, expected=Version(VERSION))
    assert dist.version == Version(VERSION)
    assert len(dist.entries) == len(MATRIX.platforms) * len(MATRIX.builds)
    assert dist.entries[-1].name == NAME, "the most used wheel goes last"
    assert [entry.platform for entry in dist.entries[:: len(MATRIX.builds)]] == [*MATRIX.platforms][::-1]


def test_tags_of_older_systems_beside_the_declared_one(folder: Path) -> None:
    """auditwheel names every tag that a wheel earns."""
    (folder / NAME).rename(folder / NAME.replace("manylinux_2_28_x86_64", "manylinux_2_27_x86_64.manylinux_2_28_x86_64"))
    assert complete(folder).entries[-1].platform == LINUX.name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"mlx_cuda-{VERSION}.tar.gz", "no sdist is published"),
        ("notes.txt", "is no wheel"),
        ("mlx-1.0-py3-none-any.whl", "is of the project mlx"),
        (NAME.replace("-cp310", "-1-cp310"), "has a build number"),
        (NAME.replace("2_28", "2_34"), "is tagged manylinux_2_34_x86_64, expected one of manylinux_2_28_x86_64"),
        (NAME.replace("cp310-abi3", "cp311-cp311"), "is tagged cp311-cp311, expected cp310-abi3"),
        (NAME.replace(VERSION, "not-a-version"), "not-a-version"),
        (NAME.replace("manylinux_2_28_x86_64", "manylinux_2_17_x86_64.manylinux_2_28_x86_64"), "linux-x86_64 has 2 wheels of cp310-abi3"),
    ],
)
def test_superfluous(folder: Path, name: str, said: str) -> None:
    shutil.copy(folder / NAME, folder / name)
    with pytest.raises(CheckFailed, match="not a complete release") as failure:
        complete(folder)
    assert said in str(failure.value)


def test_missing(folder: Path) -> None:
    (folder / NAME).unlink()
    with pytest.raises(CheckFailed, match="linux-x86_64 has no wheel of cp310-abi3, expected one"):
        complete(folder)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (f"{VERSION}+local", "is a local version"),
        ("0.1.1", f"is not {MATRIX.mlx}.<n>"),
        (MATRIX.mlx, f"is not {MATRIX.mlx}.<n>"),
        (f"{MATRIX.mlx}.0", f"is not {MATRIX.mlx}.<n>"),
        (f"{VERSION}.post1", f"is not {MATRIX.mlx}.<n>"),
        (f"1!{VERSION}", f"is not {MATRIX.mlx}.<n>"),
    ],
)
def test_unfit_versions(tmp_path: Path, version: str, said: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        complete(make_dist(tmp_path, version))
    assert said in str(failure.value)


@pytest.mark.parametrize("version", [f"{VERSION}rc1", f"{VERSION}.dev202601020304", f"{MATRIX.mlx}.1"])
def test_fit_versions(tmp_path: Path, version: str) -> None:
    assert complete(make_dist(tmp_path, version), expected=Version(version)).version == Version(version)


def test_two_versions(folder: Path) -> None:
    other = f"{MATRIX.mlx}.8"
    write_wheel(folder / wheel_name(LINUX, BUILD, other), version=other)
    with pytest.raises(CheckFailed, match="there are 2 versions"):
        complete(folder)


def test_another_version_than_the_checkouts(folder: Path) -> None:
    with pytest.raises(CheckFailed, match=rf"the wheels have the version {VERSION}, expected {MATRIX.mlx}\.8, which this checkout states"):
        complete(folder, expected=Version(f"{MATRIX.mlx}.8"))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="is no folder"):
        complete(tmp_path / "missing")


def found(folder: Path) -> dict[str, str]:
    dist = complete(folder)
    findings = [*check.twine(dist), *check.wheels(dist, checks=QUICK)]
    return {finding.check: str(finding).removeprefix(f"{finding.wheel}: ").partition(f"{finding.check}: ")[2] for finding in findings}


def test_good_wheels(folder: Path) -> None:
    assert found(folder) == {}


def test_metadata_must_be_the_same_to_the_byte(folder: Path) -> None:
    write_wheel(folder / NAME, changes={"METADATA": metadata() + "\n"})
    assert found(folder) == {"same-metadata": "METADATA is not the same to the byte in all wheels"}


def test_device_code_must_be_the_same(folder: Path) -> None:
    for path in complete(folder).paths:
        write_wheel(path, package={"device/manifest.json": "{}"})
    assert found(folder) == {}
    write_wheel(folder / NAME, package={"device/manifest.json": "{ }"})
    digests = [hashlib.sha256(text).hexdigest() for text in (b"{ }", b"{}")]
    first = complete(folder).paths[0].name
    assert found(folder) == {"same-device": f"is {digests[0]}, expected the same as in {first}, {digests[1]}"}
    write_wheel(folder / NAME)
    assert found(folder)["same-device"].startswith("is nothing, expected")


def test_twine_is_strict(tmp_path: Path) -> None:
    """A description that is empty is no more than a warning otherwise."""
    changes = {"METADATA": metadata().partition("\n\n")[0] + "\n"}
    (said,) = found(make_dist(tmp_path, changes=changes)).values()
    assert "twine check --strict" in said
    assert "long_description" in said


@pytest.mark.parametrize(
    ("changes", "checks"),
    [
        ({"sboms/mlx-cuda.cdx.json": None}, {"sbom"}),
        ({"licenses/LICENSE": None}, {"licence"}),
        ({"WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n"}, {"tags"}),
    ],
)
def test_unfit_wheels(folder: Path, changes: dict[str, str | None], checks: set[str]) -> None:
    write_wheel(folder / NAME, changes=changes)
    assert set(found(folder)) == checks


def test_the_manifest_holds_the_next_run_to_the_same_wheels(folder: Path) -> None:
    path = folder / MANIFEST
    settle(complete(folder), path)
    version, entries = read_manifest(path)
    assert (version, entries) == (Version(VERSION), complete(folder).entries), "the manifest is no part of the set"
    before = path.read_bytes()
    settle(complete(folder), path)
    assert path.read_bytes() == before
    write_wheel(folder / NAME, changes={"METADATA": metadata() + "\n"})
    with pytest.raises(CheckFailed, match=f"consists of: {NAME}"):
        settle(complete(folder), path)


def test_the_manifest_is_written_whole_or_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = set(folder.iterdir())
    with pytest.raises(EnvironmentProblem, match="No space left on device"):
        settle(complete(folder), folder / MANIFEST)
    assert set(folder.iterdir()) == before


def test_a_run_that_was_killed_over_its_manifest(folder: Path) -> None:
    (folder / f".{MANIFEST}.1.part").write_text("{")
    settle(complete(folder), folder / MANIFEST)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1, "version": "x", "files": []}', '{"format": 1, "version": "1", "files": [{}]}'])
def test_damaged_manifests(tmp_path: Path, text: str) -> None:
    path = tmp_path / MANIFEST
    path.write_text(text)
    with pytest.raises(EnvironmentProblem, match="is not a manifest of a release"):
        read_manifest(path)


def test_manifest_of_another_format(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_text('{"format": 2}')
    with pytest.raises(EnvironmentProblem, match="has format 2, expected 1"):
        read_manifest(path)


def test_twines_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYPI", "TESTPYPI"):
        monkeypatch.delenv(f"MLX_CUDA_INDEX_{name}_UPLOAD", raising=False)
    assert named("pypi").target == ("--repository", "pypi")
    assert named("testpypi").target == ("--repository", "testpypi")
    assert named("pypi").simple != named("testpypi").simple


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
    with pytest.raises(EnvironmentProblem, match="MLX_CUDA_INDEX_PYPY_UPLOAD"):
        named("pypy")


def test_passwords_in_urls_are_not_shown() -> None:
    index = named("http://someone:secret@127.0.0.1:8080/")
    assert "secret" not in index.name
    assert index.simple == "http://someone:secret@127.0.0.1:8080/simple/"


class Page:
    """An index of one page, as JSON, for what pypiserver does not do."""

    def __init__(self) -> None:
        self.files: list[dict[str, object]] = []
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = json.dumps({"meta": {"api-version": "1.1"}, "name": MATRIX.name, "files": page.files}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.httpd = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.index = Index("page", (), f"http://127.0.0.1:{self.httpd.server_address[1]}/simple/", timeout=10)

    def add(self, name: str, *, sha256: str | None = "0" * 64, size: int = 1) -> None:
        url = f"{self.index.simple}{name}"
        self.files.append({"filename": name, "url": url, "hashes": {"sha256": sha256} if sha256 else {"md5": "0"}, "size": size})


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    thread = threading.Thread(target=made.httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.httpd.shutdown()
    made.httpd.server_close()
    thread.join()


def against(page: Page, *tags: str, of: str = VERSION) -> dict[str, str]:
    files = page.index.files(MATRIX.name)
    return {
        each.check: f"{each.message}\n    cure: {each.cure}"
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
    (said,) = against(page, "0.29.0").values()
    assert "mlx-cuda on page is not ours: it has versions that were never tagged here (3: 0.27.1, 0.28.0, 0.30.0)" in said
    assert "git fetch --tags" in said
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
        "version": f"{VERSION} does not sort above 1.0, which is on page: nobody would get it\n    cure: a version after 1.0"
    }


def test_development_versions_go_to_indexes_of_rehearsals_only(page: Page) -> None:
    assert against(page, of=f"{VERSION}.dev1") == {}
    page.index = replace(page.index, rehearsals=False)
    assert f"{VERSION}.dev1 is a development version, page gets releases and candidates" in against(page, of=f"{VERSION}.dev1")["version"]
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
    with pytest.raises(CheckFailed, match=r"^this release may not go out:\n  a: b\n    cure: c\n  d: e\n    cure: f$"):
        standing.report([standing.finding("a", "b", "c"), standing.finding("d", "e", "f")])


@pytest.mark.parametrize("name", ["../mlx_cuda-1.0-py3-none-any.whl", "..\\mlx.whl", ".."])
def test_names_that_lead_elsewhere(page: Page, name: str) -> None:
    page.add(name)
    with pytest.raises(EnvironmentProblem, match="lists a file that is called"):
        page.index.files(MATRIX.name)


def test_an_index_without_sha256(page: Page) -> None:
    page.add("mlx_cuda-1.0-py3-none-any.whl", sha256=None)
    with pytest.raises(EnvironmentProblem, match="without a sha256"):
        page.index.files(MATRIX.name)


def test_an_index_that_cannot_be_reached() -> None:
    with pytest.raises(EnvironmentProblem, match="cannot read the index"):
        index_support.index("http://127.0.0.1:9/", timeout=1).files(MATRIX.name)


def test_a_strangers_file_under_our_version(folder: Path, page: Page) -> None:
    page.add(f"mlx_cuda-{VERSION}-py3-none-any.whl")
    page.add(f"mlx_cuda-{VERSION}.tar.gz")
    with pytest.raises(CheckFailed, match="no file of this release") as failure:
        plan(complete(folder), page.index.files(MATRIX.name))
    assert str(failure.value).count("no file of this release") == 2


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """These wheels have no native modules, which only the audit knows; what is wrong is told, and no manifest is written."""
    monkeypatch.setattr(check, "WITHOUT_TOOLKITS", ["modules"])  # the others take seconds
    monkeypatch.setattr("ci.release.version.current", lambda _: Version(VERSION))
    arguments = ["release", "check", str(folder), "--without-toolkits", "--manifest", str(tmp_path / "m.json")]
    assert cli.main(arguments) == 1
    assert "mlx_cuda/_cu12.*: modules: is missing" in capsys.readouterr().err
    assert not (tmp_path / "m.json").exists()
    monkeypatch.setattr(check, "WITHOUT_TOOLKITS", ["record"])
    assert cli.main(arguments) == 0
    assert "nothing found" in capsys.readouterr().out
    assert read_manifest(tmp_path / "m.json")[1] == complete(folder).entries
    capsys.readouterr()
    assert cli.main([*arguments, "--index", "none", "--github"]) == 0
    assert capsys.readouterr().out == f"manifest={sha256(tmp_path / 'm.json')}\n"
    monkeypatch.setattr("ci.release.version.current", lambda _: Version("1.2"))
    assert cli.main(arguments) == 1
    assert "expected 1.2, which this checkout states" in capsys.readouterr().err


def test_what_needs_no_toolkits() -> None:
    assert {*check.WITHOUT_TOOLKITS, *check.ROOT_CHECKS} == set(CHECKS)
