"""``python -m benchmarks.serving``: many requests at once through mlx-lm's ``BatchGenerator``, with and without ``mlx_cuda.patch()``.

Requests arrive at random, the same ones for both sides, and are served as mlx-lm's server serves them; models are those of
``benchmarks.models``, with random weights. A token's time is when the generator gives it, which is after the prompts that it works on in
between. A few requests are served before, and timed apart. Some are served alone after, to compare their tokens: random weights make logits
that lie close together, so one rounding may choose another token, and every token after it.

With ``--soak`` requests of all lengths come and are cancelled for so long (``benchmarks.soak``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda
from mlx_cuda._mlx_lm.models import decoding_of

from .measuring import Log
from .mlx_lm_parts import part
from .models import SHAPES, make
from .provenance import collect, memory_used
from .record import MOST_ERROR_CHARACTERS
from .requests import CacheCalls, Request, draw, equal_start, figures, serve
from .result_file import write
from .serving_table import replayed, speed
from .soak import Soak

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from .requests import Served

SIDES = ("upstream", "patched")
MODELS = ("Qwen 3 4B, 4 bit", "Llama 3.1 8B")
WARM_TOKENS = 16  # the first of the warm-up's requests generates so many, the next one more: so the batch has several sizes


def on_side(side: str, args: argparse.Namespace) -> AbstractContextManager[Any]:
    return mlx_cuda.patch(kv_bits=args.kv_bits) if side == "patched" else contextlib.nullcontext()


def chosen(names: Sequence[str]) -> list[str]:
    """The models that are called so; where none is, those whose name begins so."""
    found = [model for name in names for model in ([name] if name in SHAPES else [each for each in SHAPES if each.startswith(name)])]
    if not found:
        raise ValueError(f"no model is called {', '.join(names)}; there are {'; '.join(SHAPES)}")
    return list(dict.fromkeys(found))


class Captures:
    """What a model has recorded and replayed since ``begin``; nothing of a side that is not patched."""

    def __init__(self, model: Any, side: str) -> None:
        self.decoding = decoding_of(model) if side == "patched" else None
        self.begin()

    def begin(self) -> None:
        self.before = (self.decoding.captured, self.decoding.replayed) if self.decoding else (0, 0)

    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.decoding.sessions) + self.decoding.batches.nbytes if self.decoding else 0

    def to_json(self) -> dict[str, Any]:
        if not self.decoding:
            return {}
        captured, replayed = (now - then for now, then in zip((self.decoding.captured, self.decoding.replayed), self.before, strict=True))
        return {
            "recorded": captured,
            "replayed": replayed,
            "recordings, MiB": self.nbytes() / 2**20,
            "reason": self.decoding.reason,
            "errors": list(self.decoding.errors),
        }


def generator_of(model: Any, args: argparse.Namespace) -> Any:
    return part("generate").BatchGenerator(model, completion_batch_size=args.completion_batch, prefill_batch_size=args.prefill_batch)


def warm_up(model: Any, args: argparse.Namespace, vocabulary: int, log: Callable[[str], None]) -> float:
    """Seconds of a few requests at once, with which plans and kernels are made and first steps recorded."""
    start = time.perf_counter()
    requests = draw(args.warm, 0, (args.prompt, 1), vocabulary, args.seed + 1)
    several = [Request(0.0, each.prompt, WARM_TOKENS + index) for index, each in enumerate(requests)]
    served = serve(generator_of(model, args), several, args.seconds, log)
    log(f"warm-up: {served.tokens} tokens of {len(several)} requests in {time.perf_counter() - start:.1f} s")
    return time.perf_counter() - start


def alone(model: Any, args: argparse.Namespace, served: Served) -> list[dict[str, int]]:
    """Some of the requests once more, each with nobody else, and how many tokens are equal before the first that is not."""
    begun = [index for index, answer in enumerate(served.answers) if answer.tokens]
    found = []
    for index in begun[:: max(1, len(begun) // args.alone)][: args.alone] if args.alone else []:
        answer = served.answers[index]
        request = Request(0.0, answer.request.prompt, len(answer.tokens))
        tokens = serve(generator_of(model, args), [request]).answers[0].tokens
        found.append({"request": index, "equal": equal_start(answer.tokens, tokens), "of": len(answer.tokens)})
    return found


def vocabulary_of(model: Any) -> int:
    """How many tokens there are; models that see, too, have a configuration for text."""
    return int(model.args.vocab_size if hasattr(model.args, "vocab_size") else model.args.text_config["vocab_size"])


def measure(side: str, model: Any, requests: Sequence[Request], args: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    vocabulary = vocabulary_of(model)
    with contextlib.ExitStack() as stack:
        # Around patch(), which puts back what it has found.
        calls = stack.enter_context(CacheCalls(part("models.cache"))) if args.profile else None
        stack.enter_context(on_side(side, args))
        result: dict[str, Any] = {"warm-up seconds": warm_up(model, args, vocabulary, log)}
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        captures, generator = Captures(model, side), generator_of(model, args)
        if calls:
            calls.counting = True
        with generator.stats() as stats:
            served = serve(generator, requests, args.seconds, log, logprobs=args.logprobs)
        if calls:
            calls.counting = False
            result["calls of caches"] = calls.to_json()
        result |= figures(served, stats)
        result |= captures.to_json()
        result |= {"peak MiB": mx.get_peak_memory() / 2**20, "driver's MiB": memory_used()}
        generator.close()
        del generator
        result["alone"] = alone(model, args, served)
    return result


def soak(side: str, model: Any, args: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    lengths, most = (args.prompt, args.tokens), 2 * args.completion_batch
    with on_side(side, args):
        captures = Captures(model, side)
        run = Soak(
            lambda: generator_of(model, args), lengths, vocabulary_of(model), rate=args.rate, most=most, seed=args.seed,
            captures=captures.nbytes, log=log,
        )  # fmt: skip
        captures.begin()
        run.run(args.soak)
        found = {**run.to_json(args.growth), **captures.to_json()}
        found["failures"] += found.get("errors", [])  # which only cost time, if the model's own steps take their place
        return found


def summary(result: dict[str, Any]) -> str:
    if "first differences" in result:
        return f"{result['requests']} requests; failures: {'; '.join(result['failures']) or 'none'}"
    ended = f", ENDED by the limit after {result['seconds']:.0f} s" if result["ended by the limit"] else ""
    between, share = result["between tokens, ms"]["99th"], replayed(result)
    return (
        f"{speed(result) or 0:.0f} tokens/s, batch of {result['mean batch'] or 0:.1f}, "
        f"99th percentile between tokens {between or 0:.1f} ms, replayed {'nothing' if share is None else f'{share:.0%}'}{ended}"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", nargs="+", default=list(MODELS), metavar="NAME", help="models that are called so, or begin so (default: %(default)s)")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--requests", type=int, default=64, help="how many (default: %(default)s)")
    add("--prompt", type=int, default=1024, help="tokens of a prompt; with --soak at most (default: %(default)s)")
    add("--tokens", type=int, default=256, help="tokens to generate; with --soak at most (default: %(default)s)")
    add("--vary", type=float, default=0.0, metavar="SHARE", help="lengths are up to this part longer or shorter (default: as given)")
    add("--rate", type=float, default=32.0, help="requests that arrive in a second on the average; 0: all at once (default: %(default)s)")
    add("--completion-batch", type=int, default=32, help="sequences that generate at a time (default: the generator's own, %(default)s)")
    add("--prefill-batch", type=int, default=8, help="prompts at a time (default: the generator's own, %(default)s)")
    add("--seconds", type=float, help="of a side at most; what there is by then counts, and the result says so")
    add("--warm", type=int, default=8, help="requests before those that are timed (default: %(default)s)")
    add("--alone", type=int, default=4, help="requests that are served alone after, to compare (default: %(default)s)")
    add("--kv-bits", type=int, choices=(4, 8), help="of keys and values of batches, patched (default: as the model's)")
    add("--logprobs", action="store_true", help="read each token's logarithm of probability, as mlx-lm's server does")
    add("--profile", action="store_true", help="time what caches are put together and taken apart with; the rest gets slower by that")
    add(
        "--soak",
        type=float,
        metavar="SECONDS",
        help="instead: requests of all lengths, with cancellations, for so long and eight readings of memory",
    )
    add("--growth", type=float, default=256.0, metavar="MIB", help="by which no memory may grow in a soak (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--commit", help="name of the commit, where there is no checkout")
    add("--wheel", type=Path, help="the wheel that is installed, for its digest")
    add("-o", "--output", type=Path, required=True)
    return parser


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:MOST_ERROR_CHARACTERS]}"


def measure_model(name: str, args: argparse.Namespace, entry: dict[str, Any], save: Callable[[], None], log: Callable[[str], None]) -> int:
    """Every side of a model, of which each is saved; how many failed."""
    module, arguments = SHAPES[name]
    model = make(part(f"models.{module}"), arguments)
    log(f"{name}: made")
    requests = draw(args.requests, args.rate, (args.prompt, args.tokens), arguments["vocab_size"], args.seed, args.vary)
    failed = 0
    for side in args.sides:

        def say(text: str, head: str = f"{name}, {side}") -> None:
            log(f"{head}: {text}")

        try:
            entry[side] = soak(side, model, args, say) if args.soak else measure(side, model, requests, args, say)
            failed += bool(entry[side].get("failures"))
            say(summary(entry[side]))
        except Exception as error:
            entry[side] = {"error": short(error)}
            failed += 1
            say(f"FAILED\n{traceback.format_exc().strip()}")
        save()
        gc.collect()
        mx.clear_cache()
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    log = Log()
    try:
        names = chosen(args.model)
        part("generate")
    except (ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = {name: value for name, value in vars(args).items() if name not in {"output", "wheel", "commit", "model"}}
    provenance = collect(words, torch=None, commit_name=args.commit, wheel=args.wheel, quick=False)
    results: dict[str, Any] = {"kind": "serving", "provenance": provenance, "settings": settings, "cases": []}

    def save() -> None:
        write(args.output, results)

    failed = 0
    for name in names:
        entry: dict[str, Any] = {"model": name, "soak" if args.soak else "requests": args.soak or args.requests}
        results["cases"].append(entry)
        try:
            failed += measure_model(name, args, entry, save, log)
        except Exception as error:
            entry["error"] = short(error)
            failed += 1
            log(f"{name}: FAILED\n{traceback.format_exc().strip()}")
            save()
        gc.collect()
        mx.clear_cache()
    log(f"{len(names)} models, {failed} failures; results in {args.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
