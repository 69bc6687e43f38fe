"""Which requests are made: at random, of many kinds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from .malformed import requests
from .wire import CHAT, COMPLETIONS, post

TEXT = " ".join(" ".join(topics[name].split()) for name in sorted(topics))  # of Python's own manual
SHARES = {"known": 0.2, "malformed": 0.15, "cancelled": 0.15, "beyond": 0.02}  # the rest are of all kinds
OUTPUTS = (1, 3, 20, 64, 150)


class Request(NamedTuple):
    """``name``: of a known one, or a malformed one. ``statuses``: what may come. ``closed_after``: so many bytes, by us."""

    kind: str
    name: str
    sent: bytes
    statuses: tuple[int, ...] = (200,)
    wanted: int = 0
    streamed: bool = False
    closed_after: int | None = None


class Traffic:
    """``longest``: tokens of an ordinary prompt; ``window``: how many the model was made for; ``letters``: of a token, about.

    ``wanted``: tokens of an answer to a known one.
    """

    def __init__(self, longest: int, window: int, letters: float, wanted: int) -> None:
        self.longest, self.window, self.letters, self.wanted = longest, window, letters, wanted
        self.malformed = requests()
        # Greedy, and asked again and again. Two of them begin alike, one is of one word.
        lengths = {"a word": 1, "short": 12, "middle": longest // 8, "long": longest // 2, "as long": longest // 2, "longest": longest}
        places = {name: 1000 * place for place, name in enumerate(lengths)} | {"as long": 3000}
        self.known = {name: self.text(places[name], length) for name, length in lengths.items()}
        self.known["as long"] += " And so"

    def text(self, at: int, tokens: float) -> str:
        length = max(2, round(tokens * self.letters))
        found = TEXT[at : at + length]
        return found + TEXT[: length - len(found)]

    def known_body(self, name: str, **options: Any) -> dict[str, Any]:
        return {"prompt": self.known[name], "max_tokens": self.wanted, "temperature": 0.0, "logprobs": True, **options}

    def draw(self, chance: random.Random) -> Request:
        kinds = [*SHARES, "plain"]
        (kind,) = chance.choices(kinds, [*SHARES.values(), 1 - sum(SHARES.values())])
        if kind == "malformed":
            name = chance.choice(list(self.malformed))
            return Request(kind, name, *self.malformed[name])
        if kind == "known":
            name = chance.choice(list(self.known))
            return Request(kind, name, post(COMPLETIONS, self.known_body(name)), wanted=self.wanted)
        path, body = self._plain(chance, chance.choice(OUTPUTS), beyond=kind == "beyond")
        sent, streamed = post(path, body), bool(body.get("stream"))
        request = Request(kind, f"{path}{' streamed' * streamed}", sent, wanted=body["max_tokens"], streamed=streamed)
        if kind != "cancelled":
            return request
        if chance.random() < 0.2:  # within its own body
            return request._replace(name="half sent", sent=sent[: -len(sent) // 4], closed_after=0)
        return request._replace(closed_after=chance.choice((0, 1, 300, 600, 2000)))

    def _plain(self, chance: random.Random, wanted: int, *, beyond: bool) -> tuple[str, Mapping[str, Any]]:
        length = 1.1 * self.window if beyond else self.longest ** chance.random()
        shared = 0 if chance.random() < 0.6 else chance.choice((8, 2)) * self.longest // 10
        prompt = self.text(0, shared) * bool(shared) + self.text(chance.randrange(len(TEXT)), length)
        body: dict[str, Any] = {"max_tokens": wanted}
        if chance.random() < 0.4:
            body |= {"temperature": 0.8, **chance.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.1}))}
        if chance.random() < 0.1:
            body |= {"seed": chance.randrange(100)}  # served alone, after all others
        if chance.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        elif chance.random() < 0.5:
            body |= chance.choice(({"logprobs": True}, {"top_logprobs": 5}))
        if chance.random() < 0.1:
            body |= {"stop": ["\n", " the"]}
        if chance.random() < 0.5:
            return COMPLETIONS, {"prompt": prompt, **body}
        messages = [{"role": "system", "content": "You are brief."}] * (chance.random() < 0.5) + [{"role": "user", "content": prompt}]
        return CHAT, {"messages": messages, **body}
