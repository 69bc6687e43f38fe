"""What users see of a release: the description on the index page, the changelog, the release page, the forms of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date, datetime, timezone, tzinfo
from email import message_from_bytes
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from ci import __main__ as cli
from ci.build.description import absolute, address, dynamic_metadata, relative_links
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import tomllib
from ci.matrix import REPOSITORY
from ci.release import changelog, notes
from ci.release.dist import complete

from .audit_support import DIST_INFO, Files
from .release_support import MATRIX, VERSION, make_dist, wheel_name

HOST = "https://github.example"
HERE = f"{HOST}/owner/name"
STATED = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["version"]
STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 800px; margin: 20px auto }
img { max-width: 100% }
pre { background: #f3f3f3; overflow: auto }
table { border-collapse: collapse }
td, th { border: 1px solid #ddd }
"""
REF = "HEAD" if Version(STATED).is_devrelease else f"v{STATED}"
PROGRAM = "import sys; from scikit_build_core import build; build.prepare_metadata_for_build_wheel(sys.argv[1])"


def metadata(folder: Path) -> bytes:
    """METADATA as the build back end writes it."""
    environment = {**os.environ, "GITHUB_SERVER_URL": HOST, "GITHUB_REPOSITORY": "owner/name"}
    folder.mkdir()
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], cwd=REPOSITORY, env=environment, check=True, capture_output=True)
    (path,) = folder.glob("*.dist-info/METADATA")
    return path.read_bytes()


def description(written: Message) -> str:
    body = written.get_payload(decode=True)
    assert isinstance(body, bytes)
    return body.decode()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The description as an index renders it."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    if not markdown.variants:
        pytest.skip("readme-renderer[md] is not installed")
    written = message_from_bytes(metadata(tmp_path_factory.mktemp("page") / "metadata"))
    assert written["Description-Content-Type"] == "text/markdown"
    rendered = markdown.render(description(written))
    assert isinstance(rendered, str)
    return rendered


class Targets(HTMLParser):
    """Where links and pictures lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links = list[str]()
        self.pictures = list[str]()
        self.feed(text)

    def handle_starttag(self, _: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name == "href"]
        self.pictures += [value or "" for name, value in attrs if name in {"src", "srcset"}]


def test_metadata_is_the_same_each_time(tmp_path: Path) -> None:
    first = metadata(tmp_path / "1")
    assert metadata(tmp_path / "2") == first
    assert b"\r" not in first
    written = message_from_bytes(first)
    assert dict(each.split(", ") for each in written.get_all("Project-URL", [])) == {
        "Homepage": HERE,
        "Documentation": f"{HERE}/blob/{REF}/docs/index.md",
        "Changelog": f"{HERE}/blob/{REF}/CHANGELOG.md",
        "Issues": f"{HERE}/issues",
        "Source": f"{HERE}/tree/{REF}",
    }
    assert relative_links(description(written)) == []


def test_every_link_of_the_page_leads_to_a_file_of_the_tag(page: str) -> None:
    found = Targets(page)
    assert len(found.links) > 30
    assert len(found.pictures) >= 2
    for link in found.links:
        assert link.startswith(("https://", "#user-content-")), link
        if link.startswith(f"{HERE}/"):
            ours = re.fullmatch(rf"{HERE}/blob/{re.escape(REF)}/([^#]+)(#.*)?", link)
            assert ours, link
            assert (REPOSITORY / ours[1]).is_file(), link
    for picture in found.pictures:
        path = picture.removeprefix(f"{HERE}/raw/{REF}/")
        assert path != picture, picture
        assert (REPOSITORY / path).is_file(), picture


def test_the_page_in_a_browser(page: str, browser: Any, tmp_path: Path) -> None:
    """Every picture shows, nothing else is asked for. index-page.png is the page as an index shows it."""
    asked = []

    def answer(route: Any) -> None:
        asked.append(path := route.request.url.removeprefix(f"{HERE}/raw/{REF}/"))
        route.fulfill(path=REPOSITORY / path)

    tab = browser.new_page(viewport={"width": 900, "height": 1200}, device_scale_factor=0.75)
    tab.route("**/*", answer)
    tab.set_content(f"<style>{STYLE}</style>{page}", wait_until="load")
    assert tab.evaluate("[...document.images].map(each => each.complete && each.naturalWidth > 100)") == [True, True]
    assert sorted(asked) == ["docs/img/architecture.svg", "docs/img/tokens-per-second.svg"]
    tab.screenshot(path=tmp_path / "index-page.png")
    tab.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", "[a](R/blob/v1/docs/a.md#b)"),
        ("[`a`](docs/a.md) and [b]( ../../issues )", "[`a`](R/blob/v1/docs/a.md) and [b]( R/issues )"),
        ("![a](docs/img/a.svg)", "![a](R/raw/v1/docs/img/a.svg)"),
        ("[![a](a.png)](b.md)", "[![a](R/raw/v1/a.png)](R/blob/v1/b.md)"),
        ('<img alt="x" SRC="a.png?x#y">', '<img alt="x" SRC="R/raw/v1/a.png?x#y">'),
        ("<source srcset='a.svg'><a href = \"b\">", "<source srcset='R/raw/v1/a.svg'><a href = \"R/blob/v1/b\">"),
        ("[a]: docs/a.md\n\n[b]: b", "[a]: R/blob/v1/docs/a.md\n\n[b]: R/blob/v1/b"),
        ("[a](/b)", f"[a]({HOST}/b)"),
    ],
)
def test_relative_links(text: str, expected: str) -> None:
    expected = expected.replace("R/", f"{HERE}/")
    assert relative_links(text)
    assert absolute(text, HERE, "v1") == expected
    assert relative_links(expected) == []


@pytest.mark.parametrize(
    "text",
    [
        "[a](https://b) [c](mailto:d) [e](#f) <a href='HTTPS://g'>",
        "`[a](b)` and `x[0](y)`",
        "```python\nx[0](y)\n```\n",
        "no [link] (here) and a src of it",
    ],
)
def test_what_is_no_relative_link(text: str) -> None:
    assert relative_links(text) == []
    assert absolute(text, HERE, "v1") == text


def test_the_address_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    assert address() == MATRIX.repository
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    assert address() == MATRIX.repository
    monkeypatch.setenv("GITHUB_SERVER_URL", HOST)
    assert address() == HERE
    assert re.fullmatch(r"https://[^/]+/[^/]+/[^/]+", MATRIX.repository)


@pytest.mark.parametrize(("version", "ref"), [("1.2.3.4", "v1.2.3.4"), ("1.2.3.4rc1", "v1.2.3.4rc1"), ("1.2.3.4.dev5", "HEAD")])
def test_links_are_of_the_tag(version: str, ref: str) -> None:
    made = dynamic_metadata({}, {"version": version})
    assert f"/blob/{ref}/docs/start/install.md" in made["readme"]["text"]
    assert made["urls"]["Source"].endswith(f"/tree/{ref}")


def test_the_audit_refuses_a_description_that_leads_nowhere(audited: Callable[..., set[str]], capsys: pytest.CaptureFixture[str]) -> None:
    def change(files: Files) -> None:
        member = f"{DIST_INFO}/METADATA"
        data = files[member]
        assert isinstance(data, bytes)
        files[member] = data + b"\n[a](docs/a.md) [a](docs/a.md) ![b](b.svg)\n"

    assert audited(checks=("metadata",)) == set()
    assert audited(change, checks=("metadata",)) == {"metadata"}
    assert "has the line '[a](docs/a.md) [a](docs/a.md) ![b](b.svg)', expected no such line there" in capsys.readouterr().out


TEXT = """# Changelog

Words.

## [Unreleased]

### Added

- coming

## [1.2.3.5]

- soon

## [1.2.3.4] - 2026-01-02\x20

### Fixed

- this

[Unreleased]: ../../compare
[1.2.3.4]: ../../releases
"""


@pytest.mark.parametrize(
    ("version", "name", "said"),
    [
        ("1.2.3.4", "1.2.3.4", "### Fixed\n\n- this"),
        ("1.2.3.4rc2", "1.2.3.4", "### Fixed\n\n- this"),
        ("1.2.3.5rc1", "1.2.3.5", "- soon"),
        ("1.2.3.5.dev1", "1.2.3.5", "- soon"),
        ("1.2.3.6.dev1", "Unreleased", "### Added\n\n- coming"),
        ("1.2.3.6rc1", "Unreleased", "### Added\n\n- coming"),
    ],
)
def test_the_entry_of_a_version(version: str, name: str, said: str) -> None:
    day = date(2026, 1, 2) if name == "1.2.3.4" else None
    assert changelog.entry(Version(version), TEXT) == changelog.Entry(name, day, said)


def test_the_entry_of_a_candidate_goes_before_its_releases() -> None:
    text = TEXT.replace("[1.2.3.4] -", "[1.2.3.4rc1] -").replace("[1.2.3.5]\n", "[1.2.3.4]\n", 1)
    assert changelog.entry(Version("1.2.3.4rc1"), text).text == "### Fixed\n\n- this"
    assert changelog.entry(Version("1.2.3.4rc2"), text).text == "- soon"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.2.3.5", r"has no date for 1\.2\.3\.5\n  fix: ## \[1\.2\.3\.5\] - YYYY-MM-DD"),
        ("1.2.3.6", r"has no entry for 1\.2\.3\.6\n  fix: move what is new from \[Unreleased\] to `## \[1\.2\.3\.6\] - YYYY-MM-DD`"),
    ],
)
def test_versions_without_an_entry(version: str, said: str) -> None:
    with pytest.raises(CheckFailed, match=said):
        changelog.entry(Version(version), TEXT)


def test_an_entry_that_says_nothing() -> None:
    text = TEXT.replace("### Fixed\n\n- this\n", "").replace("### Added\n\n- coming\n", "")
    with pytest.raises(CheckFailed, match="has no entry"):
        changelog.entry(Version("1.2.3.4"), text)
    assert changelog.entry(Version("1.2.3.6.dev1"), text).text == "", "nothing has happened yet"


@pytest.mark.parametrize(
    "heading", ["## 1.2.3.4", "## [1.2] - soon", "## [1.2] - 2026-13-01", "## [1.2] 2026-01-01", "## [1.2.3.5]", "## [1.2] -"]
)
def test_headings_that_are_none(heading: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        changelog.parse(f"{TEXT}\n{heading}\n")
    said = f"CHANGELOG.md: {heading!r} is no heading of an entry of its own\n  fix: ## [VERSION] - YYYY-MM-DD, once"
    assert str(failure.value) == said


def test_a_changelog_without_entries() -> None:
    assert changelog.parse("# Changelog\n") == {}


def test_no_changelog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog, "CHANGELOG", tmp_path / "CHANGELOG.md")
    with pytest.raises(CheckFailed, match=r"^CHANGELOG\.md is missing\n  fix: "):
        changelog.read()


LINKED = """# Changelog

[Here]: https://here.example
    'a title'

## [1.2.3.5] - 2026-02-03

- [this][d], [that] and [Over  THERE][]

[d]: docs/d.md "the document"
[that]: <https://that.example>

```console
## no heading
[d]: no definition
```

## [1.2.3.4] - 2026-01-02

- [that] before, and [d](docs/other.md)

[over there]: https://there.example
[d]: docs/never.md
[1.2.3.4]: ../../releases
"""


def test_links_of_an_entry_lead_somewhere() -> None:
    """Wherever the file says where; and what is in a block of code is none of its structure."""
    entries = changelog.parse(LINKED)
    assert entries["1.2.3.5"].text.splitlines() == [
        *("- [this][d], [that] and [Over  THERE][]", "", "", "```console", "## no heading", "[d]: no definition", "```", ""),
        *('[d]: docs/d.md "the document"', "[that]: <https://that.example>", "[over there]: https://there.example"),
    ]
    assert entries["1.2.3.4"].text.splitlines() == [
        *("- [that] before, and [d](docs/other.md)", "", '[d]: docs/d.md "the document"', "[that]: <https://that.example>"),
    ]
    assert "[Here]: https://here.example\n    'a title'" in changelog.parse(LINKED.replace("[this]", "[here]"))["1.2.3.5"].text


class Clock(datetime):
    """The last second of a day, at the place where it ends first."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Clock:
        return cls(2026, 1, 1, 9, 59, 59, tzinfo=timezone.utc).astimezone(tz)


def test_a_date_that_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog, "datetime", Clock)
    for version in ("1.2.3.4", "1.2.3.4rc1"):
        with pytest.raises(CheckFailed) as failure:
            changelog.entry(Version(version), TEXT)
        fix = "## [1.2.3.4] - 2026-01-01, or the day of its tag"
        assert str(failure.value) == f"CHANGELOG.md dates 1.2.3.4 2026-01-02, in the future\n  fix: {fix}"
    assert changelog.entry(Version("1.2.3.4"), TEXT.replace("2026-01-02", "2026-01-01")).date == date(2026, 1, 1)


def test_our_changelog() -> None:
    """In the form: newest first, dated but for what is to come, in the groups that the form knows, each with where it leads."""
    text = changelog.CHANGELOG.read_text("utf-8")
    unreleased, *entries = changelog.parse(text).values()
    assert unreleased.name == "Unreleased"
    versions = [Version(each.name) for each in entries]
    assert versions == sorted(versions, reverse=True)
    assert all(each.date for each in entries if Version(each.name) < Version(STATED))
    groups = set(re.findall(r"^###\s.*$", text, re.MULTILINE))
    assert groups <= {f"### {each}" for each in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")}
    assert re.findall(r"^\[(.+)\]: \.\./\.\./", text, re.MULTILINE) == [each.name for each in (unreleased, *entries)]


@pytest.fixture
def news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changelog of the wheels that these tests make."""
    path = tmp_path / "CHANGELOG.md"
    path.write_text(f"# Changelog\n\n## [{VERSION}] - 2026-01-02\n\n### Added\n\n- all of [it](docs/it.md)\n", "utf-8")
    monkeypatch.setattr(changelog, "CHANGELOG", path)


def test_notes(tmp_path: Path, news: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published lies apart from what is only shown."""
    monkeypatch.setenv("GITHUB_SERVER_URL", HOST)
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    folder = make_dist(tmp_path / "dist")
    written = notes.write(complete(folder), tmp_path / "out")
    assert set(written) == {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_file()] == ["notes.md"]
    entries = complete(folder).entries
    assert (tmp_path / "out" / "notes.md").read_text().splitlines() == [
        *("### Added", "", f"- all of [it]({HERE}/blob/v{VERSION}/docs/it.md)", ""),
        f"For MLX {MATRIX.mlx}. Check downloads with `sha256sum -c --ignore-missing SHA256SUMS`.",
        *("", "| platform | build | MiB | sha256 |", "|---|---|---:|---|"),
        *(f"| {entry.platform} | {entry.build} | 0.00 | `{entry.sha256}` |" for entry in entries),
    ]
    assert (tmp_path / "out" / "files" / "SHA256SUMS").read_text() == "".join(f"{entry.sha256}  {entry.name}\n" for entry in entries)
    name = wheel_name(next(iter(MATRIX.platforms.values())), MATRIX.builds[0])
    assert (tmp_path / "out" / "files" / f"{name[:-4]}.cdx.json").read_text() == '{"bomFormat": "CycloneDX"}\n'
    if not shutil.which("sha256sum"):
        pytest.skip("sha256sum is not installed")
    subprocess.run(
        ["sha256sum", "--strict", "-c", str(tmp_path / "out" / "files" / "SHA256SUMS")], cwd=folder, check=True, capture_output=True
    )


def test_a_wheel_without_an_sbom_gets_no_page(tmp_path: Path, news: None) -> None:
    folder = make_dist(tmp_path / "dist", changes={"sboms/mlx-cuda.cdx.json": None})
    name = complete(folder).entries[0].name
    with pytest.raises(CheckFailed, match=f"^{name} has no SBOM, expected the one that python -m ci repair writes$"):
        notes.write(complete(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_notes_that_cannot_be_written(tmp_path: Path, news: None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match=r"File exists\n  fix: free space, or give another -o$"):
        notes.write(complete(make_dist(tmp_path / "dist")), tmp_path / "file")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (VERSION, "prerelease=false\nlatest=true\n"),
        (f"{VERSION}rc1", "prerelease=true\nlatest=false\n"),
        (f"{VERSION}.dev1", "prerelease=true\nlatest=false\n"),
    ],
)
def test_a_candidate_is_never_the_latest(
    tmp_path: Path, news: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, said: str
) -> None:
    monkeypatch.setattr("ci.release.version.current", lambda _: Version(version))
    arguments = ["release", "notes", str(make_dist(tmp_path / "dist", version)), "-o", str(tmp_path / "page")]
    assert cli.main([*arguments, "--github"]) == 0
    assert capsys.readouterr().out == f"version={version}\n{said}"
    assert cli.main(arguments) == 0
    assert sorted(map(Path, capsys.readouterr().out.splitlines())) == sorted(
        path for path in (tmp_path / "page").rglob("*") if path.is_file()
    )
    monkeypatch.setattr("ci.release.version.current", lambda _: Version("1.2"))
    assert cli.main(arguments) == 1


def test_issue_forms() -> None:
    """As GitHub reads them: each has a name, a description and fields with ids of their own; a bug says what the doctor finds."""
    folder = REPOSITORY / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in folder.iterdir()}
    assert forms.pop("config") == {"blank_issues_enabled": False}
    assert set(forms) == {"bug", "request"}
    for form in forms.values():
        assert set(form) == {"name", "description", "labels", "body"}
        fields = [each for each in form["body"] if each["type"] != "markdown"]
        assert len({each["id"] for each in fields}) == len({each["attributes"]["label"] for each in fields}) == len(fields) > 0
        assert {each["type"] for each in form["body"]} <= {"markdown", "textarea"}
        assert all(each["attributes"]["value"] for each in form["body"] if each["type"] == "markdown")
    (doctor,) = (each for each in forms["bug"]["body"] if "mlx_cuda doctor --json" in json.dumps(each))
    assert doctor["validations"] == {"required": True}


def test_code_owners_are_of_files_that_are_there() -> None:
    lines = (REPOSITORY / ".github" / "CODEOWNERS.example").read_text("utf-8").splitlines()
    paths = [line.split()[0] for line in lines if not line.startswith("#")]
    assert paths
    assert [path for path in paths if not (REPOSITORY / path.strip("/")).exists()] == []
