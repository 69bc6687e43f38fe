"""``python -m ci pins``: a stub for GitHub, a folder of repositories, tells which commits are those of tags."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ci import __main__ as cli
from ci.maintain import pins

STEPS = "jobs:\n  a:\n    steps:\n"


class Server:
    """Repositories of actions, and the workflows that pin them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workflows = folder / "server", folder / "workflows"
        self.workflows.mkdir()

    def git(self, repository: str, *words: str) -> str:
        path = self.folder / repository
        if not path.exists():
            path.mkdir(parents=True)
            self.git(repository, "init", "--quiet", "--initial-branch", "main")
        settings = ["-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(path), *settings, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def release(self, repository: str, tag: str, *, annotated: bool = False) -> str:
        """Make a commit with a tag; returns the commit."""
        self.git(repository, "commit", "--quiet", "--allow-empty", "--message", f"{tag} of {repository}")
        self.git(repository, "tag", *(["--annotate", "--message", tag] if annotated else []), "--force", tag)
        return self.git(repository, "rev-parse", "HEAD")

    def pin(self, *lines: str) -> None:
        (self.workflows / "one.yml").write_text(STEPS + "".join(f"      - uses: {line}\n" for line in lines))

    def run(self) -> int:
        return cli.main(["pins", "--workflows", str(self.workflows), "--server", str(self.folder)])


@pytest.fixture
def server(tmp_path: Path) -> Server:
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    return Server(tmp_path)


@pytest.mark.parametrize("annotated", [False, True])
def test_the_commit_of_a_tag(server: Server, capsys: pytest.CaptureFixture[str], *, annotated: bool) -> None:
    commit = server.release("a/b", "v1.0.0", annotated=annotated)
    server.release("a/b", "v1.0.1", annotated=annotated)
    server.pin(f"a/b@{commit} # v1.0.0", f"a/b/deep/er@{commit} # v1.0.0 # zizmor: ignore[x] because", "./.github/workflows/x.yml")
    assert server.run() == 0
    assert capsys.readouterr().out == f"a/b v1.0.0 {commit}: the commit of the tag\n"


def test_a_commit_of_another_tag(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = server.release("a/b", "v1.0.0"), server.release("a/b", "v1.0.1")
    server.pin(f"a/b@{old} # v1.0.1")
    assert server.run() == 1
    said = f"a/b: v1.0.1 is {new}, expected {old}; the tags of {old[:12]} are v1.0.0"
    assert f"error: pinned commits that are not their tags':\n  {said}\n  fix: find out why" in capsys.readouterr().err


def test_a_commit_of_nobody(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """As one of a fork, which can be fetched through the repository."""
    server.release("a/b", "v1.0.0")
    fork = server.release("evil/b", "v1.0.0")
    server.git("a/b", "fetch", "--quiet", str(server.folder / "evil/b"), fork)
    server.pin(f"a/b@{fork} # v1.0.0")
    assert server.run() == 1
    assert f"; no tag leads to {fork[:12]}" in capsys.readouterr().err


def test_the_commit_of_a_branch(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    commit = server.release("a/b", "v1.0.0")
    server.git("a/b", "branch", "v2.0.0")
    server.pin(f"a/b@{commit} # v2.0.0")
    assert server.run() == 1
    assert f"a/b: there is no tag v2.0.0, expected {commit}; the tags of {commit[:12]} are v1.0.0" in capsys.readouterr().err


def test_a_tag_that_was_moved(server: Server) -> None:
    commit = server.release("a/b", "v1.0.0")
    server.pin(f"a/b@{commit} # v1.0.0")
    assert server.run() == 0
    server.release("a/b", "v1.0.0")
    assert server.run() == 1


def test_the_object_of_an_annotated_tag_is_no_commit(server: Server) -> None:
    server.release("a/b", "v1.0.0", annotated=True)
    server.pin(f"a/b@{server.git('a/b', 'rev-parse', 'v1.0.0')} # v1.0.0")
    assert server.run() == 1


@pytest.mark.parametrize("line", ["a/b@v1", "a/b@main # v1.0.0", f"a/b@{'0' * 39} # v1.0.0", f"a/b@{'0' * 40}", "docker://a/b:1", "a/b"])
def test_what_is_not_pinned(server: Server, capsys: pytest.CaptureFixture[str], line: str) -> None:
    server.pin(line)
    assert server.run() == 1
    assert f"error: actions without a commit and its tag:\n  one.yml: - uses: {line}\n  fix: " in capsys.readouterr().err


def test_a_server_that_cannot_be_asked(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """What the others say is told all the same, and a wrong pin is what counts."""
    commit = server.release("a/b", "v1.0.0")
    (server.folder / "c").mkdir()
    server.pin(f"a/b@{commit} # v1.0.0", f"c/d@{commit} # v1.0.0")
    assert server.run() == 2
    said = capsys.readouterr()
    assert said.out == f"a/b v1.0.0 {commit}: the commit of the tag\n"
    assert f"error: the tags of {server.folder}/c/d cannot be queried: " in said.err
    assert len(said.err.splitlines()) == 2
    server.pin(f"a/b@{commit} # v1.0.1", f"c/d@{commit} # v1.0.0")
    assert server.run() == 1
    assert "c/d cannot be queried" in capsys.readouterr().err


def test_no_workflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pins", "--workflows", str(tmp_path)]) == 2
    assert f"error: {tmp_path} has no workflow" in capsys.readouterr().err


def test_git_is_missing_or_silent(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server.pin(f"a/b@{'0' * 40} # v1.0.0")
    monkeypatch.setattr(pins, "_SECONDS", 0)
    assert server.run() == 2
    assert "git did not end within 0 s" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert server.run() == 2
    assert "error: git is not installed" in capsys.readouterr().err


def test_ours_are_all_read() -> None:
    """Each action once, though its parts are used by themselves."""
    texts = [(path.name, path.read_text("utf-8")) for path in sorted(pins.WORKFLOWS.glob("*.yml"))]
    found = pins.pins(texts)
    assert len(found) == len({pin.repository for pin in found}) > 10
    assert "github/codeql-action" in {pin.repository for pin in found}
