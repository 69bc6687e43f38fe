"""Processes that answer lines, and end when nobody is there to ask: the server and what fills the GPU's memory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

CHECKOUT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def environment() -> dict[str, str]:
    """What is imported here can be imported there; nothing is downloaded."""
    path = os.pathsep.join([str(CHECKOUT), *sys.path])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Silent(Exception):
    """A process did not answer."""


class Child:
    """It has a session of its own: an interrupt of the terminal is for the program that started it."""

    def __init__(self, words: Sequence[str], log: IO[bytes]) -> None:
        """``words``: for Python. ``log``: what it writes to stderr."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "bufsize": 0}
        self.process = subprocess.Popen([sys.executable, *words], env=environment(), start_new_session=True, **pipes)

    def ask(self, word: str, seconds: float) -> dict[str, Any]:
        process = self.process
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018  (for mypy)
        try:
            process.stdin.write(f"{word}\n".encode())
        except OSError as error:
            raise Silent(f"the process has ended with {process.wait(seconds)}") from error
        line, until = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise Silent(f"no answer to {word!r} within {seconds:g} s")
            if not (more := process.stdout.readline()):
                raise Silent(f"the process has ended with {process.wait(seconds)}")
            line += more
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def end_with_parent() -> None:
    """Have Linux kill this process when the thread that has started it ends: the end of stdin is not seen by one that hangs."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def answer_lines(answer: Callable[[str], dict[str, Any]], replies: IO[str]) -> None:
    """Until the end of stdin. Read without a buffer, whose lock a thread would hold when Python ends."""
    rest = b""
    while more := os.read(0, 4096):
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
            print(json.dumps(answer(line.decode())), file=replies, flush=True)
