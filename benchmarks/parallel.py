"""Tables of what ``benchmarks.models`` measured of tensor parallel models on one and on several GPUs, for docs/several-gpus.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cells import markdown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SPEEDS = {"prefill tokens/s": "prompt", "decode tokens/s": "decoding"}
SIDES = {"upstream": "MLX", "patched": "patched"}


def equal_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many are the same before the first that is not."""
    return next((at for at, (first, second) in enumerate(zip(one, other, strict=True)) if first != second), len(one))


def parallel_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for each model and number of GPUs: each side's speed, and how many times that of one GPU."""
    all_of = [each for result in results for each in result["models"]]
    alone = {each["model"]: each for each in all_of if each["gpus"] == 1}
    names = [f"{what}, tokens/s: {side}" for what in SPEEDS.values() for side in SIDES.values()]
    rest = ["tokens as those of one GPU", "error of the logits: MLX, patched"]
    rows = [["model, prompt", "GPUs", *names, *rest]]
    for each in sorted(all_of, key=lambda each: (list(alone).index(each["model"]), each["gpus"])):
        before = alone[each["model"]]
        cells = []
        for speed in SPEEDS:
            for side in SIDES:
                of_one = "" if each is before else f" ({each[side][speed] / before[side][speed]:.2f}x)"
                cells.append(f"{each[side][speed]:.0f}{of_one}")
        same = "" if each is before else f"{equal_tokens(before['tokens']['patched'], each['tokens']['patched'])} of {each['generated']}"
        errors = ", ".join(f"{each['logits']['error'][side]:.1e}" for side in SIDES)
        rows.append([f"{each['model']}, {each['prompt']}", str(each["gpus"]), *cells, same, errors])
    return markdown(rows)


def parallel_tables(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The blocks of docs/several-gpus.md."""
    return {"parallel": parallel_table(results)}
