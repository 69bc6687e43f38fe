"""What tables are made of: rows, and numbers as they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import floor, log10
from statistics import median
from textwrap import wrap
from typing import Any

from .record import CaseResult
from .result_file import DIGITS

# TB/s that reading reaches, which is what few queries to a long cache are held against.
MEMORY = {"NVIDIA H200": 4.3, "NVIDIA H100 80GB HBM3": 3.0}
SIDES = {"upstream": "MLX", "patched": "patched"}  # of models, as tables call them
WIDTH = 138  # of a document's lines
# What committed results call by former words, and what the tables show.
WORDS = (
    (r"\bours\b", "mlx-cuda"), (r"\bupstream\b", "MLX"), (r"\bdequantised\b", "dequantize"), (r", experts\b(?! of)", " (MoE)"),
    (r"\bcomposed\b", "fallback"), (r"\brecording it failed\b", "capture failed"),
    (r"\brecorded\b", "captured"), (r"\bplace on the host\b", "position on the CPU"),
    (r"\bproduct(s?) of experts\b", r"MoE GEMV\1"), (r"\bproduct(s?)\b", r"GEMV\1"), (r"\bsum over GPUs\b", "all-reduce"),
    (r"\bquantised\b", "quantized"), (r"sorted rows\b", "sorted tokens"), (r"tokens of (\d+) experts\b", r"tokens, top-\1"),
    (r"\bskinny\b", "small_m"),
    (r"\ba prompt's calls\b", "engines of prefill"), (r"\bnothing is wrong\b", "results agree"),
    (r"  only with patch\(\)", "  runs only with patch()"), (r"\bnor without patch\(\)", "fails without patch() too"),
    (r"MLX's side attends to the same values .* its own fails", "the MLX side uses the dequantized cache"),
)  # fmt: skip
ARITHMETIC = {"NVIDIA H200": 989.0}  # TFLOP/s in 16 bits of its data sheet, which no GEMM reaches


def speed(result: Mapping[str, Any], side: str, part: str = "decode") -> float:
    """Tokens per second of a model's ``prefill`` or steps: the median turn's, without the first; of torch those of its faster way."""
    if side == "torch":
        return float(max(result[side]["attention"].values()))
    at, tokens = {"prefill": (0, result["prompt"]), "decode": (1, result["generated"])}[part]
    return float(result["batch"] * tokens / median(turn[at] for turn in result[side]["seconds"][1:]))


def significant(value: float) -> str:
    """With as many digits as files of results have, of a number that is not zero."""
    return f"{value:.{max(0, DIGITS - 1 - floor(log10(value)))}f}"


def duration(seconds: float) -> str:
    return f"{significant(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def memory_share(case: CaseResult, device: str, side: str = "ours") -> float | None:
    """The part of the device's memory bandwidth that a side reaches, for cases that are counted in bytes."""
    rate, most = case.rate(side), MEMORY.get(device)
    return rate / most if rate and most and case.unit == "TB/s" else None


def shown(text: str) -> str:
    """The name of a side, a case, an engine or a kernel of committed results, for a table."""
    for former, word in WORDS:
        text = re.sub(former, word, text)
    return text


def markdown(rows: Sequence[Sequence[str]]) -> str:
    header, *body = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join([header, "|" + "---|" * len(rows[0]), *body])


def console(text: str) -> str:
    """Return what a program has printed, for a document: long lines are wrapped, former words replaced."""
    lines = (line for long in shown(text).rstrip().splitlines() for line in wrap(long, WIDTH, subsequent_indent=" " * 8) or [""])
    return "\n".join(("```text", *lines, "```"))
