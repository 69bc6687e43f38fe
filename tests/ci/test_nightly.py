"""The nightly channel: what the site is, what of the old one is kept, and what real pip and real uv get from a server of plain files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from packaging.version import Version
from pypi_simple import ProjectPage

from ci import __main__ as cli
from ci import nightly
from ci.files import sha256
from ci.index import Index, client
from ci.nightly.wheels import stamp
from ci.toolkit import uv
from ci.trial.fresh import Fresh

from . import index_support
from .release_support import MATRIX, make_dist, metadata, wheel_name, write_innocent, write_wheel
from .site_support import pages

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

NIGHTS = [f"{MATRIX.mlx}.2.dev2026112{day}1031" for day in range(1, 5)]
PROJECT = Path("simple") / MATRIX.name
LINUX = MATRIX.platforms["linux-x86_64"]
URL = "https://example.org/mlx"


def dist(folder: Path, version: str) -> Path:
    """One wheel of a night, which requires something of the usual index."""
    write_wheel(folder / name(version), version=version, changes={"METADATA": metadata(version, requires='innocent; extra == "cpu"')})
    return folder


def name(version: str) -> str:
    return wheel_name(LINUX, MATRIX.builds[0], version)


def make(tmp_path: Path, version: str, *options: str, code: int = 0) -> Path:
    """Make the site of a night, by the command."""
    output = tmp_path / f"site-{version}"
    assert (
        cli.main(["nightly", str(dist(tmp_path / version, version)), "-o", str(output), *(options or ("--url", URL, "--history", "new"))])
        == code
    )
    assert output.exists() == (code == 0)
    assert not list(tmp_path.glob(".partial-*"))
    return output


def held(site: Path) -> list[str]:
    """The versions on the site, the newest first."""
    versions: list[str] = json.loads((site / PROJECT / "index.json").read_text("utf-8"))["versions"]
    assert {path.name for path in (site / PROJECT).glob("*.whl")} == {name(version) for version in versions}
    return versions


def test_the_simple_api_of_a_whole_night(tmp_path: Path) -> None:
    folder = make_dist(tmp_path / "dist", NIGHTS[0])
    assert cli.main(["nightly", str(folder), "-o", str(tmp_path / "made" / "site"), "--url", URL, "--history", "new"]) == 0
    project = tmp_path / "made" / "site" / PROJECT
    page = ProjectPage.from_json_data(json.loads((project / "index.json").read_text("utf-8")), f"{URL}/{PROJECT.as_posix()}/")
    assert (page.project, page.versions, page.repository_version) == (MATRIX.name, [NIGHTS[0]], "1.1")
    assert {each.filename for each in page.packages} == {path.name for path in folder.iterdir()}
    for each in page.packages:
        path = project / each.filename
        assert path.read_bytes() == (folder / each.filename).read_bytes()
        assert (each.url, each.size, each.digests) == (f"{page_url()}{each.filename}", path.stat().st_size, {"sha256": sha256(path)})
        assert each.upload_time == datetime(2026, 11, 21, 10, 31, tzinfo=timezone.utc)
        assert each.requires_python == ">=3.10"
        text = (project / f"{each.filename}.metadata").read_bytes()
        assert text.decode() == metadata(NIGHTS[0])
        assert each.metadata_digests == {"sha256": hashlib.sha256(text).hexdigest()}
    html = ProjectPage.from_html(MATRIX.name, (project / "index.html").read_text("utf-8"), page_url())
    assert [(each.filename, each.url, each.digests, each.requires_python, each.metadata_digests) for each in html.packages] == [
        (each.filename, each.url, each.digests, each.requires_python, each.metadata_digests) for each in page.packages
    ]
    assert f'href="{MATRIX.name}/"' in (project.parent / "index.html").read_text("utf-8")


def page_url() -> str:
    return f"{URL}/{PROJECT.as_posix()}/"


def test_the_page_for_people(tmp_path: Path) -> None:
    site = make(tmp_path, NIGHTS[0], "--url", f"{URL}/", "--history", "new")
    text = (site / "index.html").read_text("utf-8")
    assert f"<b>{NIGHTS[0]}</b>" in text
    assert "21 November 2026, 10:31 UTC" in text
    assert f"uv pip install --index {URL}/simple/ " in text
    for link in re.findall(r'href="([^"]+)"', text):  # whatever folder it is in, and nothing from elsewhere
        assert (site / link).exists(), link
    assert not re.search(r"<(script|img|link)|url\(", text)


def test_the_page_links_the_documentation_that_is_built_beside_it(tmp_path: Path) -> None:
    site = make(tmp_path, NIGHTS[0], "--url", URL, "--history", "new", "--docs")
    assert 'href="docs/"' in (site / "index.html").read_text("utf-8")
    assert 'href="docs/"' not in (make(tmp_path, NIGHTS[1], "--url", URL, "--history", "new") / "index.html").read_text("utf-8")


@pytest.fixture
def plain(monkeypatch: Patch, tmp_path: Path) -> None:
    """No setting of this machine's user reaches pip and uv."""
    for variable in os.environ:
        if variable.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(variable)
    for variable, value in {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def usual(plain: None, tmp_path: Path, monkeypatch: Patch) -> Iterator[str]:
    """The index that everything else comes from, with a stranger's package of our name and a higher version."""
    folder = make_dist(tmp_path / "usual", "99.0.0.1")
    write_innocent(folder, "ours")
    with index_support.server(folder) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}simple/")
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{url}simple/")
        yield f"{url}simple/"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Two nights, served; and what is asked of the server."""
    make(tmp_path, NIGHTS[0])
    with pages(tmp_path / f"site-{NIGHTS[0]}") as (url, _):
        site = make(tmp_path, NIGHTS[1], "--url", url)
    with pages(site) as (url, seen):
        yield f"{url}/simple/", seen


def pip(fresh: Fresh, *arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--python", str(fresh.python), "--disable-pip-version-check", "install", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def installed(fresh: Fresh) -> str:
    return fresh.run("-c", f"from importlib.metadata import version; import innocent; print(version({MATRIX.name!r}))").stdout.strip()


FILE = f"/project/{PROJECT.as_posix()}/{name(NIGHTS[1])}"


linux = pytest.mark.skipif(sys.platform != "linux", reason="the small wheels are for Linux")


@pytest.mark.nightly
@linux
def test_pip(usual: str, served: tuple[str, list[str]], tmp_path: Path) -> None:
    url, seen = served
    fresh = Fresh.make(tmp_path / "environment", python=sys.executable)
    pip(fresh, "--dry-run", "--no-deps", "--pre", "--index-url", url, MATRIX.name)
    assert seen == [f"/project/{PROJECT.as_posix()}/", f"{FILE}.metadata"]  # it resolves without the wheel
    pip(fresh, "--no-deps", "--pre", "--index-url", url, MATRIX.name)
    assert seen[-1] == FILE
    pip(fresh, f"{MATRIX.name}[cpu]")  # from the usual index, where a stranger's is newer
    assert installed(fresh) == NIGHTS[1]


@pytest.mark.nightly
@linux
def test_why_not_pips_extra_index(usual: str, served: tuple[str, list[str]], tmp_path: Path) -> None:
    fresh = Fresh.make(tmp_path / "environment", python=sys.executable)
    assert "99.0.0.1" in pip(fresh, "--dry-run", "--no-deps", "--pre", "--extra-index-url", served[0], MATRIX.name)


@linux
def test_uv(usual: str, served: tuple[str, list[str]], tmp_path: Path) -> None:
    url, seen = served
    fresh = Fresh.make(tmp_path / "environment", python=sys.executable)
    fresh.install(f"{MATRIX.name}[cpu]", options=["--index", url])
    assert installed(fresh) == NIGHTS[1]
    asked = [path for path in seen if name(NIGHTS[1]) in path]
    assert asked == [f"{FILE}.metadata", FILE]


@linux
def test_a_project_of_uv(usual: str, served: tuple[str, list[str]], tmp_path: Path) -> None:
    url, seen = served
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "user"\nversion = "0"\nrequires-python = ">=3.10"\ndependencies = ["{MATRIX.name}[cpu]"]\n'
        f'[tool.uv]\nenvironments = ["sys_platform == \'linux\'"]\n[tool.uv.sources]\n{MATRIX.name} = {{ index = "nightly" }}\n'
        f'[[tool.uv.index]]\nname = "nightly"\nurl = "{url}"\nexplicit = true\n'
    )
    command = [uv.executable(), "lock", "--quiet", "--python", sys.executable]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "UV_NO_CONFIG": "0"})
    lock = (tmp_path / "uv.lock").read_text("utf-8")
    assert f'version = "{NIGHTS[1]}"\nsource = {{ registry = "{url}" }}' in lock
    assert f'name = "innocent"\nversion = "1.0"\nsource = {{ registry = "{usual}" }}' in lock
    assert not [path for path in seen if "innocent" in path]


@linux
@pytest.mark.parametrize("spoiled", ["", ".metadata"])
def test_other_bytes_than_listed(plain: None, served: tuple[str, list[str]], tmp_path: Path, spoiled: str) -> None:
    path = tmp_path / f"site-{NIGHTS[1]}" / PROJECT / f"{name(NIGHTS[1])}{spoiled}"
    path.write_bytes(path.read_bytes() + b"\n")
    fresh = Fresh.make(tmp_path / "environment", python=sys.executable)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        pip(fresh, "--no-deps", "--pre", "--index-url", served[0], MATRIX.name)
    assert "DO NOT MATCH THE HASHES" in failed.value.stderr


@pytest.fixture
def old(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A site of three nights, served, and its URL."""
    site = make(tmp_path, NIGHTS[0])
    for version in NIGHTS[1:3]:
        with pages(site) as (url, _):
            site = make(tmp_path, version, "--url", url)
    with pages(site) as (url, _):
        yield site, url


def test_nights_are_kept(old: tuple[Path, str], tmp_path: Path) -> None:
    site = make(tmp_path, NIGHTS[3], "--url", old[1])
    assert held(site) == NIGHTS[::-1]
    for wheel in map(name, NIGHTS[:3]):
        for file in (wheel, f"{wheel}.metadata"):
            assert (site / PROJECT / file).read_bytes() == (old[0] / PROJECT / file).read_bytes()


def test_a_file_that_is_listed_twice(old: tuple[Path, str], tmp_path: Path, capsys: Capture) -> None:
    page = old[0] / PROJECT / "index.html"
    page.write_text(page.read_text("utf-8") * 2, "utf-8")
    make(tmp_path, NIGHTS[3], "--url", old[1], code=2)
    said = capsys.readouterr().err
    assert re.search(r"lists mlx_cuda-\S+\.whl 2 times\n  fix: run again; .* --history new", said)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_oldest_go(old: tuple[Path, str], tmp_path: Path, keep: int) -> None:
    assert held(make(tmp_path, NIGHTS[3], "--url", old[1], "--keep", str(keep))) == NIGHTS[: -keep - 1 : -1]


def test_seven_are_kept(tmp_path: Path) -> None:
    site = make(tmp_path, NIGHTS[0])
    for day in range(2, 10):
        with pages(site) as (url, _):
            site = make(tmp_path, f"{MATRIX.mlx}.2.dev2026112{day}1031", "--url", url)
    assert len(held(site)) == nightly.KEEP == 7


def test_a_new_history(old: tuple[Path, str], tmp_path: Path) -> None:
    assert held(make(tmp_path, NIGHTS[3], "--url", old[1], "--history", "new")) == [NIGHTS[3]]


def test_the_same_night_again(old: tuple[Path, str], tmp_path: Path, capsys: Capture) -> None:
    """As when a job is run again; its wheels are the newer ones."""
    shutil.rmtree(tmp_path / NIGHTS[2])
    old[0].rename(tmp_path / "served")
    with pages(tmp_path / "served") as (url, _):
        assert held(make(tmp_path, NIGHTS[2], "--url", url)) == NIGHTS[2::-1]
    assert f"'{name(NIGHTS[2])}' is not older than {NIGHTS[2]}" in capsys.readouterr().err


class Bytes(int):
    """A limit in bytes, where MiB are shifted."""

    def __lshift__(self, bits: int) -> int:
        return int(self)


@pytest.mark.parametrize(("spare", "kept"), [(0, 3), (-1, 2)])
def test_as_many_as_have_room(old: tuple[Path, str], tmp_path: Path, monkeypatch: Patch, capsys: Capture, spare: int, kept: int) -> None:
    sizes = [(tmp_path / version / name(version)).stat().st_size for version in NIGHTS[1:3]]
    limit = sum(sizes) + dist(tmp_path / NIGHTS[3], NIGHTS[3]).joinpath(name(NIGHTS[3])).stat().st_size + spare
    monkeypatch.setattr(nightly, "LIMIT_MIB", Bytes(limit))
    assert held(make(tmp_path, NIGHTS[3], "--url", old[1])) == NIGHTS[: -kept - 1 : -1]
    assert "and older versions do not fit" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_a_night_that_is_too_large(tmp_path: Path, monkeypatch: Patch, capsys: Capture, code: int) -> None:
    size = (dist(tmp_path / NIGHTS[0], NIGHTS[0]) / name(NIGHTS[0])).stat().st_size
    monkeypatch.setattr(nightly, "LIMIT_MIB", Bytes(size - code))
    make(tmp_path, NIGHTS[0], code=code)
    assert ("the new wheels alone have more than" in capsys.readouterr().err) == bool(code)


def test_the_limit_is_below_that_of_pages() -> None:
    assert 500 < nightly.LIMIT_MIB < 10**9 / 2**20


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def lied_about(path: Path) -> None:
    """Spoilt, and listed with the digest of what it is now."""
    before = sha256(path)
    path.write_bytes(b"no wheel")
    relist(path, before, sha256(path))


def of_another(path: Path) -> None:
    before = sha256(path)
    write_wheel(path, changes={"METADATA": metadata("1.0").replace("mlx-cuda", "evil")}, version=NIGHTS[0])
    relist(path, before, sha256(path))


def relist(path: Path, old: str, new: str) -> None:
    page = path.with_name("index.html")
    page.write_text(page.read_text("utf-8").replace(old, new), "utf-8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoil, "serves other bytes"),
        (lied_about, "not a readable wheel"),
        (of_another, "METADATA names evil 1.0"),
        (Path.unlink, "404"),
    ],
)
def test_an_old_wheel_that_is_not_what_it_should_be(
    old: tuple[Path, str], tmp_path: Path, capsys: Capture, change: Callable[[Path], None], said: str
) -> None:
    change(old[0] / PROJECT / name(NIGHTS[1]))
    assert held(make(tmp_path, NIGHTS[3], "--url", old[1])) == [NIGHTS[3], NIGHTS[2], NIGHTS[0]]
    error = capsys.readouterr().err
    assert "left out: " in error
    assert said in error


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (name(NIGHTS[1]).replace("mlx_cuda", "mlx"), "is of the project mlx"),
        (name(f"{MATRIX.mlx}.1"), "expected one such as"),
        (name(f"{MATRIX.mlx}.1.dev5"), "expected one such as"),
        (name(f"{MATRIX.mlx}.1.dev202613211031"), "expected one such as"),
        (name(f"{NIGHTS[1]}+local"), "expected one such as"),
        (name(NIGHTS[3].replace("2026", "2099")), "is not older than"),
        (name(NIGHTS[1]).replace("manylinux_2_28_x86_64", "any"), "is tagged any"),
        (name(NIGHTS[1]).replace("manylinux", "&lt;b&gt;.manylinux"), "has characters"),
        ("mlx_cuda-1.tar.gz", "is no wheel"),
    ],
)
def test_what_is_none_of_the_channel(old: tuple[Path, str], tmp_path: Path, capsys: Capture, listed: str, said: str) -> None:
    page = old[0] / PROJECT / "index.html"
    page.write_text(page.read_text("utf-8").replace("<body>", f'<body><a href="elsewhere#sha256={"0" * 64}">{listed}</a>'), "utf-8")
    assert held(make(tmp_path, NIGHTS[3], "--url", old[1])) == NIGHTS[::-1]
    error = capsys.readouterr().err
    assert "left out: " in error
    assert said in error


def test_a_site_that_does_not_answer(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(client, "UNREACHABLE", 0)
    with pages(tmp_path) as (url, _):
        pass
    make(tmp_path, NIGHTS[0], "--url", url, code=2)
    error = capsys.readouterr().err
    assert f"cannot read the index {url}" in error
    assert error.count("fix") == 1
    assert "--history new" in error


def test_a_site_without_the_channel(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    with pages(tmp_path / "empty") as (url, _):
        make(tmp_path, NIGHTS[0], "--url", url, code=2)
    said = f"{url}: it answers HTTP 404 for {MATRIX.name}, but is no index: its list of projects is HTTP 404, text/html"
    assert f"{said}\n  fix: run again; for a new channel" in capsys.readouterr().err
    (tmp_path / "empty" / "simple").mkdir()
    (tmp_path / "empty" / "simple" / "index.html").touch()
    with pages(tmp_path / "empty") as (url, _):
        make(tmp_path, NIGHTS[0], "--url", url, code=2)
    assert f"{url} has no wheel of {MATRIX.name}\n  fix: run again; for a new channel" in capsys.readouterr().err


@pytest.mark.parametrize("link", [f'<a href="x">{name(NIGHTS[0])}</a>', '<a href="x#sha256=00">..</a>'])
def test_a_site_that_no_index_would_be(old: tuple[Path, str], tmp_path: Path, capsys: Capture, link: str) -> None:
    (old[0] / PROJECT / "index.html").write_text(link)
    make(tmp_path, NIGHTS[3], "--url", old[1], code=2)
    assert "--history new" in capsys.readouterr().err


def test_a_release_is_none_of_the_channel(tmp_path: Path, capsys: Capture) -> None:
    make(tmp_path, f"{MATRIX.mlx}.2", code=1)
    assert "release stamp dev" in capsys.readouterr().err


def test_two_nights_at_once(tmp_path: Path, capsys: Capture) -> None:
    dist(tmp_path / NIGHTS[0], NIGHTS[1])
    make(tmp_path, NIGHTS[0], code=1)
    assert f"has wheels of {NIGHTS[0]}, {NIGHTS[1]}" in capsys.readouterr().err


@pytest.mark.parametrize(("project", "version"), [("mlx-cuda", "1"), ("mlx-cuda", "no version"), ("mlx", NIGHTS[0])])
def test_a_renamed_wheel(tmp_path: Path, capsys: Capture, project: str, version: str) -> None:
    text = metadata(version).replace("Name: mlx-cuda", f"Name: {project}")
    write_wheel(tmp_path / "dist" / name(NIGHTS[0]), version=NIGHTS[0], changes={"METADATA": text})
    assert cli.main(["nightly", str(tmp_path / "dist"), "-o", str(tmp_path / "site"), "--url", URL, "--history", "new"]) == 1
    assert f"METADATA names {project} {version}\n  fix: build it again" in capsys.readouterr().err


def test_where_the_site_is(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/project")
    for night, setting, url in ((NIGHTS[0], "", "https://somebody.github.io/project"), (NIGHTS[1], URL, URL)):
        monkeypatch.setenv("MLX_CUDA_NIGHTLY", setting)
        site = make(tmp_path, night, "--history", "new")
        assert f"{url}/simple/" in (site / "index.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keep", "0"], "--keep 0 leaves nothing"),
        (["-o", "."], "exists already"),
        (["-o", "file/site"], "cannot write"),
    ],
)
def test_arguments(tmp_path: Path, monkeypatch: Patch, capsys: Capture, arguments: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    folder = dist(tmp_path / "dist", NIGHTS[0])
    assert cli.main(["nightly", str(folder), "-o", "site", "--url", URL, "--history", "new", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "fix: " in error


def test_no_wheels(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["nightly", str(tmp_path), "-o", str(tmp_path / "site"), "--url", URL]) == 2
    assert "there is no wheel in" in capsys.readouterr().err


def test_what_is_printed(old: tuple[Path, str], tmp_path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    make(tmp_path, NIGHTS[3], "--url", f"{old[1]}/")
    assert capsys.readouterr().out.splitlines() == [f"{version}: 1 wheels" for version in NIGHTS[::-1]]


def test_a_stamp_is_a_minute() -> None:
    assert stamp(Version("1.dev202611221031")) == datetime(2026, 11, 22, 10, 31, tzinfo=timezone.utc)
    for other in ("1", "1.dev20261122103", "1.dev2026112210310", "1.dev202611222431", "1.dev202611221031+x"):
        with pytest.raises(ValueError, match="expected one such as"):
            stamp(Version(other))


def test_our_own_reader_reads_it(served: tuple[str, list[str]], tmp_path: Path) -> None:
    index = Index("nightly", (), served[0])
    files = index.files(MATRIX.name)
    assert [str(each.version) for each in files] == NIGHTS[1::-1]
    assert sha256(index.fetch(files[0], tmp_path)) == files[0].sha256
