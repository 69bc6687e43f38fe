"""mlx-vlm's and mlx-audio's copies of mlx-lm's code: known as what they are, and their models over captured steps, on the CPU."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._mlx_lm import caches as caches_module
from mlx_cuda._mlx_lm import copies, in_pages, models, places, wrapped
from mlx_cuda._mlx_lm.calls import logits_of
from mlx_cuda._mlx_lm.models import Decoding

from benchmarks.vendored_parts import VERSIONS, caches, part

from ..gpu.vendored_models import AUDIO, ROPES, VISION, Tokenizer, forget_positions, make, prompt_with_picture
from .sessions_on_cpu import close, set_both

pytestmark = pytest.mark.usefixtures("on_the_cpu")

CACHES = ("KVCache", "RotatingKVCache", "ArraysCache", "BatchKVCache")
CODE = {  # what is looked for, of which packages; some are copied again within one
    "mlx_lm": {
        "models.cache": (*CACHES, "QuantizedKVCache", "BatchRotatingKVCache"),
        "models.base": ("quantized_scaled_dot_product_attention",),
        "models.gated_delta": ("gated_delta_ops",),
        "models.ssm": ("ssm_attn",),
    },
    "mlx_vlm": {
        "models.cache": (*CACHES, "QuantizedKVCache", "BatchRotatingKVCache"),
        "models.base": ("quantized_scaled_dot_product_attention", "cache_position_offset"),
        "models.gated_delta": ("gated_delta_ops",),
        "models.qwen3_5.gated_delta": ("gated_delta_ops", "gated_delta_chunked"),
        "models.ssm": ("ssm_attn",),
        **{f"models.{name}.language": ("LanguageModel",) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")},
    },
    "mlx_audio": {"lm.models.cache": CACHES, "lm.models.gated_delta": ("gated_delta_ops",), "lm.models.ssm": ("ssm_attn",)},
}
PLACES = [(package, module, name) for package, modules in CODE.items() for module, names in modules.items() for name in names]
WORDS = mx.array(np.random.default_rng(3).integers(0, 100, (3, 200)))


def require(package: str) -> None:
    """One of the versions that were tried, or a skip."""
    wanted = dict(each.replace("-", "_").split() for each in copies.TRIED)[package]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} {wanted} is not installed")
    if found != wanted:
        pytest.skip(f"{package} {wanted} is not installed, but {found}")


def test_the_versions_of_the_benchmark_were_tried() -> None:
    assert {f"{name.replace('_', '-')} {version}" for name, version in VERSIONS.items()} < {*copies.TRIED}


@pytest.mark.parametrize(("package", "module", "name"), PLACES, ids=[".".join(each) for each in PLACES])
def test_code_of_the_versions_that_were_tried(package: str, module: str, name: str) -> None:
    require(package)
    found = getattr(part(f"{package}.{module}"), name)
    known = copies.known_as(found)
    assert known.partition(" ")[0] == name, f"its digest is {copies.digest(found)}"
    assert (known == "ssm_attn of 0.31") == (name == "ssm_attn" and package != "mlx_lm")


@pytest.mark.parametrize("package", ["mlx_vlm", "mlx_audio"])
def test_code_is_known_while_methods_of_ours_are_in_it(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    require(package)
    found = [(getattr(part(f"{package}.{module}"), name), name) for module, names in CODE[package].items() for name in names]
    monkeypatch.setattr(copies, "_known", weakref.WeakKeyDictionary())
    for cls in [code for code, name in found if name in caches_module.NAMES]:
        in_pages.adapt(cls)
    assert [copies.known_as(code).partition(" ")[0] for code, _ in found] == [name for _, name in found]
    in_pages.restore()


@pytest.fixture
def patched(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Has the steps of a model be captured, as `patch` does on a GPU."""
    monkeypatch.setattr(wrapped, "is_step", lambda tokens, cache: tokens.shape[1] == 1 and isinstance(cache, list))
    monkeypatch.setattr(models, "decoding_of", lambda _: decoding)
    monkeypatch.setattr(wrapped, "decoding_of", lambda _: decoding)

    def install(model: Any) -> None:
        vars(decoding)["model"] = lambda: model
        wrapped.install(places.put)

    yield install
    wrapped.remove()
    places.take_away()


def conversation(model: Any, cache: list[Any], batch: int, **options: Any) -> mx.array:
    """The logits of a prompt's last token and of some more."""
    forget_positions(model)
    logits = [logits_of(model(WORDS[:batch, :20], cache=cache))[0][:, -1:]]
    logits += [logits_of(model(WORDS[:batch, at : at + 1], cache=cache, **options))[0] for at in range(20, 50)]
    return mx.concatenate(logits, axis=1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*VISION, *AUDIO])
def test_a_model_decodes(patched: Callable[[Any], None], decoding: Decoding, name: str, batch: int) -> None:
    package = name.partition(".")[0]
    require(package)
    model = make(name)
    cache = caches(package).make_prompt_cache
    options = {"logits_to_keep": 1} if package == "mlx_vlm" else {}
    expected = conversation(model, cache(model), batch, **options)
    kind = type(model(WORDS[:batch, :1]))
    patched(model)
    for _ in range(2):  # the second takes over what the first has captured, where that fits
        ours = cache(model)
        assert close(conversation(model, ours, batch, **options), expected)
        assert decoding.reason == ""
        assert type(model(WORDS[:batch, :1], cache=ours, **options)) is kind
    assert decoding.replayed >= 50
    assert not decoding.errors


@pytest.mark.parametrize("name", ROPES)
def test_pictures_of_other_sizes(patched: Callable[[Any], None], decoding: Decoding, name: str) -> None:
    """Each moves the positions of the tokens after it by something else, and one capture serves all of them."""
    require("mlx_vlm")
    model = make(name)
    prompts = [prompt_with_picture(model, WORDS[:1, :20], *sizes) for sizes in ((0, 0), (8, 12), (4, 4), (0, 0))]

    def answers() -> list[mx.array]:
        found = []
        for given, options in prompts:
            forget_positions(model)
            cache = caches("mlx_vlm").make_prompt_cache(model)
            model(given, cache=cache, **options)
            before = model._rope_deltas
            assert isinstance(before, mx.array)
            found.append(mx.concatenate([model(WORDS[:1, at : at + 1], cache=cache).logits for at in range(20, 30)], axis=1))
            assert model._rope_deltas is before
        return found

    expected = answers()
    patched(model)
    ours = answers()
    assert all(close(one, other) for one, other in zip(ours, expected, strict=True))
    assert not close(expected[1], expected[2])
    assert decoding.captured < 4
    assert decoding.replayed >= 36
    assert decoding.reason == ""


@pytest.mark.parametrize("name", ROPES)
def test_what_a_step_is_given_and_notes(patched: Callable[[Any], None], decoding: Decoding, name: str) -> None:
    require("mlx_vlm")
    model, batch, word = make(name), caches("mlx_vlm").BatchKVCache, WORDS[:2, :1]
    patched(model)
    forget_positions(model)
    cache = [batch([0, 3]) for _ in model.layers]
    model(WORDS[:2, :9], cache=cache)
    deltas = mx.array([[-3], [2]])
    twin = copy.deepcopy(cache)
    ours = [model(word, cache=cache, rope_deltas=deltas).logits for _ in range(4)]
    assert model._rope_deltas is deltas
    assert decoding.replayed >= 2, decoding.reason
    wrapped.remove()
    for one in ours:
        assert close(one, model(word, cache=twin, rope_deltas=deltas).logits)
    wrapped.install(places.put)
    model._rope_deltas = None
    model(word, cache=[batch([0, 0]) for _ in model.layers])  # the first token of two sequences
    assert decoding.reason.startswith("its token is the first of a sequence")
    for wrong in (mx.zeros((3, 1), mx.int32), mx.zeros((2, 1)), mx.zeros(2, mx.int32), mx.zeros((1, 2), mx.int32)):
        for _ in range(3):
            model(word, cache=cache, rope_deltas=deltas)
        assert decoding.reason == ""
        with contextlib.suppress(ValueError):  # its own
            model(word, cache=cache, rope_deltas=wrong)
        assert decoding.reason == "how far its positions are from places is not known"


@pytest.mark.parametrize("kind", ["KVCache", "RotatingKVCache", "BatchKVCache"])
@pytest.mark.parametrize("name", ROPES)
def test_a_cache_that_begins_anew_after_a_picture(patched: Callable[[Any], None], decoding: Decoding, name: str, kind: str) -> None:
    """Its first token has the first position again, whatever the picture has moved."""
    require("mlx_vlm")
    model, cls = make(name), getattr(caches("mlx_vlm"), kind)
    sizes: dict[str, list[Any]] = {"RotatingKVCache": [200], "BatchKVCache": [[0]]}
    given, options = prompt_with_picture(model, WORDS[:1, :20], 8, 12)

    def answer() -> mx.array:
        forget_positions(model)
        cache = [cls(*sizes.get(kind, [])) for _ in model.layers]
        model(given, cache=cache, **options)
        found = [model(WORDS[:1, at : at + 1], cache=cache).logits for at in range(20, 26)]
        for each in cache:
            each.trim(1000)
        found += [model(WORDS[:1, at : at + 1], cache=cache).logits for at in range(20, 30)]
        return mx.concatenate(found, axis=1)

    expected = answer()
    patched(model)
    assert close(answer(), expected)
    assert decoding.replayed > 8


@pytest.mark.parametrize("name", ROPES)
def test_steps_that_are_given_all_positions_run_as_they_are(patched: Callable[[Any], None], decoding: Decoding, name: str) -> None:
    require("mlx_vlm")
    model = make(name)
    cache = caches("mlx_vlm").make_prompt_cache(model)
    forget_positions(model)
    model(WORDS[:1, :9], cache=cache)
    twin = copy.deepcopy(cache)
    places = [mx.full((3, 1, 1), place) for place in range(9, 60, 10)]
    expected = [model(WORDS[:1, :1], cache=twin, position_ids=each).logits for each in places]
    patched(model)
    ours = [model(WORDS[:1, :1], cache=cache, position_ids=each).logits for each in places]
    assert all(close(one, other) for one, other in zip(ours, expected, strict=True))
    assert decoding.reason == "its steps are given position_ids besides their tokens and caches"
    assert decoding.captured == 0


@pytest.mark.parametrize("name", ["mlx_vlm.llama", "mlx_vlm.qwen3_5"])
def test_other_options_are_other_steps(patched: Callable[[Any], None], decoding: Decoding, name: str) -> None:
    require("mlx_vlm")
    model = make(name)
    patched(model)
    forget_positions(model)
    cache = caches("mlx_vlm").make_prompt_cache(model)
    model(WORDS[:1, :9], cache=cache)
    for count, value in enumerate((True, 1, 1.0, "1"), 1):  # of which Python holds three for equal
        for _ in range(3):
            model(WORDS[:1, :1], cache=cache, logits_to_keep=value)
        assert (decoding.captured, decoding.reason) == (count, "")


def test_steps_for_drafts_leave_others_as_fast(patched: Callable[[Any], None], decoding: Decoding) -> None:
    require("mlx_vlm")
    model = make("mlx_vlm.qwen3_5")
    patched(model)
    forget_positions(model)
    cache = caches("mlx_vlm").make_prompt_cache(model)
    model(WORDS[:1, :9], cache=cache)
    assert model(WORDS[:1, :1], cache=cache, return_hidden=True).hidden_states is not None
    assert decoding.reason == "it returns something else than logits"
    for _ in range(4):
        model(WORDS[:1, :1], cache=cache)
    assert decoding.replayed > 1, decoding.reason


def tokens_of(generator: Any, embed: Callable[[mx.array], mx.array], wanted: int) -> list[list[int]]:
    """What each request says; the requests come while others go on."""
    said: dict[int, list[int]] = {}
    for row in range(3):
        prompt = WORDS[row : row + 1, : 12 - 3 * row]
        numbers = generator.insert(prompt.tolist(), max_tokens=[wanted - 5 * row], prompt_kwargs=[{"inputs_embeds": embed(prompt)}])
        said |= {number: [] for number in numbers}
        for _ in range(4):
            take(generator, said)
    for _ in range(4 * wanted):
        take(generator, said)
    return [said[number] for number in sorted(said)]


def take(generator: Any, said: dict[int, list[int]]) -> None:
    found = generator.next()
    for each in found[1] if isinstance(found, tuple) else found:
        said[each.uid].append(each.token)


@pytest.mark.parametrize("name", ["mlx_vlm.llama", "mlx_vlm.gemma3", "mlx_vlm.lfm2", *ROPES])
def test_requests_come_and_go(patched: Callable[[Any], None], decoding: Decoding, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    require("mlx_vlm")
    try:
        generate = part("mlx_vlm.generate.ar")
    except ImportError as error:
        pytest.skip(f"mlx_vlm.generate cannot be imported: {error}")
    for each, value in {"PAGE": 8, "AHEAD": 1, "LEAST_ROWS": 8, "HEADROOM": 40, "EXPECTED": 4}.items():
        set_both(monkeypatch, each, value)
    model = make(name)

    def served() -> list[list[int]]:
        generator = generate.BatchGenerator(model, Tokenizer(), stop_tokens=set(), completion_batch_size=4, prefill_batch_size=2)
        return tokens_of(generator, model.model.embed_tokens, 25)

    expected = served()
    assert [len(each) for each in expected] == [25, 20, 15]
    patched(model)
    assert served() == expected
    assert decoding.replayed > 15, decoding.reason
    assert not decoding.errors


def test_the_functions_come_back(patched: Callable[[Any], None]) -> None:
    require("mlx_vlm")
    names = [
        (part(f"mlx_vlm.{module}"), name)
        for module, names in CODE["mlx_vlm"].items()
        if "cache" not in module and "language" not in module
        for name in names
    ]
    theirs = [getattr(*each) for each in names]
    language = part("mlx_vlm.models.qwen3_vl.language")
    patched(None)
    assert all(hasattr(getattr(*each), "unpatched") for each in names)
    assert language.cache_position_offset is part("mlx_vlm.models.base").cache_position_offset
    assert hasattr(language.LanguageModel.__call__, "unpatched")
    wrapped.remove()
    places.take_away()
    assert [getattr(*each) for each in names] == theirs
    assert language.cache_position_offset.__module__ == "mlx_vlm.models.base"
    assert not hasattr(language.cache_position_offset, "unpatched")
    assert not hasattr(language.LanguageModel.__call__, "unpatched")
    assert "mlx_vlm" in caches_module._packages
