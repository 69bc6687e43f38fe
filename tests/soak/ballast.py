"""Holds a GPU's memory, so that others have little: it answers lines on stdin, and all is free when it ends.

``read``: how much the GPU has, how much of it this process holds, and the others. ``fill 95``: from here on, allocate whenever less
than 95 % of the memory is in use.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, Protocol

from .children import answer_lines, end_with_parent

MIB = 2**20
PIECES = (256 * MIB, 32 * MIB)  # of memory that is allocated at a time, as long as they fit
AGAIN = 0.1  # seconds


class Memory(Protocol):
    """What is asked of a GPU."""

    def info(self) -> tuple[int, int]:
        """Bytes that are free, and all."""

    def allocate(self, size: int) -> bool:
        """Whether there was room."""


class Driver:
    """The first GPU's memory, by the driver alone."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        for failed in (
            self.cuda.cuInit(0),
            self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            self.cuda.cuCtxSetCurrent(context),
        ):
            if failed:
                raise RuntimeError(f"the driver gives no context: error {failed}")
        self.context = context

    def info(self) -> tuple[int, int]:
        self.cuda.cuCtxSetCurrent(self.context)  # of this thread
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if failed := self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
            raise RuntimeError(f"cuMemGetInfo: error {failed}")
        return free.value, total.value

    def allocate(self, size: int) -> bool:
        self.cuda.cuCtxSetCurrent(self.context)
        return self.cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size)) == 0  # type: ignore[no-any-return]


class Ballast:
    """``share``: of the memory, what is to be in use; nothing is allocated as long as there is none."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.held, self.share = memory, 0, 0.0
        self.lock = threading.Lock()

    def top_up(self) -> None:
        with self.lock:
            for piece in PIECES:
                while self.share:
                    free, total = self.memory.info()
                    if total - free + piece > self.share * total or not self.memory.allocate(piece):
                        break
                    self.held += piece

    def answer(self, line: str) -> dict[str, Any]:
        word, *rest = line.split()
        if word == "fill":
            self.share = float(rest[0]) / 100
            self.top_up()
        with self.lock:
            free, total = self.memory.info()
            return {"total": total / MIB, "held": self.held / MIB, "others": (total - free - self.held) / MIB}


def main() -> None:
    end_with_parent()
    ballast = Ballast(Driver())
    over = threading.Event()

    def keep() -> None:
        while not over.wait(AGAIN):
            ballast.top_up()

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    answer_lines(ballast.answer, sys.stdout)
    over.set()
    thread.join()


if __name__ == "__main__":
    main()
