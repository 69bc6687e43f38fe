"""The JSON that the processes of a check exchange, and its results as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

SideName = Literal["upstream", "patched", "float32"]
Status = Literal["ok", "warn", "fail", "skip"]


class Passage(TypedDict):
    """For each position of a text: the negative log-likelihood of the next token, and the logits of a few tokens."""

    nll: list[float]
    ids: list[list[int]]
    values: list[list[float]]


class Answer(TypedDict):
    """The greedy tokens after a prompt. ``ids`` and ``values`` as in a passage; not for the patched side."""

    prompt: list[int]
    tokens: list[int]
    ids: list[list[int]]
    values: list[list[float]]


class Judged(TypedDict):
    """An answer in float32: the logits of the same tokens, and how far each token of both sides is below the maximum."""

    values: list[list[float]]
    upstream: list[float]
    patched: list[float] | None  # None where it has the same tokens


class Steps(TypedDict):
    """The number of decode steps in one part of the check, and how many of them were launches of a captured CUDA graph."""

    where: str
    taken: int
    replayed: int
    reason: str  # what the captured step consists of, or why steps were not captured


class Calls(TypedDict):
    """The number of calls of a function of MLX or mlx-lm with the same engine and reason."""

    function: str
    engine: str
    count: int
    ours: bool
    reason: str


class Side(TypedDict, total=False):
    """The measurements of one process; ``errors``: those of parts that failed, by name."""

    about: dict[str, str]
    folder: str  # that the model was loaded from
    tokens: list[int]
    prompts: list[list[int]]
    passages: dict[str, Passage]
    answers: dict[str, list[Answer]]
    judged: dict[str, list[Judged]]
    speeds: dict[str, float]
    memory: dict[str, int]
    steps: list[Steps]
    calls: list[Calls]
    unused: str  # why no kernel of mlx-cuda can run, or nothing
    broken: bool  # whether one should
    errors: dict[str, str]


class Task(TypedDict):
    """The task of a process; ``upstream`` and ``patched``: the measurements of the processes before it."""

    side: SideName
    model: str
    quick: bool
    upstream: Side
    patched: Side


@dataclass(frozen=True)
class Row:
    """A row of the table. Numbers are those of MLX alone, with :func:`mlx_cuda.patch`, and in float32, if measured."""

    name: str
    status: Status
    upstream: float | None = None
    patched: float | None = None
    float32: float | None = None
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class ModelCheck:
    """The result of :func:`mlx_cuda.check`. ``ok`` is true if no row has the status "fail".

    ``seconds`` is the duration of the check, and ``about`` has the model, versions and device. ``rows`` has the comparisons. ``calls`` has
    the engines of prefill and ``steps`` the number of decode steps that were launched as CUDA graphs, both with the reason.
    """

    model: str
    ok: bool
    quick: bool
    seconds: float
    about: dict[str, str]
    rows: tuple[Row, ...]
    calls: tuple[Calls, ...]
    steps: tuple[Steps, ...]
