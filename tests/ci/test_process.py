"""How other programs are run, and what is said where one is missing, fails, or does not end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci import process
from ci.errors import EnvironmentProblem
from ci.matrix import REPOSITORY

# Who runs programs otherwise: uv's messages pass by while it works; cmd has rules of its own for quotes, and what `msvc-env` runs takes the
# terminal; a mutant that hangs is ended with all that it began; device code is stored under all that the compilers' file says, so that a
# line of it costs a whole build.
ELSEWHERE = {"toolkit/uv.py": 1, "build/msvc_env.py": 2, "device/compilers.py": 1, "maintain/mutation/__main__.py": 1}


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_what_it_says_need_not_be_text(capfd: pytest.CaptureFixture[str]) -> None:
    done = process.run(program("import sys; sys.stdout.buffer.write(b'a\\xff'); sys.exit(sys.stdin.read() or 'no')"))
    assert (done.returncode, done.stdout, done.stderr) == (1, "a\N{REPLACEMENT CHARACTER}", "no\n")
    assert capfd.readouterr() == ("", "")


def test_its_encoding_is_not_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    assert process.run(program("import sys; print(ascii(sys.stdin.buffer.read()))"), input="é").stdout == "b'\\xc3\\xa9'\n"


def test_a_command_for_a_message_can_be_copied_into_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    command: list[str | Path] = ["pip", "install", Path("a $HOME b", "x.whl[cu13]")]
    words = subprocess.check_output(["sh", "-c", f"printf '%s|' {process.shown(command)}"], text=True)
    assert words == "pip|install|a $HOME b/x.whl[cu13]|"
    monkeypatch.setattr("os.name", "nt")
    assert process.shown(["pip", "install", r"a b\x.whl"]) == r'pip install "a b\x.whl"'


def test_what_is_shown_is_beside_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    process.run(program("import sys; print('one', flush=True); print('two', file=sys.stderr)"), show=True)
    assert capfd.readouterr() == ("", "one\ntwo\n")


@pytest.mark.parametrize(("fix", "said"), [(None, "install no-such-tool"), ("use another", "use another")])
def test_one_that_is_missing(fix: str | None, said: str) -> None:
    with pytest.raises(EnvironmentProblem) as problem:
        process.run(["no-such-tool", "x"], fix=fix)
    assert str(problem.value) == f"no-such-tool is not installed\n  fix: {said}"


def test_one_that_cannot_be_run(tmp_path: Path) -> None:
    """A file that is none, and one in a folder that is gone: the program itself is there."""
    with pytest.raises(EnvironmentProblem, match=r"^/.* cannot be run: Permission denied\n"):
        process.run([tmp_path])
    with pytest.raises(EnvironmentProblem, match=r" cannot be run: No such file or directory\n"):
        process.run(program(""), cwd=tmp_path / "gone")


def test_one_that_does_not_end() -> None:
    with pytest.raises(process.TookTooLong, match=r"did not end within 0\.2 s\n  fix: run again$"):
        process.run(program("import time; time.sleep(60)"), timeout=0.2)


@pytest.mark.parametrize(
    ("text", "said", "words"),
    [
        ("import sys; sys.exit('first\\nsecond')", "", f"{sys.executable} failed: first"),
        ("import sys; sys.exit('first\\nsecond')", "no answer", "no answer: first"),
        ("print('out'); raise SystemExit(2)", "no answer", "no answer: out"),
        ("raise SystemExit(2)", "no answer", "no answer: exit code 2"),
    ],
)
def test_one_that_fails(text: str, said: str, words: str) -> None:
    with pytest.raises(EnvironmentProblem) as problem:
        process.output(program(text), said=said, fix="do")
    assert str(problem.value) == f"{words}\n  fix: do"


def test_who_else_runs_programs() -> None:
    calls = re.compile(r"\bsubprocess\.(?:run|Popen|call|check_\w+)\(|\bos\.(?:system|popen)\(")
    texts = {path.relative_to(REPOSITORY / "ci").as_posix(): path.read_text("utf-8") for path in (REPOSITORY / "ci").rglob("*.py")}
    found = {name: len(calls.findall(text)) for name, text in texts.items()}
    assert {name: count for name, count in found.items() if count} == ELSEWHERE | {"process.py": 1}
