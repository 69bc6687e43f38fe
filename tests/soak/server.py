"""mlx-lm's own server under ``patch()``, with a thread that says what the process holds.

The program that started it (``python -m tests.soak``) asks by lines on stdin. Without it the server ends. SIGUSR1 prints the stack of each
thread. Whatever follows its own options are mlx_lm.server's.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
from mlx_cuda._loader import native
from mlx_cuda._mlx_lm import models
from mlx_cuda._mlx_lm.stand_ins import Session
from mlx_cuda._replay.pool import Pool

from .children import answer_lines, end_with_parent

MIB = 2**20
SHORTLY = 0.05  # seconds in which the server's thread has put away what it has answered


class Holdings:
    """What the process holds, in MiB and in numbers."""

    def __init__(self, server: Any) -> None:
        self.prompts: list[weakref.ref[Any]] = []
        holdings = self

        class Known(server.LRUPromptCache):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                holdings.prompts.append(weakref.ref(self))

        server.LRUPromptCache = Known

    def answer(self, word: str) -> dict[str, Any]:
        """``busy``: how many threads there are. ``forget``: let go of all prompts, with nothing under way. ``read``: that, and all else."""
        if word == "busy":
            return {"threads": threading.active_count()}
        time.sleep(SHORTLY)
        for prompts in [each() for each in self.prompts]:
            if prompts is not None:
                prompts.trim_to(n_sequences=0)
        if word == "forget":
            return {}
        gc.collect()
        cached = mx.get_cache_memory()
        mx.clear_cache()
        decodings = [each for each in models._all if each.model() is not None]
        return {
            "active": mx.get_active_memory() / MIB,
            "captured": sum(each.nbytes for each in gc.get_objects() if type(each) is Session or type(each) is Pool) / MIB,
            "cached": cached / MIB,
            "peak": mx.get_peak_memory() / MIB,
            "host": _resident(),
            "malloc": _allocated(),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "recorded": sum(each.captured for each in decodings),
            "replayed": sum(each.replayed for each in decodings),
            "reasons": sorted({each.reason for each in decodings if each.reason}),
            "errors": [error for each in decodings for error in each.errors],
            "plans": _plans() if mx.cuda.is_available() else 0,
            "gpu": mx.cuda.is_available(),
        }


def _plans() -> int:
    """Those of cuDNN that the native module has built."""
    module: Any = native.module(mx.default_stream(mx.gpu))
    return int(module.attention_plans())


def _resident() -> float:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def _allocated() -> float | None:
    """Of the host's memory what the program has from malloc and has not freed: growth of "host" alone is memory that malloc keeps."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:  # before glibc 2.33
        return None

    class Info(ctypes.Structure):
        names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
        _fields_ = tuple((name, ctypes.c_size_t) for name in names)

    mallinfo2.restype = Info
    info = mallinfo2()
    return float(info.uordblks + info.hblkhd) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.server", description=__doc__)
    parser.add_argument("--upstream", action="store_true", help="without patch()")
    parser.add_argument("--memory-limit", type=float, metavar="MIB", help="what MLX is to use, as where others have the rest of the GPU")
    options, rest = parser.parse_known_args()
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have had ignored for what runs in the background
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if options.memory_limit:
        mx.set_memory_limit(int(options.memory_limit * MIB))
    if not options.upstream:
        mlx_cuda.patch()
    server = importlib.import_module("mlx_lm.server")
    holdings = Holdings(server)

    def control() -> None:
        answer_lines(holdings.answer, replies)
        os._exit(1)

    threading.Thread(target=control, daemon=True).start()
    sys.argv = ["mlx_lm.server", *rest]
    server.main()
    print("ended", file=sys.stderr, flush=True)  # by itself: what comes after is Python's end, and MLX's


if __name__ == "__main__":
    main()
