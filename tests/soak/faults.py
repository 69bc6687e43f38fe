"""The server with a fault that begins after some answers, for the tests of what a soak notices: ``FAULT`` in the environment names it."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from . import server

AFTER = 60  # answers: the known requests have been made alone by then
KEPT: list[Any] = []


def leak_host(_: Any, __: Any) -> None:
    KEPT.append(b"x" * (4 << 20))


def leak_arrays(_: Any, __: Any) -> None:
    KEPT.append(mx.ones((1 << 20,), mx.float32))
    mx.eval(KEPT[-1])


def leak_files(_: Any, __: Any) -> None:
    KEPT.append(open(os.devnull))  # noqa: PTH123, SIM115


def leak_threads(_: Any, __: Any) -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def hang(_: Any, __: Any) -> None:
    time.sleep(1000)


def other_prompt(_: Any, request: Any) -> None:
    request.prompt = request.prompt[::-1]


def fewer_tokens(handler: Any, _: Any) -> None:
    handler.max_tokens = max(1, handler.max_tokens - 1)


def other_status(handler: Any, _: Any) -> None:
    handler._set_completion_headers = lambda *_: handler.send_response(500)


def die(_: Any, __: Any) -> None:
    os._exit(9)


def fail(_: Any, __: Any) -> None:
    raise KeyError("a fault")


def stay(_: Any, __: Any) -> None:
    importlib.import_module("mlx_lm.server").ResponseGenerator.stop_and_join = lambda _: time.sleep(1000)


def end_badly(_: Any, __: Any) -> None:
    importlib.import_module("mlx_lm.server").ResponseGenerator.stop_and_join = lambda _: os.abort()


def main() -> None:
    handler = importlib.import_module("mlx_lm.server").APIHandler
    fault: Callable[[Any, Any], None] = globals()[os.environ["FAULT"]]
    upstreams = handler.handle_completion
    count = 0

    def handle_completion(self: Any, request: Any, stop_words: Any) -> None:
        nonlocal count
        count += 1
        if count > AFTER:
            fault(self, request)
        upstreams(self, request, stop_words)

    handler.handle_completion = handle_completion
    server.main()


if __name__ == "__main__":
    main()
