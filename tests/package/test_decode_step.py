"""``decode_step``: its arguments, what it leaves behind where it raises, and what is said of a model."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import _decode_step
from mlx_cuda._loader import native as _native
from mlx_cuda._mlx_lm.models import decoding_of

from .sessions_on_cpu import native_module

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see
TOKEN = mx.array([[3]])


def test_decode_step_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "loaded", None)
    with pytest.raises(ValueError, match=r"\[decode_step\] It needs tokens \[B, 1\] .* got tokens \[1, 1\] and a cache of type list"):
        mlx_cuda.decode_step(None, TOKEN, [SimpleNamespace()], stream=mx.cpu)


def test_decode_step_leaves_the_cache_as_it_was_where_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            cache[0].place += 1
            cache[0].places += 1
            raise_if_asked()
            return tokens

    def raise_if_asked() -> None:
        if asked:
            raise KeyError("asked")

    asked = False
    cache = type("KVCache", (), {"__module__": "mlx_lm.models.cache"})()
    vars(cache).update(offset=5, place=3, places=mx.array([3, 2]), keys=None, values=None)  # of a kind that cannot be trimmed, it may be
    monkeypatch.setattr(_decode_step, "is_step", lambda *_: True)
    monkeypatch.setattr(_native, "module", lambda _: native_module())
    for error in (ValueError, KeyError):
        with pytest.raises(error):
            mlx_cuda.decode_step(Model(), TOKEN, [cache], stream=mx.cpu)
        assert (vars(cache)["place"], vars(cache)["places"].tolist()) == (3, [3, 2])
        asked = True


def test_gpus_without_our_kernels_replay_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_decode_step, "is_step", lambda *_: True)
    monkeypatch.setattr(_native, "engine", lambda _: _native.Engine(SimpleNamespace(), (7, 5), (9, 10, 0)))
    with pytest.raises(ValueError, match=r"\[decode_step\] Steps are captured on GPUs from sm_80 on, got sm_75"):
        mlx_cuda.decode_step(None, TOKEN, [SimpleNamespace()], stream=mx.cpu)


def test_explain_of_a_model_that_never_decoded() -> None:
    model = nn.Linear(1, 1)
    assert mlx_cuda.explain(mlx_cuda.decode_step, model).engine == "mlx"
    assert "no decode step" in mlx_cuda.explain(mlx_cuda.decode_step, model).reason
    assert decoding_of(model) is decoding_of(model)
