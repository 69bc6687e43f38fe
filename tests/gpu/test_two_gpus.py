"""Every engine on two GPUs of one process: in turns, from two threads, and with operands that the other one has made.

With one GPU it takes the place of the second, with a stream of its own; tests of two are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native
from mlx_cuda._mlx_lm.models import decoding_of

from .decoding_model import KVCache, Model
from .operations import MORE, OPERATIONS, OTHERS
from .support import normal

pytestmark = pytest.mark.gpu
MAKERS = {name: make for name, (_, make) in (OPERATIONS | MORE).items()} | OTHERS
TIMES = 3


@pytest.fixture(params=[0, 1], ids=["one GPU", "two GPUs"])
def devices(request: pytest.FixtureRequest) -> list[mx.Device]:
    second: int = request.param
    if mx.device_count(mx.gpu) <= second:
        pytest.skip("needs two GPUs")
    found = [mx.Device(mx.gpu, 0), mx.Device(mx.gpu, second)]
    if len({mx.device_info(device)["device_name"] for device in found}) > 1:
        pytest.skip("needs two GPUs of one kind")  # libraries choose by the multiprocessors, so sums have other orders
    for device in found:  # from the second one on they reach each other's memory, which MLX hands to and fro
        native.module(mx.default_stream(device))
    return found


def made(name: str) -> Callable[[], mx.array]:
    """The same call, with the same operands, wherever it is made."""
    return MAKERS[name](np.random.default_rng(list(name.encode())))


def result(call: Callable[[], mx.array]) -> np.ndarray:
    return np.array(call().astype(mx.float32))


@pytest.mark.parametrize("name", MAKERS)
def test_in_turns(devices: list[mx.Device], name: str) -> None:
    streams = [mx.new_stream(device) for device in devices]
    calls, expected = [], None
    for stream in streams:
        with mx.stream(stream):
            calls.append(made(name))
    for _ in range(TIMES):
        for stream, call in zip(streams, calls, strict=True):
            with mx.stream(stream):
                got = result(call)
            expected = got if expected is None else expected
            assert np.array_equal(got, expected)


def test_from_two_threads(devices: list[mx.Device]) -> None:
    expected = {name: result(made(name)) for name in MAKERS}

    def work(device: mx.Device) -> list[str]:
        with mx.stream(mx.new_stream(device)):
            calls = {name: made(name) for name in MAKERS}
            return [name for _ in range(TIMES) for name in MAKERS if not np.array_equal(result(calls[name]), expected[name])]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, devices)) == [[], []]


def test_steps_in_turns(devices: list[mx.Device]) -> None:
    """Captured for each GPU, and replayed there."""
    streams = [mx.new_stream(device) for device in devices]
    tokens = np.random.default_rng(7).integers(0, 500, (1, 40))
    logits: list[list[np.ndarray]] = [[], []]
    models, caches = [], []
    for stream in streams:
        with mx.stream(stream):
            mx.random.seed(11)
            models.append(Model())
            models[-1].set_dtype(mx.bfloat16)
            mx.eval(models[-1].parameters())
            caches.append([KVCache() for _ in models[-1].layers])
            models[-1](mx.array(tokens[:, :10]), cache=caches[-1])
    for at in range(10, 40):
        for stream, model, cache, each in zip(streams, models, caches, logits, strict=True):
            with mx.stream(stream):
                each.append(np.array(mlx_cuda.decode_step(model, mx.array(tokens[:, at : at + 1]), cache).astype(mx.float32)))
    assert all(np.array_equal(*pair) for pair in zip(*logits, strict=True))
    assert all(decoding_of(model).replayed > 20 for model in models)


def test_what_the_other_one_has_made(devices: list[mx.Device], rng: np.random.Generator) -> None:
    """Weights and caches lie where they were made; results of one GPU are operands on the other within one graph."""
    first, second = (mx.new_stream(device) for device in devices)
    x, w = normal(rng, (6, 512), mx.bfloat16), mx.quantize(normal(rng, (512, 512), mx.bfloat16))
    mx.eval(*w)

    def chain(streams: list[mx.Stream]) -> np.ndarray:
        y = x
        for stream in streams:
            with mx.stream(stream):
                y = mx.fast.rms_norm(mlx_cuda.quantized_matmul(y, *w), None, 1e-5)
        return np.array(y.astype(mx.float32))

    assert np.array_equal(chain([first, second] * TIMES), chain([first, first] * TIMES))
