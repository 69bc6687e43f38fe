"""Linear attention: the gated delta rule against MLX's own and flash-linear-attention's, one token at a time and whole prompts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_cuda._recurrence.composed import composed
from mlx_cuda._recurrence.rules import Call

from tests.gpu import reference
from tests.gpu.support import host, relative_error

from ..timing import MlxEngine, Side, TorchEngine
from . import short_conv
from .backward import GRADIENT_TOLERANCE
from .base import DTYPES, Case, Prepared, UnavailableError, Unit, explanation, operation, rotation, tolerance

CHECKED_TOKENS = 512  # of the first sequence's first heads
FLA = "torch, flash-linear-attention"
FLA_GRAPH = "torch, flash-linear-attention, CUDA graph"


class Fla:
    """flash-linear-attention on the same numbers. It is imported at the first call, whose error says so where it is not installed."""

    def __init__(self, engine: TorchEngine, *, backward: bool) -> None:
        self.torch, self.backward = engine.torch, backward

    def inputs(self, arrays: tuple[mx.array, ...]) -> tuple[Any, ...]:
        """Its decays are logarithms; and the gradients of both results, if those of the inputs are asked for."""
        q, k, v, g, beta, state = (self.on_device(each) for each in arrays)
        wanted = (q, k, v, g.log(), beta, state)
        if not self.backward:
            return wanted
        return (*(each.requires_grad_() for each in wanted), v.detach().clone(), state.detach().clone())

    def on_device(self, array: mx.array) -> Any:
        raw = self.torch.from_numpy(np.array(mx.view(array, mx.uint8) + 0))  # a copy, because MLX would move what the host reads
        return raw.to("cuda").view(getattr(self.torch, str(array.dtype).rpartition(".")[2]))

    def __call__(self, *arrays: Any) -> Any:
        try:
            rules = importlib.import_module("fla.ops.gated_delta_rule")
        except (ImportError, OSError) as error:
            raise UnavailableError(f"flash-linear-attention cannot be imported: {error}") from error
        tokens = arrays[0].shape[1]
        call = rules.chunk_gated_delta_rule if tokens > 1 or self.backward else rules.fused_recurrent_gated_delta_rule
        q, k, v, g, beta, state, *gradients = arrays
        with self.torch.set_grad_enabled(self.backward):
            results = call(
                q, k, v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True, state_v_first=True
            )  # fmt: skip
            return self.torch.autograd.grad(results, arrays[:6], gradients) if self.backward else results

    def results(self, result: Any, inputs: tuple[mx.array, ...]) -> Any:
        """As ours: where gradients are asked for, that of the decay instead of its logarithm."""
        if not self.backward:
            return [mx.array(result[0][:1, :CHECKED_TOKENS, :2].float().cpu().numpy())]
        gradients = [mx.array(each.float().cpu().numpy()) for each in result]
        gradients[3] = gradients[3] / inputs[3]
        return None, gradients


class FlaGraph(Fla):
    """The same without the CPU's time for its launches: a CUDA graph for each set of inputs, captured at its first call."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine, backward=False)
        self.captured: dict[int, tuple[Any, Any]] = {}

    def __call__(self, *arrays: Any) -> Any:
        key = arrays[0].data_ptr()
        if key not in self.captured:
            super().__call__(*arrays)  # Triton compiles and tunes its kernels
            self.torch.cuda.synchronize()
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                results = super().__call__(*arrays)
            self.captured[key] = graph, results
        graph, results = self.captured[key]
        graph.replay()
        return results


@dataclass(frozen=True)
class LinearAttentionCase(Case):
    """A layer of Qwen 3 Next, or with ``channels`` one of Kimi Linear, given a state. MLX's loop over time is left out where it takes
    seconds; ``backward`` has the gradients of all that is given in its time, and those that MLX derives of the composition in float32, both
    compiled, as mlx-lm's trainer has its steps.
    """

    unit: ClassVar[Unit] = "TB/s"
    tokens: int
    batch: int = 1
    channels: bool = False
    backward: bool = False
    key_heads: int = 16
    value_heads: int = 32
    size: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        kind = ("a decay for each channel" if self.channels else "a decay for each head") + (", backward" if self.backward else "")
        return f"{self.batch} x {self.tokens}, {self.key_heads}/{self.value_heads} heads of {self.size}, {kind}"

    @property
    def work(self) -> float:
        """Bytes of the state, there and back, and of what a token has and gives."""
        item, heads = DTYPES[self.dtype].size, self.value_heads
        token = item * self.size * 2 * (self.key_heads + heads) + heads * (item + 4 * (self.size if self.channels else 1))
        return float(self.batch * (8 * heads * self.size**2 + self.tokens * token))

    @property
    def primitive(self) -> str | None:
        return None if self.backward else "LinearAttention"

    def draw(self) -> tuple[mx.array, ...]:
        kind, shape = DTYPES[self.dtype], (self.batch, self.tokens)
        q, k = (mx.random.normal((*shape, self.key_heads, self.size)) for _ in range(2))
        k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
        heads = (*shape, self.value_heads)
        v = mx.random.normal((*heads, self.size)).astype(kind)
        g = mx.random.uniform(0.8, 1, (*heads, self.size) if self.channels else heads)
        beta = mx.random.uniform(0, 1, heads).astype(kind)
        state = mx.random.normal((self.batch, self.value_heads, self.size, self.size))
        return (q * self.size**-0.5).astype(kind), k.astype(kind), v, g, beta, state

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        ours = operation("gated_delta")
        upstream: Any = mx.fast.gated_delta_update
        state_bytes = 4.0 * self.batch * self.value_heads * self.size**2
        inputs = [self.draw() for _ in range(rotation(max(state_bytes, self.work / 2)))]
        mx.eval(inputs)

        def ours_of(*arrays: mx.array) -> list[mx.array]:
            return list(ours(*arrays[:5], state=arrays[5]))

        def theirs_of(*arrays: mx.array) -> list[mx.array]:
            return list(upstream(*arrays))

        def composed_of(*arrays: mx.array) -> list[mx.array]:
            q, k, v, g, beta, state = arrays
            return list(composed(Call(q, k, v, g, beta, state, None, None), delta=True))

        def timed(call: Callable[..., list[mx.array]]) -> Callable[..., Any]:
            if not self.backward:
                return call
            return mx.compile(lambda *arrays: mx.vjp(call, list(arrays), [arrays[2], arrays[5]]))

        sides = [Side("ours", MlxEngine(), timed(ours_of), inputs, explain=lambda *arrays: explanation(ours)(*arrays[:5], state=arrays[5]))]
        if self.tokens * self.batch <= 2048 and not (self.backward and self.tokens > 256):
            sides.append(Side("upstream", MlxEngine(), timed(theirs_of), inputs))

        if self.backward:
            sides.append(Side("composed", MlxEngine(), timed(composed_of), inputs))

        def error_of_gradients(result: Any) -> float:
            wide = [each.astype(mx.float32) for each in inputs[0]]
            exact = mx.vjp(composed_of, wide, [wide[2], wide[5]])[1]
            return max(relative_error(mine, host(other)) for mine, other in zip(result[1], exact, strict=True))

        def error(result: Any) -> float:
            y = result[0][:1, :CHECKED_TOKENS, :2]
            own = [host(each[:1, :CHECKED_TOKENS, : 1 if i < 2 else 2]) for i, each in enumerate(inputs[0][:5])]
            return relative_error(y, reference.linear_attention(own, host(inputs[0][5][:1, :2]))[0])

        held = error_of_gradients if self.backward else error
        same_inputs = {}
        if torch and not self.channels:
            peers: dict[str, Fla] = {FLA: Fla(torch, backward=self.backward)}
            if not self.backward:
                peers[FLA_GRAPH] = FlaGraph(torch)
            on_device = [peers[FLA].inputs(each) for each in inputs]
            sides += [Side(name, torch, peer, on_device) for name, peer in peers.items()]
            same_inputs = dict.fromkeys(peers, lambda result: held(peers[FLA].results(result, inputs[0])))
        return Prepared(sides, held, GRADIENT_TOLERANCE if self.backward else tolerance(self.dtype), same_inputs=same_inputs)


def cases(*, quick: bool) -> list[LinearAttentionCase | short_conv.ShortConvCase]:
    if quick:
        small = [(1, False), (70, False), (70, True)]
        layers = [LinearAttentionCase(tokens, backward=backward, key_heads=1, value_heads=2, size=32) for tokens, backward in small]
        return [*layers, *short_conv.cases(quick=quick)]
    few = [LinearAttentionCase(1, batch, channels) for channels in (False, True) for batch in (1, 8, 64, 256)]
    prompts = [LinearAttentionCase(tokens) for tokens in (64, 256, 512, 2048, 8192, 32768)]
    prompts += [LinearAttentionCase(tokens, channels=True) for tokens in (64, 256, 2048, 32768)]
    gradients = [LinearAttentionCase(tokens, backward=True) for tokens in (2048, 8192)]
    return [*few, *prompts, LinearAttentionCase(2048, 8), *gradients, *short_conv.cases(quick=quick)]
