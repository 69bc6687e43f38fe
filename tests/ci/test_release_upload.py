"""Uploads without a server: what is said, how twine is called, how long is waited, and what each of twine's answers comes to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import id as identities
import pytest

from ci import __main__ as cli
from ci.errors import CheckFailed, EnvironmentProblem
from ci.index import Index, Remote, named
from ci.release import publish as publishing
from ci.release import upload as uploading
from ci.release.dist import ATTESTATION, Dist, complete
from ci.release.publish import publish
from ci.release.upload import Limits, Plan, sign

from .release_support import VERSION, make_dist
from .trial_support import ALWAYS, Runs, record

RESUME = "run the same command again: it goes on where this one stopped"


class Outside:
    """An index that holds what twine took, which gives the next of `answers` where there is one; a clock that sleeping alone moves."""

    def __init__(self, dist: Dist, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dist, self.index = dist, Index("there", ("--repository-url", "http://there/"), "http://there/simple/")
        self.held: list[Remote] = []
        self.empty: list[int] = []  # which looks at the page find nothing
        self.looks = 0
        self.answers: list[str | Exception] = []
        self.runs: Runs = []
        self.slept: list[float] = []
        monkeypatch.setattr(Index, "files", lambda *_, **__: self.files())
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(uploading, "time", SimpleNamespace(sleep=self.slept.append, monotonic=lambda: 1000 + sum(self.slept)))

    def files(self) -> tuple[Remote, ...]:
        self.looks += 1
        return () if self.looks in self.empty else tuple(self.held)

    def hold(self, name: str) -> None:
        (entry,) = (each for each in self.dist.entries if each.name == name)
        self.held.append(Remote(name, self.dist.version, entry.sha256, entry.size))

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.runs.append((command, options))
        answer = self.answers.pop(0) if self.answers else ""
        if isinstance(answer, Exception):
            raise answer
        if not answer or "already exist" in answer:
            self.hold(next(Path(each).name for each in command if each.endswith(".whl")))
        return subprocess.CompletedProcess(command, 7 if answer else 0, "", answer)

    def publish(self, **options: Any) -> Plan:
        return publish(self.dist, self.index, tags=(), **options)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    return Outside(complete(make_dist(tmp_path / "dist")), monkeypatch)


@pytest.mark.parametrize("attestations", [False, True])
def test_how_twine_is_called(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, attestations: bool
) -> None:
    """For what is not there yet, with the shell's variables but those that lead elsewhere."""
    monkeypatch.setenv("TWINE_USERNAME", "me")
    for name in ("TWINE_REPOSITORY", "TWINE_REPOSITORY_URL"):
        monkeypatch.setenv(name, "elsewhere")
    signed: list[Path] = []
    monkeypatch.setattr(publishing, "sign", signed.extend)
    present, *missing = outside.dist.entries
    outside.hold(present.name)
    assert outside.publish(attestations=attestations) == Plan((present,), tuple(missing))
    assert signed == [*outside.dist.paths[1:]] * attestations
    command = [sys.executable, "-m", "twine", "--no-color", "upload", "--verbose", "--non-interactive", "--disable-progress-bar"]
    command += ["--repository-url", "http://there/", *["--attestations"] * attestations]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWINE_REPOSITORY")} | {"COLUMNS": "1000"}
    options = {**ALWAYS, "timeout": 600, "env": environment}
    paths = map(str, outside.dist.paths[1:])
    assert outside.runs == [([*command, path, *[f"{path}{ATTESTATION}"] * attestations], options) for path in paths]
    said = [f"{present.name}: is on there already, byte-identical"]
    said += [f"{entry.name}: uploading, {number} of 6, 0.00 MiB" for number, entry in enumerate(missing, 2)]
    assert capsys.readouterr().err.splitlines() == said
    assert outside.slept == []


def test_a_dry_run(outside: Outside, capsys: pytest.CaptureFixture[str]) -> None:
    present, *missing = outside.dist.entries
    outside.hold(present.name)
    outside.publish(dry_run=True)
    said = [f"{present.name}: is on there already, byte-identical"]
    said += [f"{entry.name}: would be uploaded, 0.00 MiB, sha256 {entry.sha256}" for entry in missing]
    assert capsys.readouterr().err.splitlines() == said


CREDENTIALS = f"check the credentials, then {RESUME}"
SETTINGS = "set TWINE_USERNAME and TWINE_PASSWORD, or publish from the trusted workflow"


@pytest.mark.parametrize(
    ("answers", "error", "said"),
    [
        (["HTTPError: 401 No", "HTTPError: 403 No"], EnvironmentProblem, f"there refuses the upload: {{}}\n  fix: {CREDENTIALS}"),
        (["HTTPError: 400 No", "HTTPError: 404 No", "HTTPError: 499 No"], CheckFailed, "there refuses {name}: {}"),
        (
            ["InvalidConfiguration", "NonInteractive: no", "CredentialError", "TrustedPublishingFailure", "InvalidDistribution: no"],
            EnvironmentProblem,
            f"twine: {{}}\n  fix: {SETTINGS}",
        ),
    ],
)
def test_what_is_refused_is_not_tried_again(outside: Outside, answers: list[str], error: type[Exception], said: str) -> None:
    for number, answer in enumerate(answers, 1):
        outside.answers = [answer]
        with pytest.raises(error) as raised:
            outside.publish()
        assert str(raised.value) == said.format(answer, name=outside.dist.entries[0].name)
        assert (len(outside.runs), outside.slept) == (number, [])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("INFO     begun\nERROR    HTTPError: 503 Busy\nSee --verbose\n", "ERROR    HTTPError: 503 Busy"),
        ("ERROR    first\n  requests.exceptions.ConnectionError: gone\nErrors: 2", "requests.exceptions.ConnectionError: gone"),
        ("HTTPError: 408 Slow", "HTTPError: 408 Slow"),
        ("HTTPError: 429 Often", "HTTPError: 429 Often"),
        ("HTTPError: 500 Credential", "HTTPError: 500 Credential"),
        ("no reason\n\n of any kind \n", "of any kind"),
        ("\n", "twine ended with 7"),
        (subprocess.TimeoutExpired([], 600), "no answer in 600 s"),
    ],
)
def test_another_attempt_after_a_pause(outside: Outside, capsys: pytest.CaptureFixture[str], answer: str | Exception, said: str) -> None:
    outside.answers = [answer] * 2
    assert len(outside.publish().missing) == 6
    assert outside.slept == [5, 10]
    name = outside.dist.entries[0].name
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == [f"{name}: uploading, 1 of 6, 0.00 MiB", *[f"{name}: {said}; once more"] * 2]
    assert len(told) == 8
    outside.held.clear()
    outside.slept.clear()
    outside.answers = [answer] * 6
    with pytest.raises(EnvironmentProblem) as problem:
        outside.publish()
    assert str(problem.value) == f"{name} could not be uploaded in 6 attempts: {said}\n  fix: {RESUME}"
    assert outside.slept == [5, 10, 20, 40, 80], "two and a half minutes, for an index that restarts"


def test_silence_has_three_attempts(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten minutes each: the job has an hour."""
    taken = 0.0

    def twine(*_: object, **options: Any) -> None:
        nonlocal taken
        taken += options["timeout"]
        raise subprocess.TimeoutExpired([], options["timeout"])

    monkeypatch.setattr(subprocess, "run", twine)
    monkeypatch.setattr(uploading, "time", SimpleNamespace(sleep=outside.slept.append, monotonic=lambda: taken + sum(outside.slept)))
    with pytest.raises(EnvironmentProblem, match="could not be uploaded in 3 attempts: no answer in 600 s"):
        outside.publish()
    assert taken == 1800


def test_what_was_taken_by_an_attempt_before(outside: Outside) -> None:
    """The page has the last word, and is waited for."""
    outside.answers, outside.empty = ["HTTPError: 400 File already exists"], [2, 3, 4, 5, 6, 7, 8]
    outside.publish(limits=Limits(listed=25.75))
    assert outside.slept == [0.25, 0.5, 1, 2, 4, 8, 10]


def test_what_does_not_show(outside: Outside) -> None:
    outside.empty = [*range(2, 99)]
    with pytest.raises(EnvironmentProblem) as problem:
        outside.publish()
    name = outside.dist.entries[0].name
    assert str(problem.value) == f"there took {name}, but does not show it after 300 s\n  fix: {RESUME}"
    assert sum(outside.slept) == 295.75


def test_what_is_no_longer_shown(outside: Outside) -> None:
    outside.empty = [8]
    with pytest.raises(EnvironmentProblem) as problem:
        outside.publish()
    assert str(problem.value) == f"there no longer shows {', '.join(entry.name for entry in outside.dist.entries)}\n  fix: {RESUME}"


def test_a_wheel_that_changes_on_its_way(outside: Outside) -> None:
    path = outside.dist.paths[-1]
    path.write_bytes(b"damaged")
    with pytest.raises(CheckFailed) as failure:
        outside.publish()
    assert str(failure.value) == f"{path} was changed during the upload\n  fix: restore it, then {RESUME}"
    assert len(outside.runs) == 5


def test_signing(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that has no attestation yet, or none of it."""
    first, *others = outside.dist.paths
    attestations = [path.with_name(f"{path.name}.publish.attestation") for path in outside.dist.paths]
    attestations[0].write_text("{}")
    asked = []

    def identity(audience: str) -> str:
        asked.append(audience)
        return "token"

    monkeypatch.setattr(identities, "detect_credential", identity)
    runs = record(monkeypatch)
    sign(outside.dist.paths)
    assert asked == ["sigstore"]
    command = [sys.executable, "-m", "pypi_attestations", "sign", *map(str, others)]
    assert runs == [(command, ALWAYS)]

    def half(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        attestations[1].write_text("{")
        return subprocess.CompletedProcess(command, 1, "out\n", "err\n")

    monkeypatch.setattr(subprocess, "run", half)
    with pytest.raises(EnvironmentProblem, match=r"^signing failed: out\nerr\n  fix: run the same command again$"):
        sign(outside.dist.paths)
    assert [path.exists() for path in attestations] == [True, *[False] * 5]
    sign([first])
    assert asked == ["sigstore"] * 2


def test_signing_without_an_identity(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "detect_credential", lambda _: None)
    words = "no identity to sign with: attestations are made in the publishing workflow\n  fix: omit --attestations"
    with pytest.raises(EnvironmentProblem, match=f"^{words}$"):
        sign(outside.dist.paths)

    def none(_: str) -> None:
        raise identities.AmbientCredentialError("not allowed")

    monkeypatch.setattr(identities, "detect_credential", none)
    with pytest.raises(
        EnvironmentProblem, match=r"^no identity to sign with: not allowed\n  fix: give the job `permissions: id-token: write`$"
    ):
        sign(outside.dist.paths)
    assert outside.runs == []


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {"manifest_path": None, "digest": None, "dry_run": False, "attestations": False, "limits": Limits(upload=600)}),
        (
            ["--manifest", "m.json", "--sha256", "0", "--dry-run", "--attestations", "--timeout", "7"],
            {"manifest_path": Path("m.json"), "digest": "0", "dry_run": True, "attestations": True, "limits": Limits(upload=7)},
        ),
    ],
)
def test_the_command(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], options: dict[str, Any]
) -> None:
    given: list[Any] = []

    def note(*arguments: Any, **options: Any) -> Plan:
        given.append((arguments, options))
        return Plan(outside.dist.entries[:1], outside.dist.entries[1:])

    monkeypatch.setattr(publishing, "publish", note)
    assert cli.main(["release", "publish", str(outside.dist.folder), "--index", "http://there/", *arguments]) == 0
    assert given == [((outside.dist, named("http://there/")), options)]
    would, did = "5 of 6 wheels would be uploaded to http://there/", "is complete on http://there/: 5 of 6 wheels uploaded now"
    assert capsys.readouterr().out == (f"version {VERSION}: {would}\n" if arguments else f"version {VERSION} {did}\n")
