"""What each process of ``mlx.launch`` does for test_tensor_parallel.py: a sharded model of mlx-lm, whose steps are replayed or not.

``mlx.launch -n 2 --backend nccl -- python -m tests.gpu.tensor_parallel FILE``. The first process writes the file.
"""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
from mlx_cuda._all_sum import upstream_all_sum
from mlx_cuda._loader import native
from mlx_cuda._mlx_lm.models import decoding_of

from .mlx_lm_parts import SIZES, make_model, part, wide
from .support import host, relative_error

PROMPT, STEPS = 40, 48
MODELS: dict[str, dict[str, Any]] = {"bfloat16": {}, "4 bit": {"bits": 4}}


def logits_of(model: Any, tokens: mx.array) -> Any:
    """Of each token after the prompt, ``[STEPS, vocabulary]``."""
    cache = part("models.cache").make_prompt_cache(model)
    model(tokens[:, :PROMPT], cache=cache)
    found = [model(tokens[:, at : at + 1], cache=cache)[0] for at in range(PROMPT, PROMPT + STEPS)]
    return host(mx.concatenate(found))


def run(group: Any, options: dict[str, Any], sequences: int) -> dict[str, Any]:
    tokens = mx.array(np.random.default_rng(5).integers(0, SIZES["vocab_size"], (sequences, PROMPT + STEPS)))
    exact = logits_of(wide(make_model(3, **options)), tokens)
    model = make_model(3, **options)
    model.shard(group)
    mx.eval(model.parameters())
    with mlx_cuda.patch():
        patched = [logits_of(model, tokens) for _ in range(2)]  # the second takes over what the first has captured
        decoding, choice = decoding_of(model), mlx_cuda.explain(mlx_cuda.decode_step, model)
        found = {"replayed": decoding.replayed, "recorded": decoding.captured, "kernel": choice.kernel, "reason": choice.reason}
    error = mx.array(max(relative_error(one, exact) for one in patched))
    found["error"] = mx.distributed.all_max(error, group=group).item()
    found["equal everywhere"] = all(is_same(mx.array(one), group) for one in patched)
    return found


def is_same(x: mx.array, group: Any) -> bool:
    """Whether all processes have these bits."""
    least, most = (of(x, group=group) for of in (mx.distributed.all_min, mx.distributed.all_max))
    return bool(mx.array_equal(least, most).item())


def keeps(group: Any) -> bool:
    """Whether a conversation goes on where one process looks at its cache, and so has to record anew, alone."""
    model, tokens = make_model(3), mx.array([[7] * PROMPT])
    model.shard(group)
    with mlx_cuda.patch():
        cache = part("models.cache").make_prompt_cache(model)
        model(tokens, cache=cache)
        held = []
        for at in range(24):
            if at == 8 and group.rank() == 0:
                held.append(cache[0].keys.__copy__())
            logits = model(mx.array([[at]]), cache=cache)
            mx.eval(logits)
            if at > 12 and not is_same(logits, group):
                return False
        return not is_same(mx.array(decoding_of(model).captured), group)


def ours(x: mx.array, group: Any) -> mx.array:
    found = native.module(mx.default_stream(mx.gpu)).all_sum(x, group, mx.default_stream(mx.gpu))
    assert found is not None, (x.shape, x.dtype)
    return found


def sums(group: Any) -> dict[str, float]:
    """The worst error of random sums against MLX's in float32, by dtype; 1 where processes have other bits."""
    shapes, own = np.random.default_rng(9), np.random.default_rng(group.rank())
    worst: dict[str, float] = {}
    for _ in range(24):
        dtype = [mx.float32, mx.float16, mx.bfloat16][shapes.integers(3)]
        sizes = shapes.choice([8, 24, 1000, 2560, 15360, 131072, 131080, 1048584], 2)
        given = [mx.array(own.standard_normal((int(size), 2)), mx.float32).astype(dtype) for size in sizes]
        if sizes[1] <= 15360:  # MLX copies no larger ones of this kind
            given[1] = given[1].T
        first, second = (ours(x, group) for x in given)
        third = ours(first + 1, group)
        mx.eval(second, third)
        for x, found in zip((*given, first + 1), (first, second, third), strict=True):
            exact = upstream_all_sum(x.astype(mx.float32), group=group)
            error = float((mx.linalg.norm(found - exact) / mx.linalg.norm(exact)).item())  # type: ignore[arg-type]
            same = found.shape == x.shape and found.dtype == dtype and is_same(found, group)
            worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error if same and np.isfinite(error) else 1.0)
    x = mx.array(own.standard_normal((4, 16)), mx.float32)
    gradients = [mx.grad(lambda x, of=of: (of(x, group=group) ** 2).sum())(x) for of in (mlx_cuda.all_sum, upstream_all_sum)]
    worst["gradient"] = float(mx.abs(gradients[0] - gradients[1]).max().item())  # type: ignore[arg-type]
    compiled = mx.compile(lambda x: mlx_cuda.all_sum(x * 2, group=group))(x)
    worst["compiled"] = float(mx.abs(compiled - 2 * upstream_all_sum(x, group=group)).max().item())  # type: ignore[arg-type]
    return worst


def residuals(group: Any) -> dict[str, Any]:
    """What becomes of additions to sums before they are computed: of four, and then of four that are to stay as they are."""
    own = [mx.random.normal((1, 24, 256), key=mx.random.key(8 * group.rank() + i)).astype(mx.bfloat16) for i in range(8)]
    exact = [upstream_all_sum(x.astype(mx.float32), group=group) for x in own]
    mx.eval(own, exact)

    def found(results: list[mx.array], expected: list[mx.array]) -> tuple[float, int, int]:
        assert native.loaded is not None
        native.loaded.sum_with_residuals(results)
        graph = io.StringIO()
        mx.export_to_dot(graph, *results)
        errors = [mx.linalg.norm(one - two) / mx.linalg.norm(two) for one, two in zip(results, expected, strict=True)]
        worst = float(mx.array(errors).max().item())  # type: ignore[arg-type]
        return worst, graph.getvalue().count('"AllSum"'), graph.getvalue().count('"Add"')

    h = own[0] + ours(own[1], group)
    taken = [h, h + ours(h * 2, group), ours(own[2], group) + own[3], own[3] + ours(own[4], group)]
    first = own[0] + exact[1]
    then = upstream_all_sum(first * 2, group=group) + first
    read, wide = ours(own[5], group), ours(own[6], group)
    left = [read + own[0], read * 2, own[0][:, :1] + wide, ours(own[6], group) + ours(own[7], group)]
    return {
        "taken": found(taken, [first, then, exact[2] + own[3], own[3] + exact[4]]),
        "left": found(left, [exact[5] + own[0], exact[5] * 2, own[0][:, :1] + exact[6], exact[6] + exact[7]]),
    }


def numbers_begin_anew(group: Any) -> float:
    """The worst error of sums of all sizes while short ones go through all 16-bit numbers of a letter."""
    worst = 0.0
    ones, keys = mx.full((8, 8), group.rank() + 1.0), np.random.default_rng(3)
    total = sum(range(1, group.size() + 1))
    for turn in range(3300):
        short = mx.stack([ours(ones, group) for _ in range(20)])
        if turn % 150 == 0 or turn > 3270:
            x = mx.random.normal((int(keys.integers(1, 400)) * 4096,), key=mx.random.key(int(keys.integers(1 << 30)) + group.rank()))
            error = mx.abs(ours(x, group) - upstream_all_sum(x, group=group)).max()
            worst = max(worst, float(error.item()))  # type: ignore[arg-type]
        if not bool((short == total).all().item()):
            return 1.0
    return worst


def main() -> int:
    group = mx.distributed.init(strict=True, backend="nccl")
    start = time.monotonic()
    found: dict[str, Any] = {"sums": sums(group), "residuals": residuals(group), "keeps": keeps(group)}
    found["numbers"] = numbers_begin_anew(group)
    for name, options in MODELS.items():
        for sequences in (1, 3, 9):
            found[f"{name}, {sequences}"] = run(group, options, sequences)
            print(f"[{time.monotonic() - start:.0f} s] {name}, {sequences}", file=sys.stderr, flush=True)  # where it does not end
    with mx.stream(mx.new_stream(mx.gpu)):
        assert native.loaded is not None
        native.loaded.inject_fault("peers", -1 if group.rank() else -2)  # one has none, and all agree
        found["bfloat16, through NCCL"] = run(group, {}, 1)
    if group.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
