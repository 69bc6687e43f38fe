"""Requests as bytes, and what comes back: byte by byte, so that wrong ones can be sent and connections be closed midway."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: soak\r\n\r\n"


class Late(Exception):
    """There was no whole answer in time."""


@dataclass(frozen=True)
class Reply:
    """``status``: 0 where the connection was closed without an answer. ``closed``: by us, before the end."""

    status: int
    body: bytes
    closed: bool = False


@dataclass(frozen=True)
class Answer:
    """What a model said; ``tokens`` and ``logprobs`` where they were asked for."""

    text: str
    count: int
    finish: str | None
    prompt: int  # tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[dict[int, float]] = field(default_factory=list)  # of each token, the most likely ones in its place


def post(path: str, body: bytes | Mapping[str, Any]) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def exchange(port: int, sent: bytes, seconds: float, closed_after: int | None = None) -> Reply:
    """Send all of it, and read to the end, or until so many bytes are there. mlx-lm's server closes each connection."""
    until, read = time.monotonic() + seconds, b""
    ended = False
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
            connection.sendall(sent)
            while closed_after is None or len(read) < closed_after:
                if (left := until - time.monotonic()) <= 0:  # though there is always more to read
                    raise TimeoutError
                connection.settimeout(left)
                if not (more := connection.recv(1 << 16)):
                    ended = True
                    break
                read += more
    except TimeoutError:
        raise Late(f"no whole answer within {seconds:.0f} s, {len(read)} bytes of it") from None
    except ConnectionError:  # of a server that closes what it has not read to the end
        ended = True
    head, _, body = read.partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    status = int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0
    return Reply(status, body if status else read, closed=not ended)


def said(reply: Reply, *, streamed: bool) -> Answer:
    """An answer's content; ValueError where it is none."""
    try:
        return _streamed(reply.body) if streamed else _whole(json.loads(reply.body))
    except (LookupError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


def _whole(content: Mapping[str, Any]) -> Answer:
    choice, usage = content["choices"][0], content["usage"]
    tokens = (choice.get("logprobs") or {}).get("content", [])
    best = [{each["id"]: each["logprob"] for each in token["top_logprobs"]} for token in tokens if "top_logprobs" in token]
    found = Answer(_text(choice), usage["completion_tokens"], choice["finish_reason"], usage["prompt_tokens"], best=best)
    if not best:  # beside these mlx-lm does not say which it took
        found.tokens.extend(token["id"] for token in tokens)
        found.logprobs.extend(token["logprob"] for token in tokens)
    return found


def _streamed(body: bytes) -> Answer:
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    if not lines or lines.pop() != b"[DONE]":
        raise ValueError("the stream does not end with [DONE]")
    parts = [json.loads(line) for line in lines]
    usage = parts.pop()["usage"]
    choices = [part["choices"][0] for part in parts]
    return Answer("".join(map(_text, choices)), usage["completion_tokens"], choices[-1]["finish_reason"], usage["prompt_tokens"])
