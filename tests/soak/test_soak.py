"""A soak of a server with a small model with random weights, on any machine; and that each of its judgements can fail."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.result_file import read

from . import ballast, judging, run
from .__main__ import main
from .children import Child, Silent, environment
from .wire import Answer, Late, Reply, exchange, said

if importlib.util.find_spec("mlx_lm") is None or importlib.util.find_spec("tokenizers") is None:
    pytest.skip("mlx_lm is not installed", allow_module_level=True)

FEW = ["--minutes", "0", "--clients", "3", "--requests", "4", "--longest", "40", "--tokens", "16", "--fill", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by another process: this one's MLX may have its own device."""
    path = tmp_path_factory.mktemp("model")
    made = (
        "import sys; from pathlib import Path; from tests.gpu.mlx_lm_parts import SIZES, make_model, write_folder; "
        "sizes = SIZES | dict(vocab_size=257, max_position_embeddings=150, hidden_size=64, intermediate_size=64); "
        "write_folder(Path(sys.argv[1]), make_model(2, **{k: v for k, v in sizes.items() if isinstance(v, int)}), sizes)"
    )
    subprocess.run([sys.executable, "-c", made, str(path)], check=True, env=environment())
    return path


def test_a_soak(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "soak.jsonl"
    code = main([str(folder), *FEW, "--requests", "8", "--log", str(tmp_path / "log"), "-o", str(output)])
    told = capsys.readouterr()
    assert code == 0, told.out
    result = read(output, "soak")
    assert result["failures"] == []
    assert 0 < len(result["cases"]) <= result["rounds"] == judging.FEWEST_READINGS
    assert result["growth"].keys() == {"active", "host", "threads", "files"}  # the driver's is a GPU's
    kinds = {kind.split()[0] for kind in result["requests"]}
    assert kinds == {"alone", "beyond", "cancelled", "known", "malformed", "plain"}
    assert result["requests"]["malformed 400"] > 20
    assert result["answers"]["in company"] > 0
    assert result["provenance"]["command"][2] == "tests.soak"
    assert "| failures | 0 |" in told.out


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("leak_host", "host grew by"),
        ("leak_arrays", "active grew by"),
        ("leak_files", "files grew by"),
        ("leak_threads", "a connection's thread does not end"),
        ("hang", "no whole answer within"),
        ("other_prompt", "is less likely than|the logprob of token"),
        ("fewer_tokens", "tokens of 16, which end by length"),
        ("other_status", "status 500, not"),
        ("die", "the server has ended with 9"),
        ("fail", "KeyError"),
        ("stay", "the server is still there 3 s after SIGINT"),
        ("end_badly", f"ended with {-signal.SIGABRT}"),
    ],
)
def test_what_a_soak_notices(
    fault: str, why: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "SERVER", "tests.soak.faults")
    monkeypatch.setattr(run, "DEADLINE", 10.0)
    monkeypatch.setattr(run, "END", 3.0)
    monkeypatch.setenv("FAULT", fault)
    assert main([str(folder), *FEW, "--log", str(tmp_path / "log")]) == 1
    told = capsys.readouterr().out
    failures = told[told.index("| failures |") :]
    assert re.search(why, failures), told
    if fault == "hang":
        assert "faults.py" in told  # the stack of a thread that hangs
        assert "what the server's threads do" in told


def test_usage(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "fix: python -m tests.models fetch" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((folder / "config.json").read_text("utf-8"))  # and no weights
    assert main([str(tmp_path), *FEW, "--log", str(tmp_path / "log")]) == 1
    assert "No safetensors found" in capsys.readouterr().out


def answer(tokens: list[int], logprobs: list[float], best: list[dict[int, float]] | None = None, finish: str = "length") -> Answer:
    return Answer("text", len(tokens), finish, 3, tokens, logprobs, best or [])


def test_answers() -> None:
    alone = answer([5, 6, 7], [-1.0, -2.0, -0.5], [{5: -1.0}, {6: -2.0, 8: -2.5, 9: -3.5}, {7: -0.5}])
    assert judging.difference(alone, alone) == (None, "")
    assert judging.difference(alone, answer([5, 8, 1], [-1.0, -2.4, -9.0])) == (1, "")  # a tie; what follows has no place alone
    assert judging.difference(alone, answer([5, 9, 1], [-1.0, -2.4, -9.0])) == (1, "token 1 is 9, which is less likely than 6 by 1.50")
    assert judging.difference(alone, answer([4, 6, 7], [-1.0, -2.0, -0.5]))[1] == "token 0 is 4, which is less likely than 5 by inf"
    assert judging.difference(alone, answer([5, 6, 7], [-1.0, -2.0, -1.6]))[1] == "the logprob of token 2 is -1.600, alone -0.500"
    assert judging.difference(alone, answer([5, 6, 7], [-1.0, float("nan"), -0.5]))[0] == 1
    assert judging.difference(alone, answer([5, 6], [-1.0, -2.0])) == (2, "it ends at 2")
    assert judging.difference(alone, answer([5, 8, 1], [-1.0, -4.0, -9.0])) == (1, "the logprob of token 1, 8, is -4.000, alone -2.500")
    assert "the same tokens are the text 'of another'" in judging.difference(alone, replace(alone, text="of another"))[1]
    assert judging.difference(alone, answer([5, 6, 7, 7], [-1.0, -2.0, -0.5, -1.0]))[0] == 3
    assert judging.complaints(alone, 3) == []
    assert judging.complaints(alone, 4) == ["3 tokens of 4, which end by length"]
    assert judging.complaints(answer([5], [-1.0], finish="stop"), 4) == []
    assert judging.complaints(answer([5], [float("nan")], finish="stop"), 4) != []


def test_what_a_client_stumbles_over_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(_: Any) -> Any:
        raise AttributeError("no answer has that form")

    soak = run.Soak(argparse.Namespace(seed=0, requests=2, clients=1), 100, tmp_path / "log", print)
    soak.traffic = SimpleNamespace(draw=draw)  # type: ignore[assignment]
    monkeypatch.setattr(soak, "_check_health", lambda: None)
    soak._mixed(0)
    assert soak.failures == ["a client: AttributeError: no answer has that form"]


def test_known_requests_without_tokens_judge_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soak = run.Soak(argparse.Namespace(), 100, tmp_path / "log", print)
    alone = answer([5, 6], [-1.0, -2.0])
    best = [{5: -1.0}, {6: -2.0}]
    soak.alone["short"] = alone
    soak._say_best("short", replace(alone, best=best, tokens=[], logprobs=[]))
    assert soak.alone["short"] == replace(alone, best=best)
    soak.alone["short"] = replace(alone, tokens=[], logprobs=[])
    with pytest.raises(run.Over, match="0 tokens and 2 with the most likely ones, not 2"):
        soak._say_best("short", replace(alone, best=best, tokens=[], logprobs=[]))
    soak.traffic = SimpleNamespace(known_body=lambda name: name)  # type: ignore[assignment]
    monkeypatch.setattr(soak, "_alone", lambda _: alone)
    soak._say_best("short", replace(alone, text="another", best=best))
    assert soak.failures == ["alone, 'short', gave another text with top_logprobs: 'another'"]


def test_an_answer_without_an_end_is_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pour() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as connection:
                while True:
                    connection.sendall(b"x" * 1000)

        threading.Thread(target=pour, daemon=True).start()
        before = time.monotonic()
        with pytest.raises(Late):
            exchange(listening.getsockname()[1], b"", 0.5)
        assert time.monotonic() - before < 10


def test_streams_end() -> None:
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 2}}\n\n'
    text = b': keepalive 1/2\n\ndata: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\n'
    assert said(Reply(200, text + usage + b"data: [DONE]\n\n"), streamed=True) == Answer("a", 1, "length", 2)
    for body in (text + usage, text + b"data: [DONE]\n\n", b""):
        with pytest.raises(ValueError, match=r"stream|usage"):
            said(Reply(200, body), streamed=True)


def test_growth() -> None:
    captured = [0, 0, 0, 100, 100, 100, 300, 300, 300]
    held = [{"active": 10.0 + each, "captured": float(each), "host": 100.0, "threads": 3, "files": 8} for each in captured]
    assert set(judging.growth(held).values()) == {0.0}
    more = [{**each, "active": each["active"] + 20 * at, "files": 8 + at // 3} for at, each in enumerate(held)]
    assert judging.grown(more) == ["active grew by 60.0, from 10.0", "files grew by 1.0, from 8.0"]
    assert judging.growth(held[:8]) == {}


def test_what_the_server_writes() -> None:
    frames = 'Traceback (most recent call last):\n  File "/lib/python3.12/socketserver.py", line 1, in serve\n    x\n'
    log = (
        f'{frames}BrokenPipeError: [Errno 32]\n127.0.0.1 - - "GET"\n{frames}json.decoder.JSONDecodeError: x\n{frames}ConnectionResetError\n'
    )
    assert judging.errors(log) == []
    assert len(judging.errors(f"{log}{frames}RuntimeError: [malloc] Unable\n")) == 1
    through_ours = frames.replace("lib/python3.12/socketserver", "site-packages/mlx_cuda/_mlx_lm/models")
    assert len(judging.errors(f"{log}{through_ours}BrokenPipeError: x\n")) == 1
    assert judging.not_clean(0, "a\nended\n") == ""
    assert judging.not_clean(-signal.SIGABRT, f"a\nended\n{judging.OF_MLX_AT_THE_END}\n") == ""
    stack = "[vm:00858] *** Process received signal ***\n[vm:00858] [17] /site/mlx/core.so(+0xeef62)[0x7f07af12bf62]\n"
    assert judging.not_clean(-signal.SIGABRT, f"a\nended\n{judging.OF_MLX_AT_THE_END}\n{stack}") == ""
    ours = stack.replace("mlx/core.so", "mlx_cuda/_cu13.abi3.so")
    assert judging.not_clean(-signal.SIGABRT, f"a\nended\n{judging.OF_MLX_AT_THE_END}\n{ours}") != ""
    assert judging.not_clean(-signal.SIGABRT, f"a\nended\n{judging.OF_MLX_AT_THE_END}\nwhat\n{stack}") != ""
    assert judging.not_clean(-signal.SIGABRT, f"a\n{judging.OF_MLX_AT_THE_END}\n") != ""
    assert judging.not_clean(-signal.SIGABRT, "a\nended\nterminate called after throwing\n") != ""
    assert judging.not_clean(-signal.SIGSEGV, "a\nended\n") != ""


class Memory:
    """A GPU's, of which others have some."""

    def __init__(self, total: int, others: int) -> None:
        self.total, self.others, self.own = total, others, 0

    def info(self) -> tuple[int, int]:
        return self.total - self.others - self.own, self.total

    def allocate(self, size: int) -> bool:
        if self.info()[0] < size:
            return False
        self.own += size
        return True


def test_ballast_tops_up() -> None:
    total = 80_000 * ballast.MIB
    held = ballast.Ballast(memory := Memory(total, 2_000 * ballast.MIB))
    assert held.answer("read") == {"total": 80_000, "held": 0, "others": 2_000}
    held.answer("fill 95")
    assert 0.949 < (memory.own + memory.others) / total <= 0.95
    memory.others += 1_000 * ballast.MIB
    before = memory.own
    held.top_up()
    assert memory.own == before  # what others have taken is theirs
    memory.others -= 1_500 * ballast.MIB
    held.top_up()
    assert 0.949 < (memory.own + memory.others) / total <= 0.95


def test_a_process_ends_when_nobody_asks() -> None:
    program = "import sys; from tests.soak.children import answer_lines; answer_lines(lambda word: {'word': word}, sys.stdout)"
    with open("/dev/null", "wb") as log:  # noqa: PTH123
        child = Child(["-c", program], log)
        try:
            assert child.ask("one", 10) == {"word": "one"}
            assert child.process.stdin is not None
            child.process.stdin.close()
            assert child.process.wait(10) == 0
        finally:
            child.end()
        silent = Child(["-c", "import time; time.sleep(60)"], log)
        try:
            before = time.monotonic()
            with pytest.raises(Silent, match=r"no answer to 'one' within 0\.5 s"):
                silent.ask("one", 0.5)
            assert time.monotonic() - before < 10
        finally:
            silent.end()
        gone = Child(["-c", "pass"], log)
        gone.process.wait(10)
        with pytest.raises(Silent, match="ended with 0"):
            gone.ask("one", 1)
        gone.end()


def test_a_process_that_hangs_ends_with_the_soak() -> None:
    hangs = "from tests.soak.children import end_with_parent; end_with_parent(); print(flush=True); import time; time.sleep(60)"
    program = (
        "import sys; from tests.soak.children import Child; "
        f"child = Child(['-c', {hangs!r}], open('/dev/null', 'wb')); child.process.stdout.readline(); "
        "print(child.process.pid, flush=True); sys.stdin.read()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment(), **pipes) as soak:
        assert soak.stdout is not None
        number = int(soak.stdout.readline())
        soak.kill()
    until = time.monotonic() + 10
    while _runs(number) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(number)


def _runs(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text("utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
