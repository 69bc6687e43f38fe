"""``python -m benchmarks.invariance``: what ``patch(batch_invariant=True)`` costs mlx-lm's models, beside upstream and ``patch()``.

The models are those of ``benchmarks.models``, with random weights; the sides take turns, and the first turn of each is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda

from .cells import shown
from .measuring import Log
from .models import SHAPES, Cache, generate, make, models_of_mlx_lm
from .provenance import collect
from .result_file import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


SIDES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "upstream": contextlib.nullcontext,
    "patch()": mlx_cuda.patch,
    "batch_invariant": lambda: mlx_cuda.patch(batch_invariant=True),
}
MODELS = ("Qwen 3 4B: head_dim 128", "Llama 3.1 8B, 4 bit", "Qwen 3 30B-A3B, 4 bit: 8 of 128 experts")


def measure(name: str, batches: Sequence[int], length: int, count: int, turns: int, log: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Tokens a second of each side, for each number of sequences."""
    load = models_of_mlx_lm()
    module, arguments = SHAPES[name]
    model, caches = make(load(module), arguments), load("cache")
    for batch in batches:
        prompt = mx.random.randint(0, arguments["vocab_size"], (batch, length))
        mx.eval(prompt)
        converse = partial(_converse, lambda: Cache(caches.make_prompt_cache(model)), model, prompt, count)
        result: dict[str, Any] = {"model": name, "batch": batch, "prompt": length, "generated": count, **_of_sides(converse, turns)}
        log(f"{name}: batch {batch}: " + ", ".join(f"{side} {result[side]}" for side in SIDES))
        yield result


def _converse(make_cache: Callable[[], Cache], model: Any, prompt: mx.array, count: int, side: str) -> dict[str, float] | str:
    """A conversation of one side, or its error: MLX has no kernel for some calls of this size, and the other sides are worth knowing."""
    batch, length = prompt.shape
    try:
        with SIDES[side]():  # the first conversation of patch() has the capture of its steps in its time
            for _ in range(2 if side == "patch()" else 1):
                made = generate(model, make_cache(), prompt, count)
    except RuntimeError as error:
        return str(error)
    speeds = {"prefill tokens/s": batch * length / made.prefill, "decode tokens/s": batch * count / made.decode}
    return {**speeds, "peak MiB": made.peak / 2**20}


def _of_sides(converse: Callable[[str], dict[str, float] | str], turns: int) -> dict[str, Any]:
    """The medians of all turns but the first, or the error."""
    made: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    failed: dict[str, Any] = {}
    for side in list(SIDES) * (turns + 1):
        found = "" if side in failed else converse(side)
        if isinstance(found, dict):
            made[side].append(found)
        elif found:
            failed[side] = {"error": found}
    return {side: failed.get(side) or _medians(own[1:]) for side, own in made.items()}


def _medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {what: statistics.median(each[what] for each in turns) for what in turns[0]}


def table(results: Sequence[dict[str, Any]]) -> str:
    """For a document: decoding of each number of sequences, and the prompt."""
    lines = ["| model | sequences | tokens/s of | " + " | ".join(map(shown, SIDES)) + " |", "|---|--:|---|" + "--:|" * len(SIDES)]
    for result in results:
        for what in ("decode", "prefill"):
            found = [result[side].get(f"{what} tokens/s") for side in SIDES]
            speeds = " | ".join("fails" if speed is None else f"{speed:,.0f}" for speed in found)
            lines.append(f"| {result['model'].partition(':')[0]} | {result['batch']} | {what} | {speeds} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.invariance", description=__doc__)
    parser.add_argument("--model", nargs="+", default=MODELS, choices=SHAPES, metavar="NAME", help="names of benchmarks.models")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=2, help="of each side, besides the first (default: %(default)s)")
    parser.add_argument("--commit", help="name of the commit, where there is no checkout")
    parser.add_argument("--wheel", type=Path, help="the wheel that is installed, for its digest")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args(words)
    log = Log()
    provenance = collect(words, torch=None, commit_name=args.commit, wheel=args.wheel, quick=False)
    results: list[dict[str, Any]] = []
    for name in args.model:
        for result in measure(name, args.batch, args.prompt, args.tokens, args.turns, log):
            results.append(result)
            write(args.output, {"kind": "invariance", "provenance": provenance, "cases": results})
        mx.clear_cache()
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
