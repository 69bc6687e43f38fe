"""Tables of tensor parallel models on one and on several GPUs, by ``benchmarks.models``, for docs/guides/tensor-parallel.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import eq
from typing import Any

from .cells import SIDES, markdown, speed

SPEEDS = {"prefill": "prompt", "decode": "decoding"}


def parallel_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for each model and number of GPUs: each side's speed, and how many times that of one GPU."""
    all_of = [each for result in results for each in result["cases"] if "gpus" in each]
    alone = {each["model"]: each for each in all_of if each["gpus"] == 1}
    if not alone:
        names = ", ".join(sorted({each["model"] for each in all_of}))
        raise ValueError(f"no results of one GPU for {names}\n  fix: give those of python -m benchmarks.models without mlx.launch too")
    speeds = [f"{what}, tokens/s: {side}" for what in SPEEDS.values() for side in SIDES.values()]
    rest = ["peak memory of a GPU, MiB: MLX, patched", "tokens equal to one GPU's", "logit error: MLX, patched"]
    rows = [["model, prompt", "GPUs", *speeds, *rest]]
    order = list(dict.fromkeys([*alone, *(each["model"] for each in all_of)]))
    for each in sorted(all_of, key=lambda each: (order.index(each["model"]), each["gpus"])):
        before = alone.get(each["model"], each)
        cells = []
        for part in SPEEDS:
            for side in SIDES:
                own = speed(each, side, part)
                cells.append(f"{own:.0f}" + ("" if each is before else f" ({own / speed(before, side, part):.2f}x)"))
        equal = [*map(eq, before["tokens"]["patched"], each["tokens"]["patched"]), False].index(False)
        same = "one GPU was not measured" if each["model"] not in alone else "" if each is before else f"{equal} of {each['generated']}"
        errors = ", ".join(f"{each['logits']['error'][side]:.1e}" for side in SIDES)
        peaks = ", ".join(f"{each[side]['peak MiB']:.0f}" for side in SIDES)
        rows.append([f"{each['model']}, {each['prompt']}", str(each["gpus"]), *cells, peaks, same, errors])
    return markdown(rows)


def parallel_tables(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The blocks of docs/guides/tensor-parallel.md."""
    return {"parallel": parallel_table(results)}
