"""A run's artifacts through gh, for which a script stands that answers as GitHub's command line does."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as cli
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import sha256
from ci.matrix import host_platform
from ci.trial import actions, artifacts
from ci.trial.actions import Run
from ci.wheelfile import archive

from .audit_support import NAMES, write_wheel
from .trial_support import ALWAYS, FILES, Gh, make_gh, record

RUN = Run("owner/name", 42)
HOST = host_platform().name
LIST = "repos/owner/name/actions/runs/42/artifacts?per_page=100"


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gh:
    return make_gh(tmp_path / "gh", monkeypatch)


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    """An artifact with a good wheel."""
    wheel = write_wheel(tmp_path / "dist" / NAMES["linux"], dict(FILES))
    with zipfile.ZipFile(tmp_path / "artifact.zip", "w") as archive:
        archive.write(wheel, wheel.name)
    return tmp_path / "artifact.zip"


def entry(number: int, name: str, **changed: Any) -> dict[str, Any]:
    return {"id": number, "name": name, "size_in_bytes": 1000, "expired": False, "digest": None, **changed}


def listed(gh: Gh, *entries: dict[str, Any]) -> None:
    gh.answer(LIST, "".join(f"{json.dumps(each)}\n" for each in entries))


@pytest.mark.parametrize(("host", "how"), [("github.com", "id"), ("github.com", "address"), ("github.example.org", "address")])
def test_a_run_becomes_its_wheels(gh: Gh, zipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, how: str) -> None:
    """All pages are asked for, of the server that the address names."""
    listed(gh, *(entry(number, "x") for number in range(101, 301)), entry(7, f"wheels-{HOST}", digest=f"sha256:{sha256(zipped)}"))
    gh.answer("repos/owner/name/actions/artifacts/7/zip", zipped)
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    target = {"id": "42", "address": f"https://{host}/owner/name/actions/runs/42/job/3?pr=1"}[how]
    wheels = artifacts.obtain(target, tmp_path / "new" / "downloaded")
    assert [wheel.name for wheel in wheels] == [NAMES["linux"]]
    assert gh.calls == [
        ["api", "--hostname", host, LIST, "--paginate", "--jq", ".artifacts[]"],
        ["api", "--hostname", host, "repos/owner/name/actions/artifacts/7/zip"],
    ]


def test_all_are_taken_where_none_is_named_after_this_platform() -> None:
    assert actions.choose([entry(1, "dist"), entry(2, "more"), entry(3, "old", expired=True)], RUN) == [entry(1, "dist"), entry(2, "more")]


def test_expired_and_missing_artifacts(gh: Gh, tmp_path: Path) -> None:
    names = f"wheels-{HOST}, more-{HOST}"
    with pytest.raises(EnvironmentProblem, match=f"of run 42 of owner/name have expired: {names}\n  fix: run the workflow again"):
        actions.choose([*(entry(1, name, expired=True) for name in names.split(", ")), entry(2, "report")], RUN)
    listed(gh)
    with pytest.raises(EnvironmentProblem, match="run 42 of owner/name has no artifacts\n  fix: wait"):
        actions.download(RUN, tmp_path)


BY_HAND = "or download the artifact yourself and give its zip"


@pytest.mark.parametrize(
    ("code", "said", "fix"),
    [
        (1, "gh: Bad credentials (HTTP 401)", "gh auth login, or another GH_TOKEN"),
        (1, "gh: Resource not accessible (HTTP 403)", f"a token that may read Actions in this repository, {BY_HAND}"),
        (1, "gh: Not Found (HTTP 404)", "check the id and the repository; for a private one the token needs access to it"),
        (1, "gh: Gone (HTTP 410)", "run the workflow again: artifacts are kept 30 days"),
        (1, "error connecting to api.github.com", "check the network, and githubstatus.com"),
        (4, "To get started with GitHub CLI, please run:  gh auth login", f"gh auth login, set GH_TOKEN, {BY_HAND}"),
        (4, "gh: To use GitHub CLI in a GitHub Actions workflow, set the GH_TOKEN environment variable.", f"set GH_TOKEN, {BY_HAND}"),
    ],
)
def test_a_refusal_has_a_fix(gh: Gh, tmp_path: Path, code: int, said: str, fix: str) -> None:
    gh.answer(LIST, "{}", code=code, err=f"{said}\n")
    with pytest.raises(EnvironmentProblem) as raised:
        actions.download(RUN, tmp_path / "downloaded")
    assert str(raised.value) == f"run 42 of owner/name: {said}\n  fix: {fix}"


def test_how_gh_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks nothing of a terminal."""
    runs = record(monkeypatch, out="a")
    command = ["gh", "api", "--hostname", "github.com", "repos/owner/name/actions/runs/42"]
    assert actions.query(RUN, "runs/42") == "a"
    assert actions.query(RUN, "runs/42", into=tmp_path / "file") == ""
    sink = runs[1][1].pop("stdout")
    assert (sink.name, sink.mode) == (str(tmp_path / "file"), "wb")
    assert runs == [
        (command, ALWAYS),
        (command, {key: each for key, each in ALWAYS.items() if key != "stdout"}),
    ]


def test_gh_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match=f"^gh is not installed\n  fix: https://cli.github.com, {BY_HAND}$"):
        actions.download(RUN, tmp_path / "downloaded")


def test_an_artifact_that_is_not_what_was_uploaded(gh: Gh, zipped: Path, tmp_path: Path) -> None:
    listed(gh, entry(7, "wheels", digest="sha256:" + "0" * 64))
    gh.answer("repos/owner/name/actions/artifacts/7/zip", zipped)
    is_not = f"artifact 'wheels' is not what was uploaded: it has sha256 {sha256(zipped)}, not sha256:{'0' * 64}"
    with pytest.raises(CheckFailed, match=f"^{is_not}$"):
        actions.download(RUN, tmp_path / "downloaded")


def test_an_artifact_that_is_too_large_by_its_word_or_in_fact(
    gh: Gh, zipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "MAX_BYTES", 2**20)
    assert actions.choose([entry(7, "wheels", size_in_bytes=2**20)], RUN)
    listed(gh, entry(7, "wheels", size_in_bytes=2**31))
    with pytest.raises(CheckFailed, match=r"artifact 'wheels' has 2,048 MiB, expected at most 1$"):
        actions.download(RUN, tmp_path / "downloaded")
    assert len(gh.calls) == 1
    monkeypatch.setattr(archive, "MAX_BYTES", 100)
    listed(gh, entry(7, "wheels"))
    gh.answer("repos/owner/name/actions/artifacts/7/zip", zipped)
    with pytest.raises(CheckFailed, match="expected at most 0"):
        artifacts.obtain("https://github.com/owner/name/actions/runs/42", tmp_path / "downloaded")


def test_a_storage_keeps_its_address_to_itself(gh: Gh, tmp_path: Path) -> None:
    listed(gh, entry(7, "wheels"))
    said = 'Get "https://storage.example/7?sv=1&sig=secret": unexpected EOF, https://storage.example/7?sig=secret'
    gh.answer("repos/owner/name/actions/artifacts/7/zip", "half", code=1, err=said)
    with pytest.raises(EnvironmentProblem) as raised:
        actions.download(RUN, tmp_path / "downloaded")
    shown = 'Get "https://storage.example/7?…": unexpected EOF, https://storage.example/7?…'
    assert str(raised.value).partition("\n")[0] == f"run 42 of owner/name: {shown}"


@pytest.mark.parametrize(
    ("target", "run"),
    [
        ("https://github.com/o/n/actions/runs/7", Run("o/n", 7)),
        ("https://github.example.org/o/n/actions/runs/7/attempts/2#summary", Run("o/n", 7, "github.example.org")),
        ("7", Run("from/option", 7)),
        ("dist/some.zip", None),
        ("https://github.com/o/n/pull/7", None),
        ("http://github.com/o/n/actions/runs/7", None),
        ("https://user@github.com/o/n/actions/runs/7", None),
        ("https://github.com/o/n?x=/actions/runs/7", None),
        ("-7", None),
    ],
)
def test_what_names_a_run(target: str, run: Run | None) -> None:
    assert Run.parse(target, "from/option") == run


@pytest.mark.parametrize("repository", [None, "", "name", "a/b/c", "a/b?x=", "../x/y"])
def test_an_id_alone_needs_a_repository(repository: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    if repository is not None:
        monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    with pytest.raises(EnvironmentProblem, match=r"^run 7 has no repository\n  fix: give --repository OWNER/NAME"):
        Run.parse("7")


def test_the_command_line(gh: Gh, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", "42", "--repository", "owner/name", "--extra", "cpu"]) == 2
    assert "run 42 of owner/name: gh: Not Found (HTTP 404)\n  fix: check the id" in capsys.readouterr().err
