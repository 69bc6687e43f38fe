"""A model on both sides: what the parts of ``parts.py`` have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx_cuda
from mlx_cuda._mlx_lm.models import decoding_of

from benchmarks.mlx_lm_parts import part

from .judging import Difference, Reading, first_difference, near, wrong
from .loading import in_float32, load, read

Result = TypeVar("Result")

SIDES = ("upstream", "patched")
TOPICS = ("assignment", "class", "dynamic-features", "exceptions", "execmodel", "formatstrings", "import", "objects", "types")


@dataclass(frozen=True)
class Sizes:
    """In tokens: the parts in which a text is read, steps after them, and of an answer; ``long``: a prompt beyond Gemma's windows."""

    parts: tuple[int, ...] = (300, 511, 213)
    steps: int = 256
    answer: int = 200
    long: int = 600
    prompts: int = 10
    trained: int = 50  # steps
    rows: int = 4  # sequences of a training step
    length: int = 256


QUICK = Sizes(parts=(40, 71, 17), steps=12, answer=16, long=90, prompts=2, trained=6, rows=2, length=64)


def text() -> str:
    """Prose and code of Python's manual, which it brings itself: so what a perplexity is depends on which Python it is."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in TOPICS if name in topics)


@dataclass
class Answer:
    """Tokens after a prompt, and the logits, or their logarithms of probability, that they were chosen by, where they were kept."""

    prompt: list[int]
    tokens: list[int]
    logits: mx.array | None = None


class Trial:
    def __init__(self, folder: Path, form: str, sizes: Sizes) -> None:
        self.folder, self.form, self.sizes = folder, form, sizes
        self.model, self.tokenizer = load(folder, form)

    @cached_property
    def exact(self) -> Any:
        return in_float32(self.folder, self.model)

    @cached_property
    def ids(self) -> list[int]:
        """The text's tokens, the first one of a sequence among them where the model has one."""
        return list(self.tokenizer.encode(text()))

    @property
    def begin(self) -> list[int]:
        """What each sequence begins with."""
        return self.ids[:1] if self.ids[0] == self.tokenizer.bos_token_id else []

    def cut(self, at: int, length: int) -> list[int]:
        """Some of the text as a prompt."""
        at += len(self.begin)
        return [*self.begin, *self.ids[at : at + length]]

    def ask(self, question: str) -> list[int]:
        """A question as the model wants it, or the beginning of a text where it was not taught to answer."""
        if not self.tokenizer.has_chat_template:
            return list(self.tokenizer.encode(question))
        message = [{"role": "user", "content": question}]
        return list(self.tokenizer.apply_chat_template(message, add_generation_prompt=True))

    def new_cache(self, model: Any = None) -> list[Any]:
        return part("models.cache").make_prompt_cache(model or self.model)  # type: ignore[no-any-return]

    def on_both(self, function: Callable[[], Result], steps_of: Any = None) -> dict[str, Result]:
        """What it gives without ``patch()`` and with it. A failure of upstream's alone is no failure.

        ``steps_of``: the model whose replayed steps are counted, where it is another.
        """
        found, failed = {}, None
        try:
            found["upstream"] = function()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        with mlx_cuda.patch():
            found["patched"] = function()
            self.replayed = decoding_of(steps_of or self.model).replayed
        self.upstream_failed = failed
        return found

    def logits_after(self, model: Any, answer: Answer) -> mx.array:
        """Those from which each token of an answer is chosen, ``[tokens, vocabulary]``, in one call."""
        given = mx.array([[*answer.prompt, *answer.tokens[:-1]]])
        logits: mx.array = model(given)[0, len(answer.prompt) - 1 :]
        mx.eval(logits)
        return logits

    def reading_of(self, answer: Answer) -> tuple[Reading, Reading]:
        """An answer's tokens beside float32's, and beside it what upstream's logits would be: its errors say what a tie is.

        Where the answer has the logits that it was chosen by, those are read.
        """
        exact, tokens = self.logits_after(self.exact, answer), mx.array(answer.tokens)
        theirs = read(self.logits_after(self.model, answer), exact, tokens, chosen=tokens)
        return theirs if answer.logits is None else read(answer.logits, exact, tokens, chosen=tokens), theirs

    def judged(self, sides: dict[str, list[Answer]]) -> dict[str, Any]:
        """How many tokens of each side's answers float32 would not have chosen, and how many of these are no ties."""
        readings = {side: [self.reading_of(answer) for answer in answers] for side, answers in sides.items()}
        closest = near(*(theirs for side in readings.values() for _, theirs in side))
        return {
            "answers": {side: len(answers) for side, answers in sides.items()},
            "tokens": {side: sum(len(answer.tokens) for answer in answers) for side, answers in sides.items()},
            "tie": closest,
            "other tokens": {side: sum(lost > 0 for own, _ in found for lost in own.lost) for side, found in readings.items()},
            "wrong tokens": {side: sum(len(wrong(own, closest)) for own, _ in found) for side, found in readings.items()},
            "replayed": self.replayed,
            **({"upstream failed": self.upstream_failed} if self.upstream_failed else {}),
        }

    def difference(self, upstream: Answer, patched: Answer) -> Difference | None:
        """Where two answers with logits part, and what float32 says of that place."""
        position = first_difference(upstream.tokens, patched.tokens)
        if position is None:
            return None
        common = Answer(upstream.prompt, upstream.tokens[: position + 1])
        exact, after = self.logits_after(self.exact, common)[-1:], mx.array(upstream.tokens[position : position + 1])
        sides = dict(zip(SIDES, (upstream, patched), strict=True))
        found = {side: read(each.logits[position][None], exact, after) for side, each in sides.items()}  # type: ignore[index]
        tokens = {side: each.tokens[position] for side, each in sides.items()}
        gap = abs(float((exact[0, tokens["upstream"]] - exact[0, tokens["patched"]]).item()))  # type: ignore[arg-type]
        errors = {side: reading.error[0] for side, reading in found.items()}
        best: Any = exact.argmax().item()
        return Difference(position, tokens, best, gap, gap <= near(found["upstream"]), errors)


def as_numbers(difference: Difference | None, length: int) -> dict[str, Any]:
    """For a results file; ``length``: of the answers."""
    return {"equal": length} if difference is None else asdict(difference)


def generate(model: Any, prompt: Sequence[int], count: int, **options: Any) -> Answer:
    """mlx-lm's own generation of one request, greedy, with its logarithms of probability."""
    steps = list(part("generate").generate_step(mx.array(list(prompt), mx.uint32), model, max_tokens=count, **options))
    return Answer(list(prompt), [int(token) for token, _ in steps], mx.stack([logprobs for _, logprobs in steps]))
