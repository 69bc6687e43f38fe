"""``python -m benchmarks.invariance``: what ``patch(batch_invariant=True)`` costs mlx-lm's models, beside upstream and ``patch()``.

The models are those of ``benchmarks.models``, with random weights; the sides take turns, and the first turn of each is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda

from .measuring import Log
from .models import SHAPES, Cache, generate, make, models_of_mlx_lm
from .provenance import collect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .models import Conversation

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
        made: dict[str, list[Conversation]] = {side: [] for side in SIDES}
        failed: dict[str, str] = {}
        for _ in range(turns + 1):
            for side in [each for each in SIDES if each not in failed]:
                try:
                    with SIDES[side]():  # the first conversation of patch() has the capture of its steps in its time
                        for _ in range(2 if side == "patch()" else 1):
                            conversation = generate(model, Cache(caches.make_prompt_cache(model)), prompt, count)
                    made[side].append(conversation)
                except RuntimeError as error:  # MLX has no kernel for some calls of this size; the other sides are worth knowing
                    failed[side] = str(error)
        result: dict[str, Any] = {"model": name, "batch": batch, "prompt": length, "generated": count}
        for side, all_turns in made.items():
            result[side] = {"error": failed[side]} if side in failed else _medians(all_turns[1:], batch, length, count)
        log(f"{name}: batch {batch}: " + ", ".join(f"{side} {result[side]}" for side in SIDES))
        yield result


def _medians(turns: Sequence[Conversation], batch: int, length: int, count: int) -> dict[str, float]:
    return {
        "prefill tokens/s": batch * length / statistics.median(each.prefill for each in turns),
        "decode tokens/s": batch * count / statistics.median(each.decode for each in turns),
        "peak MiB": max(each.peak for each in turns) / 2**20,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """For a document: decoding of each number of sequences, and the prompt."""
    lines = ["| model | sequences | tokens/s of | " + " | ".join(SIDES) + " |", "|---|--:|---|" + "--:|" * len(SIDES)]
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
            args.output.write_text(json.dumps({"provenance": provenance, "models": results}, indent=1) + "\n", "utf-8")
        mx.clear_cache()
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
