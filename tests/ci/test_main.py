"""``python -m ci``: help, exit codes and the way failures are shown."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci import __main__ as cli
from ci.errors import CheckFailed, EnvironmentProblem, ending
from ci.matrix import REPOSITORY


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its sub-commands, to any depth."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


GROUPS = ("factory", "release", "publish")
COMMANDS = [parser.prog.split()[3:] for parser in parsers(cli.make_parser())]


def test_every_command_is_there() -> None:
    names = {" ".join(command) for command in COMMANDS}
    assert names >= {"", "toolkit install", "toolkit verify", "toolkit lock", "build", "repair", "audit", "wheel"}


def test_each_command_has_one_line() -> None:
    """Below what a person does with it."""
    groups = cli.make_parser().format_help().split("\n\n")[-len(cli.GROUPS) - 1 : -1]
    for (title, commands), shown in zip(cli.GROUPS.items(), groups, strict=True):
        heading, *lines = shown.splitlines()
        assert heading == f"{title}:"
        assert [line.split(maxsplit=1)[0] for line in lines] == list(commands)
        assert max(map(len, lines)) <= 100
    assert [command[0] for command in COMMANDS if len(command) == 1] == list(cli.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {' '.join(['python -m ci', *command])} ")


@pytest.mark.parametrize("parser", list(parsers(cli.make_parser())), ids=lambda parser: parser.prog)
def test_every_argument_is_explained(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    assert "``" not in parser.description, "that is for docstrings, not for a terminal"
    unexplained = [action.dest for action in parser._actions if not (action.help or isinstance(action, argparse._SubParsersAction))]
    assert unexplained == []


@pytest.mark.parametrize(
    "arguments", [[], ["wheels"], ["build", "--cuda", "11.8"], ["toolkit"], ["audit"], ["repair", "a", "b"]], ids=" ".join
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m ci")


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (CheckFailed("a bad wheel"), 1, "error: a bad wheel\n"),
        (EnvironmentProblem("no compiler", fix="install g++"), 2, "error: no compiler\n  fix: install g++\n"),
        (EnvironmentProblem("no compiler"), 2, "error: no compiler\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_failure_is_one_message_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: BaseException, code: int, said: str
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise failure

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=fail)
    monkeypatch.setattr(cli, "make_parser", lambda _: parser)
    assert cli.main([]) == code
    captured = capsys.readouterr()
    assert captured.err == said
    assert captured.out == ""


@pytest.mark.parametrize("result", [0, 1, True])
def test_a_commands_result_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, result: int) -> None:
    parser = argparse.ArgumentParser()
    parser.set_defaults(run=lambda _: result)
    monkeypatch.setattr(cli, "make_parser", lambda _: parser)
    assert cli.main([]) == int(result)


def test_a_result_with_letters_that_stdout_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows a pipe has a code page: `ci try` quotes uv, which draws lines, where a wheel cannot be installed."""
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="cp1252", write_through=True))
    assert ending(lambda: bool(print("╰─▶ für mlx-cuda"))) == 0
    assert pipe.getvalue().split() == [rb"\u2570\u2500\u25b6", b"f\xfcr", b"mlx-cuda"]


def test_a_real_problem_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(tmp_path / "mlx_cuda-1-cp310-abi3-win_amd64.whl")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read ")


def only(group: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The command where nothing but a group of requirements/ is installed, as far as it is in one of the other two."""
    texts = {each: (REPOSITORY / "requirements" / f"{each}.txt").read_text("utf-8") for each in GROUPS}
    listed = {each: {*re.findall(r"^([\w-]+)==", text, re.MULTILINE)} for each, text in texts.items()}
    absent = sorted(name.replace("-", "_") for name in set.union(*listed.values()) - listed[group])
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); from ci.__main__ import main; sys.exit(main({arguments}))"
    return subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False, capture_output=True, encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["bump", "--mlx", "newest"], "tomlkit"),
        (["prerelease"], "tomlkit"),
        (["nightly", ".", "-o", "site"], "pypi_simple"),
        *((["release", *words], "pypi_simple") for words in (["publish", ".", "--index", "pypi"], ["verify", "1", "--index", "pypi"])),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_a_group_of_tools_that_is_missing(arguments: list[str], module: str) -> None:
    done = only("factory", arguments)
    fix = "python -m pip install --require-hashes -r requirements/factory.txt -r requirements/release.txt"
    assert (done.returncode, done.stderr) == (2, f"error: the module {module} is not installed\n  fix: {fix}\n")


def test_every_command_has_its_help_with_the_factory_alone() -> None:
    for command in cli.COMMANDS:
        done = only("factory", [command, "--help"])
        assert (done.returncode, done.stderr) == (0, ""), command


def test_a_module_of_ours_that_is_missing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ci.audit", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["audit", "--help"])
