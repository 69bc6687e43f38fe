"""What is wrong with an answer, with the memory of a run, and with what the server has written."""

from __future__ import annotations

import re
import signal
import statistics
from collections.abc import Mapping, Sequence

from .wire import Answer

# Logarithms of probability of one token that two ways of computing give: logits of bfloat16 between 32 and 64 are a quarter apart, and
# each way may be off by two of these.
APART = 1.0
FEWEST_READINGS = 9  # of which three are the middle and three the end
# MiB, and numbers. "active" and "driver" are without captured steps, which come and go with the sizes of batches and have a limit of
# their own; the driver's also has kernels that are loaded late.
GROWTH = {"active": 32.0, "driver": 192.0, "host": 96.0, "threads": 0.0, "files": 0.0}
# Errors that end the thread of one connection in mlx-lm's own server: the client has gone, or sent what nobody can read.
UPSTREAMS = {"BrokenPipeError", "ConnectionResetError", "UnicodeDecodeError", "JSONDecodeError", "RecursionError"}
OF_A_SEED = "TypeError: seed(): incompatible function arguments"
ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit))(?::|$)")
OURS = re.compile(r'^\s+File ".*/mlx_cuda/')
# How C++ ends a program whose threads are still there: MLX's are, now and then, when Python ends, with mlx-lm's own server too.
OF_MLX_AT_THE_END = "terminate called without an active exception"
OF_A_STACK = re.compile(r"\[[\w.-]+:\d+\] (?!.*mlx_cuda)")  # as Open MPI writes it, which MLX loads, with no frame of this package


def complaints(answer: Answer, wanted: int) -> list[str]:
    """Of any answer with at most so many tokens."""
    found = []
    whole = answer.count == wanted if answer.finish == "length" else answer.finish == "stop" and 0 < answer.count <= wanted
    if not whole:
        found.append(f"{answer.count} tokens of {wanted}, which end by {answer.finish}")
    if answer.tokens and (len(answer.tokens) != answer.count or not all(value <= 1e-3 for value in answer.logprobs)):
        found.append(f"{len(answer.tokens)} of {answer.count} tokens, logprobs {answer.logprobs[:5]}, …")
    return found


def difference(alone: Answer, other: Answer) -> tuple[int | None, str]:
    """Where an answer leaves that of the same greedy request alone, None if nowhere; and what is wrong with it.

    The first other token has to be nearly as likely as the one in its place, and the logprobs until there nearly the same. What follows it
    has no place in the answer alone.
    """
    for at, (token, own) in enumerate(zip(other.tokens, other.logprobs, strict=True)):
        if at >= len(alone.tokens):
            return at, f"it goes on after token {at}, where it ends alone"
        if token != alone.tokens[at]:
            best = alone.best[at]
            gap = max(best.values()) - best.get(token, float("-inf"))
            if not gap <= APART:
                return at, f"token {at} is {token}, which is less likely than {alone.tokens[at]} by {gap:.2f}"
            near = abs(own - best[token]) <= APART
            return at, "" if near else f"the logprob of token {at}, {token}, is {own:.3f}, alone {best[token]:.3f}"
        if not abs(own - alone.logprobs[at]) <= APART:
            return at, f"the logprob of token {at} is {own:.3f}, alone {alone.logprobs[at]:.3f}"
    if len(other.tokens) != len(alone.tokens):
        return len(other.tokens), f"it ends at {len(other.tokens)}"
    return None, "" if other.text == alone.text else f"the same tokens are the text {other.text!r}, alone {alone.text!r}"


def growth(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By how much the last third's median is above the middle third's."""
    third = len(readings) // 3
    found = {}
    for name in GROWTH if len(readings) >= FEWEST_READINGS else ():
        series = [each[name] - (each["captured"] if name in {"active", "driver"} else 0.0) for each in readings if name in each]
        if len(series) == len(readings):
            found[name] = statistics.median(series[-third:]) - statistics.median(series[third : 2 * third])
    return found


def grown(readings: Sequence[Mapping[str, float]]) -> list[str]:
    return [f"{name} grew by {by:.1f}, from {readings[0][name]:.1f}" for name, by in growth(readings).items() if by > GROWTH[name]]


def errors(log: str) -> list[str]:
    """What has been written but for what mlx-lm's server writes by itself, with some lines before it. Lines of threads may be mixed."""
    lines, found = log.splitlines(), []
    for number, line in enumerate(lines):
        error = ERROR.match(line)
        if OURS.match(line) or (error and error[1] not in UPSTREAMS and not line.startswith(OF_A_SEED)):
            found.append("\n".join(lines[max(0, number - 6) : number + 1]))
    return found


def not_clean(code: int, log: str) -> str:
    """What is wrong with how the server has ended."""
    _, ended, after = log.rpartition("\nended\n")
    if not ended:
        return f"the server ended with {code} before it had come to its end: {log[-2000:]}"
    first, *stack = after.strip().splitlines() or [""]
    of_mlx = code == -signal.SIGABRT and first == OF_MLX_AT_THE_END and all(OF_A_STACK.match(line) for line in stack)
    return "" if code == 0 or of_mlx else f"it ended with {code}: {after[-2000:]}"
