"""One captured decode step of an mlx-lm model, for custom decode loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from ._all_sum import several_processes
from ._common.arrays import StreamOrDevice, resolve
from ._common.choice import OLDEST_GPU, Choice, sm
from ._invariant.state import setting
from ._loader import native
from ._mlx_lm.caches import kind_of, put_back, standing
from ._mlx_lm.copies import package_of
from ._mlx_lm.models import decoding_of, is_step, step_of
from ._mlx_lm.places import left_alone
from ._mlx_lm.wrapped import not_replaying
from ._operation import Call
from ._patch import our_matmuls
from ._replay.errors import NotReplayed

INVARIANT = "patch(batch_invariant=True) is on, and captured steps use other kernels"


@dataclass
class StepCall(Call[Any]):
    """A call of :func:`decode_step`. Its engine follows from the earlier steps of the model, so :func:`explain` needs only the model. It
    changes its caches, so it is neither cached nor part of another graph.
    """

    model: Any
    tokens: Any = None
    cache: Any = None
    stream: StreamOrDevice = None

    @cached_property
    def choice(self) -> Choice:  # type: ignore[override]  # computed only if read
        if setting.on:
            return Choice("mlx", INVARIANT)
        state = decoding_of(self.model)
        if not state.captures:
            reason = state.reason or "this thread has no capture of it: another has, or it was released"
            others = left_alone(package_of(type(self.model)))
            unknown = [f"left alone, as their code is not known: {', '.join(others)}"] if others else []
            return Choice("mlx", "; ".join([not_replaying(self.model) or reason, *unknown]))
        return Choice("replay", f"its step was captured: {state.captures[0].step.nodes} nodes in one launch")

    def kernel(self) -> str:
        """The nodes of a captured step."""
        if self.choice.engine != "replay":
            return ""
        return ", ".join(f"{count} {name}" for name, count in decoding_of(self.model).captures[0].step.primitives.items())

    def result(self) -> Any:
        model, tokens, cache = self.model, self.tokens, self.cache
        if setting.on:
            raise ValueError(f"[decode_step] The step cannot be captured: {INVARIANT}.")
        on = resolve(self.stream)
        with mx.stream(on):
            if mx.cuda.is_available():
                native.load()
            if not is_step(tokens, cache):
                raise ValueError(
                    f"[decode_step] It needs tokens [B, 1] and a list of caches, on a CUDA GPU, got {_described(tokens, cache)}."
                )
            engine = native.engine(on)
            if not isinstance(engine, str) and engine.capability < OLDEST_GPU:
                raise ValueError(f"[decode_step] Steps are captured on GPUs from {sm(OLDEST_GPU)} on, got {sm(engine.capability)}.")
            try:
                for each in cache:
                    kind_of(each)
            except NotReplayed as reason:
                raise ValueError(f"[decode_step] The step cannot be captured: {reason}.") from reason
            before, function = standing(cache, updated=True), type(model).__call__
            logits, state = step_of(model, our_matmuls()(getattr(function, "unpatched", function)), tokens, cache, {}, at_once=True)
            if state.reason and not several_processes():
                put_back(cache, before)
                raise ValueError(f"[decode_step] The step cannot be captured: {state.reason}.")
            return logits


def decode_step(model: Any, tokens: mx.array, cache: list[Any], *, stream: StreamOrDevice = None) -> mx.array:
    """Compute the logits of the next token by a decode step that is captured once and launched as one CUDA graph.

    Args:
        model: A model of mlx-lm (an ``mlx.nn.Module``), or of a package with copies of its code, called as ``model(tokens, cache=cache)``.
            A change of anything that is reachable from the model is detected, and the step is captured again. Other changes are not
            detected (:func:`patch`).
        tokens: Integers ``[B, 1]``, the last token of each sequence.
        cache: A list of mlx-lm's caches, one per layer, or known copies: ``KVCache``, ``RotatingKVCache``, ``QuantizedKVCache``,
            ``ArraysCache``, ``BatchKVCache`` or ``BatchRotatingKVCache`` with the tokens so far. They are updated in place and can still be
            trimmed, saved and used for steps of several tokens. Only one thread at a time may use a cache.
        stream: Stream or device to run on.

    Returns:
        The result of the model, ``[B, 1, vocabulary]`` or an object with that as ``logits``.

    Raises:
        ValueError: The arguments are not a decode step, or the step cannot be captured; the message says why, and the cache is unchanged.
            With several processes (``mlx.launch``), a step that cannot be captured returns the model's own result instead of raising,
            because the other processes already have its all-reduces.

    The first call runs the step eagerly and captures it, which takes as long as a few steps. While :func:`patch` is on, models capture
    their steps by themselves. ``explain(decode_step, model)`` returns whether a model's steps are captured.
    """
    result: mx.array = StepCall(model, tokens, cache, stream).result()
    return result


def _described(tokens: Any, cache: Any) -> str:
    shape = f"tokens {list(tokens.shape)}" if isinstance(tokens, mx.array) else f"tokens of type {type(tokens).__name__}"
    return f"{shape} and a cache of type {type(cache).__name__} on {mx.default_device()}"


vars(decode_step).update(prepare=StepCall)
