"""Requests that are wrong, and how mlx-lm's own server answers them: by a status, or by closing the connection (0).

Not among these is what ends the thread of mlx-lm 0.32.2 that generates, after which it serves nobody, patched or not: a prompt without
tokens, a list of prompts, ``top_k`` of the vocabulary's size, stop words that are no texts. Nor a ``logit_bias`` for tokens that there are
not: MLX writes out of bounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .wire import CHAT, COMPLETIONS, post


class Wrong(NamedTuple):
    """``statuses``: what upstream's server answers; several where it depends on the model's chat template."""

    sent: bytes
    statuses: tuple[int, ...]


def _head(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: soak", *headers, "", ""]).encode()


def _with(path: str = COMPLETIONS, **wrong: Any) -> bytes:
    given = {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": "Hello"}
    return post(path, {**given, "max_tokens": 3, **wrong})


def requests() -> dict[str, Wrong]:
    typed: dict[str, Any] = {
        "max_tokens": (-5, 0, "ten", 1.5, None), "temperature": ("hot", -1, None), "top_p": (2, "x"), "top_k": (-1, 0.5), "min_p": (-0.5,),
        "stream": ("yes", 1), "logprobs": (3,), "top_logprobs": (12, "x"), "seed": (1.5, "x"), "model": (5, None), "adapters": (5,),
        "logit_bias": ({"a": 1}, {"1": "x"}, [1]), "repetition_penalty": (-1, "x"), "xtc_probability": ("x",),
    }  # fmt: skip
    found = {f"{name} {value!r}": Wrong(_with(**{name: value}), (400,)) for name, values in typed.items() for value in values}
    found |= {
        f"prompt {value!r}": Wrong(post(COMPLETIONS, {"prompt": value, "max_tokens": 3}), (404,)) for value in (5, None, [1, 2], {"a": 1})
    }
    found |= {f"messages {value!r}": Wrong(_with(CHAT, messages=value), (400,)) for value in ("hello", 5, [5], None)}
    return {
        **found,
        "a message without a role": Wrong(_with(CHAT, messages=[{"content": "Hello"}]), (404,)),
        "a number for content": Wrong(_with(CHAT, messages=[{"role": "user", "content": 5}]), (200, 404)),
        "half a character": Wrong(post(COMPLETIONS, b'{"prompt": "\\ud800", "max_tokens": 3}'), (404,)),
        "no prompt": Wrong(post(COMPLETIONS, {"max_tokens": 3}), (400,)),
        "no messages": Wrong(post(CHAT, {"max_tokens": 3}), (400,)),
        "a model that is not there": Wrong(_with(model="nobody/has-this-model"), (404,)),
        "a seed below 0": Wrong(_with(seed=-1), (0,)),
        "half of JSON": Wrong(post(COMPLETIONS, b'{"prompt": '), (400,)),
        "a list": Wrong(post(COMPLETIONS, b"[1]"), (400,)),
        "no body": Wrong(post(COMPLETIONS, b""), (400,)),
        "deep JSON": Wrong(post(COMPLETIONS, b"[" * 100_000), (0,)),
        "8 MB": Wrong(_with(max_tokens=-1, padding="x" * 8_000_000), (400,)),
        "bytes": Wrong(post(COMPLETIONS, bytes(range(256))), (0,)),
        "no HTTP": Wrong(bytes(range(128, 256)) + b" \x00 x\r\n\r\n", (0,)),
        "a long header": Wrong(_head(f"POST {COMPLETIONS}", "X-Padding: " + "x" * 70_000), (431, 0)),
        "no length": Wrong(_head(f"POST {COMPLETIONS}"), (411,)),
        "a length in words": Wrong(_head(f"POST {COMPLETIONS}", "Content-Length: ten"), (400,)),
        "an unknown path": Wrong(post("/v1/nothing", b""), (404,)),
        "GET of an unknown path": Wrong(_head("GET /v2"), (404,)),
        "GET of completions": Wrong(_head(f"GET {COMPLETIONS}"), (404,)),
        "PUT": Wrong(_head(f"PUT {COMPLETIONS}"), (501,)),
    }
