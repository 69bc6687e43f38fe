"""A GPU whose memory is full: ``python -m tests.gpu.full_memory --rounds 1000``.

All but a little of the memory is taken. Then graphs that fit take turns with graphs that do not, which are the same operations with larger
results, after others that are done by then. Each of the latter has to end in an error that says so; each of the former has to give the bits
it gave before the memory was taken; and nothing more may be held at the end. No other process may need the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import mlx_cuda
import numpy as np

Graph = Callable[[int], list[mx.array]]

MIB = 1 << 20
PIECE = 256 * MIB


def graphs(random: np.random.Generator) -> dict[str, Graph]:
    """By name, what makes a graph whose results have so many rows."""

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape), mx.float32).astype(mx.float16)

    heads, inner, outer = 8, 128, 4096
    x, w = normal(1, inner), mx.quantize(normal(outer, inner))
    experts, chosen = mx.quantize(normal(4, outer, inner)), mx.array([0, 3, 1, 2], mx.uint32)
    q, k, v = normal(1, heads, 1, inner), normal(1, heads, 256, inner), normal(1, heads, 256, inner)
    gate, dense, bias = normal(1, outer), normal(outer, inner), normal(outer)
    mx.eval(x, *w, *experts, q, k, v, gate, dense, bias)

    def rows(count: int) -> mx.array:
        return mx.broadcast_to(x, (count, inner)) * 2

    def queries(count: int) -> mx.array:
        return mx.broadcast_to(q, (1, heads, count, inner)) * 2

    def gathered(count: int) -> mx.array:
        names = mx.broadcast_to(chosen, (count // 4, 4)).flatten()
        return mlx_cuda.gather_qmm(rows(count)[:, None], *experts, rhs_indices=names)

    return {
        "quantized_matmul": lambda count: [mlx_cuda.quantized_matmul(rows(count), *w)],
        "gather_qmm": lambda count: [gathered(count)],
        "linear": lambda count: [mlx_cuda.linear(rows(count), dense, bias, activation="gelu_approx")],
        "swiglu": lambda count: [mlx_cuda.swiglu(mx.broadcast_to(gate, (count, outer)), mx.broadcast_to(gate, (count, outer)))],
        "flash": lambda count: [mlx_cuda.attention(queries(4 * count), k, v, softcap=10.0)],
        "cudnn": lambda count: [mlx_cuda.attention(queries(4 * count), k, v)],
        "one after another": lambda count: [
            mlx_cuda.attention(q, k, v),
            mlx_cuda.quantized_matmul(rows(64), *w),
            mlx_cuda.swiglu(mlx_cuda.quantized_matmul(rows(count), *w), mlx_cuda.quantized_matmul(rows(count), *w)),
        ],
    }


def fill(left: int) -> list[mx.array]:
    """Arrays that hold all of the memory but so many bytes."""
    held: list[mx.array] = []
    most = int(mx.device_info(mx.gpu)["total_memory"]) // PIECE  # where the host lends its own there is no error
    try:
        for _ in range(most):
            held.append(mx.zeros(PIECE, mx.uint8))
            mx.eval(held[-1])
    except RuntimeError:
        del held[-(left // PIECE + 1) :]
    mx.clear_cache()
    return held


def run(rounds: int, left: int, seed: int) -> int:
    random = np.random.default_rng(seed)
    makers = graphs(random)
    small, large = 256, 2 * left // (2 * 4096) // 256 * 256
    expected = {name: [np.array(each) for each in make(small)] for name, make in makers.items()}
    held = fill(left)
    active = mx.get_active_memory()
    print(f"{active / 2**30:.1f} GiB are taken, about {left / 2**30:.1f} are left; results of {large} rows do not fit", flush=True)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    last = time.monotonic()
    for i in range(rounds):
        name = str(random.choice(list(makers)))
        try:
            mx.eval(makers[name](large))
            counts["fitted"] += 1
        except RuntimeError as error:
            counts["errors"] += 1
            if "memory" not in str(error) and "allocate" not in str(error):
                wrong.append(f"{name}: {error}")
        name = str(random.choice(list(makers)))
        try:
            if not all(np.array_equal(np.array(got), want) for got, want in zip(makers[name](small), expected[name], strict=True)):
                wrong.append(f"{name}: other bits after {i + 1} rounds")
        except RuntimeError as error:
            wrong.append(f"{name}, which fits: {error}")
        if len(wrong) > 5:
            break
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{i + 1} of {rounds} rounds", flush=True)
    gc.collect()
    more = mx.get_active_memory() - active
    if more > 64 * MIB:  # workspaces that streams keep
        wrong.append(f"{more} bytes more are held than before")
    del held
    print(f"{dict(counts)} in {rounds} rounds; {more} bytes more are held than before")
    for line in wrong:
        print(line, file=sys.stderr)
    if not counts["errors"]:
        print("memory was never full", file=sys.stderr)
    return 1 if wrong or not counts["errors"] else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.full_memory", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--left", type=int, default=1024, metavar="MIB", help="memory that is not taken")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return run(options.rounds, options.left * MIB, options.seed)


if __name__ == "__main__":
    sys.exit(main())
