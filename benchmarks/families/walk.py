"""What one module's small model does: its logits against those in float32, its engines, requests at once, and its speed."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
from mlx.utils import tree_flatten, tree_map
from mlx_cuda._mlx_lm.models import decoding_of

from ..mlx_lm_parts import part
from ..record import MOST_ERROR_CHARACTERS
from ..requests import Request, serve
from .judging import BEGINS
from .sizes import LEFT_OUT, VOCABULARY, arguments

SIDES = ("upstream", "patched")
REQUESTS = ((40, 12), (7, 20), (90, 16))  # tokens of a prompt, and to generate
SAME = 0.02  # of the largest logit, by which a float32 model's may depend on who else is in the batch


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt, greedy steps after it, and how often they are timed."""

    prompt: int = 512
    steps: int = 32
    turns: int = 5


def begin(side: str) -> None:
    """Say whose code runs, so that it is known where the process crashes."""
    print(f"{BEGINS}{side}", file=sys.stderr, flush=True)


def families() -> list[str]:
    """The modules of mlx-lm that have a model, but those that cannot be made."""
    folder = Path(str(part("models").__path__[0]))
    names = sorted(path.stem for path in folder.glob("*.py") if "class ModelArgs" in path.read_text("utf-8"))
    return [name for name in names if name not in LEFT_OUT]


def make(name: str, dtype: mx.Dtype, seed: int = 0) -> Any:
    """The module's model; with one seed each dtype has the same weights, which bfloat16 can hold."""
    module = part(f"models.{name}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(arguments(name, module)))
    floating = (mx.float32, mx.float16, mx.bfloat16)
    model.update(tree_map(lambda each: each.astype(mx.bfloat16).astype(dtype) if each.dtype in floating else each, model.parameters()))
    mx.eval(model.parameters())
    model.eval()  # as mlx-lm loads them
    return model


def cache_of(model: Any) -> list[Any]:
    return part("models.cache").make_prompt_cache(model)  # type: ignore[no-any-return]


def settle(cache: Sequence[Any]) -> None:
    mx.eval([each.state for each in cache])


def forced(model: Any, tokens: mx.array, prompt: int) -> mx.array:
    """Logits ``[tokens, vocabulary]`` in float32 of a prompt and of steps of one token, all of whose tokens are given."""
    cache = cache_of(model)
    found = [model(tokens[None, :prompt], cache=cache)[0]]
    mx.eval(found)
    for index in range(prompt, tokens.size):
        found.append(model(tokens[None, index : index + 1], cache=cache)[0])
        mx.eval(found[-1])
    return mx.concatenate(found).astype(mx.float32)


def apart(found: mx.array, exact: mx.array) -> mx.array:
    """The differences: none where a model masks tokens by -inf on both sides."""
    return mx.where(found == exact, 0, found - exact)


def errors(found: mx.array, exact: mx.array, prompt: int) -> dict[str, float | None]:
    """Of the prompt's positions and of the steps: the median of the relative norms of the differences, None where one is no number.

    The median, as where two experts are almost equally good one rounding chooses the other, and makes a few positions something else.
    """
    size = mx.linalg.norm(mx.where(mx.isinf(exact), 0, exact), axis=-1)
    each: Any = (mx.linalg.norm(apart(found, exact), axis=-1) / size).tolist()
    parts = {"prompt": each[:prompt], "steps": each[prompt:]}
    return {name: statistics.median(values) if all(value == value for value in values) else None for name, values in parts.items()}  # noqa: PLR0124


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_ERROR_CHARACTERS]}"


@contextlib.contextmanager
def counted(count: Counter[str]) -> Iterator[None]:
    """Count the calls of attention, experts and linear attention by the engine that ``explain`` names; all are computed by MLX."""
    places: list[tuple[Any, str, Callable[..., str]]] = [
        (mx.fast, "scaled_dot_product_attention", lambda *a, **o: mlx_cuda.explain(*a, **o).engine),
        (mx, "gather_mm", lambda *a, **o: mlx_cuda.explain(mlx_cuda.gather_mm, *a, **o).engine + ", experts"),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, explain in places:
            theirs = getattr(module, name)

            def call(*given: Any, theirs: Any = theirs, explain: Any = explain, **options: Any) -> Any:
                with contextlib.suppress(TypeError, ValueError):
                    count[explain(*given, **options)] += 1
                return theirs(*given, **options)

            stack.callback(setattr, module, name, theirs)
            setattr(module, name, wraps(theirs)(call))
        yield


def engines(model: Any, tokens: mx.array, prompt: int) -> dict[str, dict[str, int]]:
    """How many calls of a prompt and of one step go to which engine."""
    count: Counter[str] = Counter()
    cache = cache_of(model)
    with counted(count):
        mx.eval(model(tokens[None, :prompt], cache=cache))
        first = dict(count)
        count.clear()
        mx.eval(model(tokens[None, prompt : prompt + 1], cache=cache))
    return {"prompt": first, "step": dict(count)}


def agrees(exact: Any, prompt: Sequence[int], said: Sequence[int], near: float) -> bool:
    """Whether each token is the best in float32, or one whose logit is within ``near`` of the best's."""
    logits = exact(mx.array([[*prompt, *said[:-1]]]), cache=cache_of(exact))[0, len(prompt) - 1 :].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(list(said))[:, None], axis=-1)[:, 0]
    return bool((logits.max(axis=-1) - chosen <= near).all().item())


def at_once(model: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts and tokens of a few requests that generate together."""
    mx.random.seed(1)
    requests = [Request(0.0, mx.random.randint(1, VOCABULARY, (length,)).tolist(), count) for length, count in REQUESTS]  # type: ignore[arg-type]
    served = serve(part("generate").BatchGenerator(model, completion_batch_size=4, prefill_batch_size=2), requests)
    return [(list(answer.request.prompt), list(answer.tokens)) for answer in served.answers]


def keeps_requests_apart(exact: Any, largest: float) -> bool:
    """Whether in float32, with logits as large as this, requests at once have the tokens of their own prompts.

    Some models take padding into their states.
    """
    return all(agrees(exact, *each, SAME * largest) for each in at_once(exact))


def compare(name: str, lengths: Lengths) -> dict[str, Any]:
    """Each side's error against float32, what replays its steps, and whether requests at once have the tokens of their own prompts."""
    model, exact = make(name, mx.bfloat16), make(name, mx.float32)
    tokens = mx.random.randint(1, VOCABULARY, (lengths.prompt + lengths.steps,))
    result: dict[str, Any] = {"caches": sorted({type(each).__name__ for each in cache_of(model)})}
    sides: dict[str, mx.array] = {}
    wanted = forced(exact, tokens, lengths.prompt)
    for side in SIDES:
        entry: dict[str, Any] = {}
        result[side] = entry
        begin(side)
        with mlx_cuda.patch() if side == "patched" else contextlib.nullcontext():
            try:
                sides[side] = forced(model, tokens, lengths.prompt)
                entry["error"] = errors(sides[side], wanted, lengths.prompt)
                if side == "patched":
                    replays = decoding_of(model)
                    result["replayed"], result["reason"] = replays.replayed, replays.reason
            except Exception as error:
                entry["failed"] = short(error)
            near: Any = 4 * mx.abs(apart(sides["upstream"], wanted)).max().item() if "upstream" in sides else float("inf")
            try:
                before = decoding_of(model).replayed if side == "patched" else 0
                said = at_once(model)
                entry["at once"] = {"right": all(agrees(exact, *each, near) for each in said)}
                if side == "patched":
                    batches = decoding_of(model).batches
                    entry["at once"] |= {"replayed": decoding_of(model).replayed - before, "pages": bool(batches.sessions)}
            except Exception as error:
                entry["at once"] = {"failed": short(error)}
    if result["upstream"]["at once"].get("right") and result["patched"]["at once"].get("right") is False:
        result["requests apart in float32"] = keeps_requests_apart(exact, mx.abs(wanted).max().item())  # type: ignore[arg-type]
    if "failed" not in result["upstream"]:
        result["engines"] = engines(model, tokens, lengths.prompt)
    return result


def once(model: Any, tokens: mx.array, lengths: Lengths) -> tuple[float, float]:
    """Seconds of a prompt, and of each greedy step after it."""
    cache = cache_of(model)
    start = time.perf_counter()
    token = model(tokens[None, : lengths.prompt], cache=cache)[:, -1:].argmax(axis=-1)
    mx.eval(token)
    middle = time.perf_counter()
    for _ in range(lengths.steps):
        token = model(token, cache=cache)[:, -1:].argmax(axis=-1)
        mx.async_eval(token)  # type: ignore[no-untyped-call]
    mx.eval(token)
    return middle - start, (time.perf_counter() - middle) / lengths.steps


def measure(name: str, lengths: Lengths) -> dict[str, dict[str, float]]:
    """The least seconds of a prompt and of a step that each side took; the sides take turns, the first of each does not count."""
    model = make(name, mx.bfloat16)
    tokens = mx.random.randint(1, VOCABULARY, (lengths.prompt,))
    taken: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(lengths.turns + 1):
        for side in SIDES:
            with mlx_cuda.patch() if side == "patched" else contextlib.nullcontext():
                repeats = 2 if side == "patched" else 1  # the first conversation records
                taken[side] += [once(model, tokens, lengths) for _ in range(repeats)][-1:]
    counts = {side: [min(each) for each in zip(*times[1:], strict=True)] for side, times in taken.items()}
    return {side: {"prompt": prompt, "step": step} for side, (prompt, step) in counts.items()}


def walk(name: str, lengths: Lengths) -> dict[str, Any]:
    """All of it; what fails is said."""
    begin(SIDES[0])  # whose code also makes the model, and what is exact
    model = make(name, mx.bfloat16)
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    parameters = sum(each.size for each in arrays.values())
    del model, arrays
    result: dict[str, Any] = {"family": name, "parameters": parameters}
    result |= compare(name, lengths)
    if lengths.turns and not any("failed" in result[side] for side in SIDES):
        result["seconds"] = measure(name, lengths)
    return result
