"""How much of each thing a check measures, and the text that it measures with."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from typing import Any

PROMPTS = (
    "Explain to a child in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List the planets of the solar system in their order, with one fact about each.",
    "What is the capital of France? Answer first, then tell a short story that takes place there.",
    "Translate into Spanish, French and German: Good morning, my friend. Is the ferry running today?",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show each step.",
    "Name three causes of the fall of the Roman Republic, and the most important one of them.",
    "Summarize this text in three sentences.\n\n",  # and the text's beginning, so that prompts differ in length
)
ROOM = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")  # in mlx-lm's model arguments: how many tokens there may be


@dataclass(frozen=True)
class Plan:
    """Counts of tokens, except ``answers`` (prompts that are answered one by one), ``batch`` (at once) and ``runs`` (of a timing)."""

    text: int
    context: int  # before the first decode step
    steps: int
    answers: int
    answer: int
    batch: int
    prompt: int  # of what is timed
    timed: int
    runs: int

    def within(self, room: int) -> Plan:
        """The same for a model that takes no more tokens than these."""
        half, most = room // 2, room - 1
        return replace(
            self,
            text=min(self.text, most),
            context=min(self.context, half),
            steps=min(self.steps, half - 1),
            answer=min(self.answer, half - 1),
            prompt=min(self.prompt, half),
            timed=min(self.timed, half - 1),
        )


FULL = Plan(text=2048, context=512, steps=256, answers=4, answer=128, batch=8, prompt=1024, timed=128, runs=3)
QUICK = Plan(text=512, context=256, steps=64, answers=2, answer=48, batch=8, prompt=512, timed=48, runs=1)


def plan_for(model: Any, *, quick: bool) -> Plan:
    """The measurements for a model of mlx-lm."""
    arguments = getattr(model, "args", None)
    rooms = [getattr(arguments, name, None) for name in ROOM]
    return (QUICK if quick else FULL).within(min([room for room in rooms if isinstance(room, int) and room > 0], default=1 << 30))


def text() -> str:
    """A story that was written for this; no model has been trained on it before that."""
    return (pkgutil.get_data(__package__, "text.txt") or b"").decode("utf-8")
