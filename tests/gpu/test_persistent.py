"""The persistent kernel of a captured step: GEMVs with 4-bit weights that hand their results over while it runs."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest

from . import persistent_process
from .decoding_checks import FOUR, PROMPT, TOLERANCE, as_it_is, check, fresh, make, replayed, run, words
from .decoding_model import Model, nn
from .support import host, on_hopper, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_buckets", "hopper")]


@pytest.fixture
def hopper() -> None:
    if not on_hopper():
        pytest.skip("the kernel is for Hopper")


SMALL = {"size": 512, "hidden": 1536, "layers": 3, "words": 800, "dim": 64, "heads": 16, "kv_heads": 4}


def kernels(model: Model) -> str:
    return str(mlx_cuda.explain(mlx_cuda.decode_step, model).kernel)


def persistent(model: Model, part: str) -> int:
    """How often it is computed by persistent kernels."""
    all_of_them = 0
    for kernel in kernels(model).split(", "):
        count, _, steps = kernel.partition(" persistent: ")
        for step in steps.split("; ") if steps else ():
            each, name = step.split(" ", 1)
            all_of_them += int(count) * int(each) * (part in name)
    return all_of_them


@pytest.mark.parametrize("sizes", [
    SMALL,
    {**SMALL, "size": 1024, "heads": 8, "dim": 128, "hidden": 2560},
    {**SMALL, "size": 2560, "hidden": 9728, "words": 20000, "dim": 128, "heads": 32, "kv_heads": 8},  # a row has one, two and four warps
    {**SMALL, "size": 4096, "hidden": 14336, "dim": 128, "heads": 32, "kv_heads": 8, "layers": 2},  # rows take two slots
    {**SMALL, "hidden": 512 * 37, "layers": 2},  # and parts of unequal length
    {**SMALL, "size": 5120, "hidden": 25600, "layers": 2},  # three slots, so that a team's next chunk is more than a round of the ring on
    {**SMALL, "hidden": 4096, "words": 512, "layers": 5},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_sizes(rng: np.random.Generator, dtype: mx.Dtype, sizes: dict[str, Any]) -> None:
    model = make(rng, dtype, FOUR, **sizes)
    check(model, words(rng, 1, 60) % sizes["words"], dtype)
    assert persistent(model, "norm + 2 GEMVs + swiglu") == sizes["layers"]
    assert persistent(model, "norm + 3 GEMVs") == sizes["layers"]
    assert persistent(model, "rope + append + attention") >= sizes["layers"] - 1  # one may be between two kernels


@pytest.mark.parametrize("sizes", [
    {"heads": 32, "kv_heads": 2, "dim": 32},  # two blocks of rows
    {"heads": 16, "kv_heads": 2, "dim": 96},
    {"heads": 8, "kv_heads": 8},
    {"heads": 4, "kv_heads": 1, "dim": 128, "sinks": True},
    {"head_norms": False},
    {"window": 40},
], ids=str)  # fmt: skip
def test_attention(rng: np.random.Generator, sizes: dict[str, Any]) -> None:
    """To more keys than a block's warps have tiles of."""
    model = make(rng, mx.bfloat16, FOUR, **{**SMALL, **sizes, "layers": 4})
    check(model, words(rng, 1, 150), mx.bfloat16)
    assert "window" in sizes or persistent(model, "attention") == 3


MOE = {**SMALL, "size": 1024, "hidden": 768, "layers": 3}


def errors_of_tokens(model: Model, tokens: mx.array) -> list[float]:
    own, ours = (host(run(model, fresh(model), tokens, step(model))) for step in (as_it_is, replayed))
    return [relative_error(mx.array(one), other) for one, other in zip(ours[0], own[0], strict=True)]


def of_experts(rng: np.random.Generator, dtype: mx.Dtype, bits: int, **sizes: Any) -> Model:
    """A model whose routers have so many bits: mlx-lm gives most of them 8."""
    model = make(rng, dtype, FOUR, **{**MOE, **sizes})
    for layer in model.layers if bits == 8 else ():
        router = nn.Linear(layer.norms[1].weight.size, sizes["mixture"][0], bias=False)
        router.weight = (router.weight * 4).astype(dtype)
        layer.mixture.router = nn.QuantizedLinear.from_linear(router, 64, 8)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize(("bits", "dtype", "sizes", "mixture"), [
    (4, mx.bfloat16, {}, (8, 7, "qwen3_moe")),
    (8, mx.float16, {"hidden": 512}, (34, 16, "mixtral")),
    (4, mx.float16, {"hidden": 1024, "size": 512}, (24, 23, "olmoe")),
    (8, mx.bfloat16, {"hidden": 2560}, (8, 3, "mixtral")),  # as long as a slot
    (4, mx.bfloat16, {"size": 2048, "hidden": 256, "heads": 8, "dim": 128}, (512, 10, "qwen3_moe")),
    (8, mx.bfloat16, {}, (130, 2, "qwen3_moe")),
    (4, mx.float16, {}, (128, 8, "olmoe")),
    (4, mx.float16, {"size": 4096, "heads": 32, "dim": 128, "hidden": 512, "layers": 2}, (8, 2, "mixtral")),  # two warps share a row
    (8, mx.float16, {"hidden": 256}, (64, 32, "qwen3_moe")),
], ids=str)  # fmt: skip
def test_experts(rng: np.random.Generator, bits: int, dtype: mx.Dtype, sizes: dict[str, int], mixture: tuple[int, int, str]) -> None:
    """Where two experts are nearly as good, rounding decides, so some steps may have another one."""
    model = of_experts(rng, dtype, bits, **sizes, mixture=mixture)
    errors = errors_of_tokens(model, words(rng, 1, 60))
    assert np.median(errors) <= TOLERANCE[dtype]
    if dtype == mx.float16:
        assert np.mean(np.array(errors) <= TOLERANCE[mx.bfloat16]) >= 0.8
        assert max(errors) <= 0.5
    assert persistent(model, "norm + 2 MoE GEMVs + swiglu") >= len(model.layers) - 1  # one may be between two kernels
    assert persistent(model, "MoE GEMV + sum + add") >= len(model.layers) - 1
    assert persistent(model, "attention") >= len(model.layers) - 1


@pytest.mark.parametrize(("sizes", "mixture"), [
    ({"hidden": 640}, (8, 4, "qwen3_moe")),  # rows of the summed experts are no multiple of 256
    ({}, (13, 4, "qwen3_moe")),  # and logits of two, as they are handed over
], ids=str)  # fmt: skip
def test_experts_that_the_kernel_does_not_take(rng: np.random.Generator, sizes: dict[str, int], mixture: tuple[int, int, str]) -> None:
    model = of_experts(rng, mx.bfloat16, 4, **sizes, mixture=mixture)
    assert np.median(errors_of_tokens(model, words(rng, 1, 30))) <= TOLERANCE[mx.bfloat16]
    assert persistent(model, "MoE GEMV + sum") == 0
    assert (persistent(model, "router") > 0) == ("hidden" in sizes)


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_approx", "of itself"])
def test_gates(rng: np.random.Generator, gate: str) -> None:
    model = make(rng, mx.bfloat16, FOUR, **SMALL, gate=gate)
    check(model, words(rng, 1, 40), mx.bfloat16)
    assert "persistent" in kernels(model)


@pytest.mark.parametrize(("sizes", "runs"), [({"size": 576}, 0), ({"layers": 1}, 2), ({"words": 802}, 2)], ids=str)
def test_what_the_kernel_does_not_take(rng: np.random.Generator, sizes: dict[str, int], runs: int) -> None:
    """Rows that are no multiple of 512, and a number of rows that is no multiple of four. One run of GEMVs is divided in two."""
    model = make(rng, mx.bfloat16, FOUR, **{**SMALL, **sizes})
    check(model, words(rng, 1, 30), mx.bfloat16)
    found = [int(part.split()[0]) for part in kernels(model).split(", ") if "persistent" in part]
    assert sum(found) == runs


def test_a_gemv_that_reads_one_of_several_results(rng: np.random.Generator) -> None:
    """As in multi-head latent attention: the projection after one of those that share a norm."""
    model: Any = make(rng, mx.bfloat16, FOUR, **SMALL)
    for layer in model.layers:
        parts = [nn.Linear(512, 512, bias=False), nn.Linear(512, 16 * 64, bias=False)]
        for part in parts:
            part.weight = part.weight.astype(mx.bfloat16)
        layer.q = nn.Sequential(*(nn.QuantizedLinear.from_linear(part, 64, 4) for part in parts))
    mx.eval(model.parameters())
    tokens = words(rng, 1, 40)
    own, ours = (run(model, fresh(model), tokens, step(model)) for step in (as_it_is, replayed))
    assert relative_error(ours, host(own)) <= TOLERANCE[mx.bfloat16]
    assert persistent(model, "norm + 3 GEMVs") == 2


class Fan(nn.Module):  # type: ignore[misc]
    """So many projections of the normalized x, added."""

    def __init__(self, inner: int, columns: int, count: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(inner)
        self.parts = [nn.QuantizedLinear(inner, columns, False, 64, 4) for _ in range(count)]
        self.set_dtype(mx.bfloat16)

    def __call__(self, x: mx.array) -> Any:
        x = self.norm(x)
        return sum(part(x) for part in self.parts)


def test_attention_whose_norm_several_calls_read(rng: np.random.Generator) -> None:
    """A call has three projections: the result of attention is not only in the kernel that computes it."""
    model: Any = make(rng, mx.bfloat16, FOUR, **SMALL)
    for layer in model.layers:
        layer.o = Fan(16 * 64, 512, 4)
    mx.eval(model.parameters())
    tokens = words(rng, 1, 40)
    own, ours = (run(model, fresh(model), tokens, step(model)) for step in (as_it_is, replayed))
    assert relative_error(ours, host(own)) <= TOLERANCE[mx.bfloat16]
    assert persistent(model, "norm + 2 GEMVs + swiglu") > 0


@pytest.mark.parametrize("mixture", [None, (32, 4, "qwen3_moe"), (32, 4, "mixtral")], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_nan_and_infinity_come_through(rng: np.random.Generator, value: float, mixture: tuple[int, int, str] | None) -> None:
    """A token whose embedding is not finite: also through what is handed over, whose memory holds a NaN of its own before."""
    bad, at = 7, 20
    model: Any = make(rng, mx.bfloat16, FOUR, **SMALL, mixture=mixture)
    model.embed["scales"][bad, 0] = value
    mx.eval(model.parameters())
    tokens = words(rng, 1, 26)
    tokens = mx.where(tokens == bad, 8, tokens)
    tokens[0, at] = bad
    own, ours = (np.isfinite(host(run(model, fresh(model), tokens, step(model)))) for step in (as_it_is, replayed))
    assert persistent(model, "router" if mixture else "attention") > 0
    assert own[:, : at - PROMPT].all()
    assert np.array_equal(own, ours)


@pytest.mark.parametrize("bits", [None, 4, 8], ids=str)
def test_results_do_not_depend_on_timing(rng: np.random.Generator, bits: int | None) -> None:
    """Of a dense model, and of one whose routers have so many bits."""
    experts = bits and of_experts(rng, mx.bfloat16, bits, mixture=(32, 4, "qwen3_moe"))
    model = experts or make(rng, mx.bfloat16, FOUR, **{**SMALL, "size": 2560, "hidden": 9728})
    tokens = words(rng, 1, 200)
    first, *others = (host(run(model, fresh(model), tokens, replayed(model))) for _ in range(4))
    assert all(np.array_equal(first, other) for other in others)


def test_two_streams_at_once(rng: np.random.Generator) -> None:
    """Blocks of two such kernels are never resident in part, so that each waits for blocks that cannot begin.

    And a thread reads its prompts with MLX's matmuls, which round otherwise than ours, while the other one captures.
    """
    models = [make(rng, mx.bfloat16, FOUR, **{**SMALL, "size": 1024, "hidden": 4096, "layers": 6}) for _ in range(2)]
    tokens = words(rng, 1, 150)
    alone = [host(run(model, fresh(model), tokens, replayed(model))) for model in models]
    together: dict[int, list[np.ndarray[Any, Any]]] = {0: [], 1: []}

    def decode(index: int) -> None:
        with mx.stream(mx.new_stream(mx.gpu)):
            for _ in range(6):
                together[index].append(host(run(models[index], fresh(models[index]), tokens, replayed(models[index]))))

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(together[index]) == 6
        assert all(np.array_equal(each, alone[index]) for each in together[index])


def test_two_processes_at_once() -> None:
    """The GPU's time is divided between them, and each gets what it gets alone."""
    command = [sys.executable, "-m", persistent_process.__name__]
    together = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = [process.communicate()[0].split() for process in together]
    assert [process.returncode for process in together] == [0, 0]
    alone = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert len(alone) == persistent_process.RUNS
    assert len({*alone}) == 1
    assert digests == [alone, alone]
