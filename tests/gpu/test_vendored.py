"""mlx-vlm's and mlx-audio's models, whose code is copied from mlx-lm's: their steps are captured, and give what they give without."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._mlx_lm import caches
from mlx_cuda._mlx_lm.calls import logits_of
from mlx_cuda._mlx_lm.models import decoding_of

from benchmarks import vendored_parts
from benchmarks.vendored_parts import VERSIONS, part

from .reference import Array
from .support import host, normal, relative_error
from .vendored_models import AUDIO, ROPES, VISION, Tokenizer, forget_positions, make, prompt_with_picture

pytestmark = pytest.mark.gpu

PROMPT, COUNT = 40, 60
TOLERANCE = 6e-2  # of logits in bfloat16 after two layers
PACKED = 0.15  # of those with keys and values in 8 bits
REPLACING = ["mlx_vlm.qwen3_5", "mlx_vlm.lfm2", "mlx_vlm.mamba2", "mlx_audio.qwen3_5", "mlx_audio.lfm2"]  # whose layers have states


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "LEAST_CAPACITY", 64)
    monkeypatch.setattr(caches, "HEADROOM", 8)


def require(package: str) -> None:
    """The version that was tried, wherever it was unpacked, or a skip."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} {VERSIONS[package]} is not installed")
    if found != VERSIONS[package]:
        pytest.skip(f"{package} {VERSIONS[package]} is not installed, but {found}")


def module(name: str) -> Any:
    require(name.partition(".")[0])
    try:
        return part(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def model_of(name: str, dtype: mx.Dtype = mx.bfloat16) -> tuple[Any, Callable[[], list[Any]]]:
    """A model, and what makes its caches."""
    package = name.partition(".")[0]
    require(package)
    try:
        model, parts = make(name, dtype), vendored_parts.caches(package)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")
    return model, lambda: parts.make_prompt_cache(model)


def words(rng: np.random.Generator, batch: int, count: int) -> mx.array:
    return mx.array(rng.integers(0, 500, (batch, count)))


def conversation(model: Any, cache: list[Any], prompt: mx.array, tokens: mx.array, **given: Any) -> Array:
    """The logits of the prompt's last token and of each after it."""
    forget_positions(model)
    first = logits_of(model(prompt, cache=cache, **given))[0][:, -1:]
    return np.concatenate([host(first), steps_of(model, cache, tokens)], axis=1)


def steps_of(model: Any, cache: list[Any], tokens: mx.array) -> Array:
    """The logits of each of these tokens, for which mlx-vlm calls its models like this."""
    options = {"logits_to_keep": 1} if type(model).__module__.startswith("mlx_vlm.") else {}
    found = []
    for index in range(tokens.shape[1]):
        found.append(logits_of(model(tokens[:, index : index + 1], cache=cache, **options))[0])
        mx.eval(found[-1])
    return host(mx.concatenate(found, axis=1))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*VISION, *AUDIO])
def test_models_decode_as_they_do_without(rng: np.random.Generator, name: str, batch: int) -> None:
    model, make_cache = model_of(name)
    prompt, tokens = words(rng, batch, PROMPT), words(rng, batch, COUNT)
    theirs = conversation(model, make_cache(), prompt, tokens)
    with mlx_cuda.patch():
        kinds = [type(model(tokens[:, :1], cache=cache)) for cache in (make_cache(), make_cache())]
        ours = conversation(model, make_cache(), prompt, tokens)
        choice = mlx_cuda.explain(mlx_cuda.decode_step, model)
        again = conversation(model, make_cache(), prompt, tokens)
        steps = decoding_of(model).replayed
    assert choice.engine == "replay", choice.reason
    assert relative_error(ours, theirs) < TOLERANCE
    assert relative_error(again, theirs) < TOLERANCE  # over what the first conversation captured
    assert steps > COUNT
    assert {*kinds} == {type(model(tokens[:, :1], cache=make_cache()))}
    assert ("DecodeAttention" in choice.kernel or "append + attention" in choice.kernel) == (name != "mlx_vlm.mamba2"), choice.kernel
    assert ("CacheReplace" in choice.kernel) == (name in REPLACING), choice.kernel


@pytest.mark.parametrize("name", ROPES)
def test_pictures_of_other_sizes(rng: np.random.Generator, name: str) -> None:
    """Each moves the positions of the tokens after it by something else, which the model keeps for its steps."""
    model, make_cache = model_of(name)
    tokens = words(rng, 1, COUNT)

    prompts = [prompt_with_picture(model, words(rng, 1, PROMPT), *sizes) for sizes in ((0, 0), (8, 12), (4, 4), (0, 0))]

    def all_of_them() -> list[Array]:
        return [conversation(model, make_cache(), given, tokens, **options) for given, options in prompts]

    theirs = all_of_them()
    with mlx_cuda.patch():
        ours = all_of_them()
        choice, steps = mlx_cuda.explain(mlx_cuda.decode_step, model), decoding_of(model).replayed
    assert choice.engine == "replay", choice.reason
    assert steps > 3 * COUNT  # one capture serves all of them, until the cache is full
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) < TOLERANCE
    assert relative_error(theirs[1][:, 1:], theirs[2][:, 1:]) > 2 * TOLERANCE  # another prompt says something else


@pytest.mark.parametrize("name", ROPES)
def test_sequences_with_pictures_of_their_own(rng: np.random.Generator, name: str) -> None:
    """Their steps are given how far the positions of each are from its places, which changes as others join."""
    model, _ = model_of(name)
    batch, prompt, tokens = vendored_parts.caches("mlx_vlm").BatchKVCache, words(rng, 2, PROMPT), words(rng, 2, COUNT)

    def answer(*deltas: mx.array) -> Array:
        forget_positions(model)
        cache = [batch([0, 3]) for _ in model.layers]
        model(prompt, cache=cache)
        found = [model(tokens[:, at : at + 1], cache=cache, rope_deltas=deltas[at // (COUNT // 2)]).logits for at in range(COUNT)]
        return host(mx.concatenate(found, axis=1))

    far = mx.array([[-20], [15]]), mx.array([[30], [-10]])
    theirs, unmoved = answer(*far), answer(*[mx.zeros((2, 1), mx.int32)] * 2)
    with mlx_cuda.patch():
        ours = answer(*far)
        choice, steps = mlx_cuda.explain(mlx_cuda.decode_step, model), decoding_of(model).replayed
    assert choice.engine == "replay", choice.reason
    assert steps > COUNT // 2
    for row in range(2):
        assert relative_error(ours[row], theirs[row]) < TOLERANCE
        assert relative_error(unmoved[row], theirs[row]) > 2 * TOLERANCE


@pytest.mark.parametrize("name", ROPES)
def test_a_cache_that_begins_anew_after_a_picture(rng: np.random.Generator, name: str) -> None:
    """Its first token has the first position again, whatever the picture has moved."""
    model, make_cache = model_of(name)
    given, options = prompt_with_picture(model, words(rng, 1, PROMPT), 8, 12)
    tokens = words(rng, 1, COUNT)

    def answer() -> Array:
        cache = make_cache()
        conversation(model, cache, given, tokens[:, :9], **options)
        for each in cache:
            each.trim(PROMPT + COUNT)
        return steps_of(model, cache, tokens)

    theirs = answer()
    with mlx_cuda.patch():
        ours, steps = answer(), decoding_of(model).replayed
    assert steps > COUNT // 2
    assert relative_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("name", ["mlx_vlm.llama", "mlx_vlm.qwen3_vl"])
def test_quantized_keys_and_values(rng: np.random.Generator, name: str) -> None:
    """On CUDA, mlx-vlm's own attention to them is not right: it is compared with what is not quantized."""
    model, make_cache = model_of(name)
    prompt, tokens = words(rng, 1, PROMPT), words(rng, 1, COUNT)
    theirs = conversation(model, make_cache(), prompt, tokens)
    with mlx_cuda.patch():
        forget_positions(model)
        model(prompt, cache=(cache := make_cache()))
        packed = [each.to_quantized(group_size=64, bits=8) for each in cache]
        ours = steps_of(model, packed, tokens)
        choice = mlx_cuda.explain(mlx_cuda.decode_step, model)
    assert choice.engine == "replay", choice.reason
    assert "QuantizedAttention" in choice.kernel
    assert relative_error(ours, theirs[:, 1:]) < PACKED


def best(model: Any, make_cache: Callable[[], list[Any]], prompt: mx.array, said: list[int]) -> None:
    """Each token is the best of its own prompt by the model without `patch()`, or as near to it as makes no difference."""
    forget_positions(model)
    given = mx.concatenate([prompt, mx.array(said)])[None]
    exact = host(logits_of(model(given, cache=make_cache()))[0])[0, prompt.size - 1 : -1]
    behind = exact.max(axis=1) - exact[np.arange(len(said)), said]
    assert behind.max() < 2e-2 * exact.std(), behind


@pytest.mark.parametrize("name", ["mlx_audio.llama", "mlx_audio.qwen3"])
def test_speech_models_generate(rng: np.random.Generator, name: str) -> None:
    """As its text-to-speech models do, which are such a model with other tokens."""
    generate = module("mlx_audio.lm.generate")
    model, make_cache = model_of(name, mx.float32)
    prompt = words(rng, 1, PROMPT)[0]
    with mlx_cuda.patch():
        said = [int(token) for token, _ in generate.generate_step(prompt, model, max_tokens=COUNT)]
        assert decoding_of(model).replayed > COUNT // 2, decoding_of(model).reason
    best(model, make_cache, prompt, said)


def test_a_model_of_mlx_vlm_generates(rng: np.random.Generator) -> None:
    generate, llama = module("mlx_vlm.generate.ar"), module("mlx_vlm.models.llama.llama")
    inner, make_cache = model_of("mlx_vlm.llama", mx.float32)
    model = llama.Model(inner.config)
    model.language_model = inner
    prompt = words(rng, 1, PROMPT)
    with mlx_cuda.patch():
        steps = generate.generate_step(prompt, model, None, None, max_tokens=COUNT, temperature=0.0)
        said = [int(token) for token, _ in steps]
        assert decoding_of(inner).replayed > COUNT // 2, decoding_of(inner).reason
    best(inner, make_cache, prompt[0], said)


@pytest.mark.parametrize("name", ["mlx_vlm.llama", "mlx_vlm.gemma3", "mlx_vlm.lfm2", *ROPES])
def test_requests_come_and_go(rng: np.random.Generator, name: str) -> None:
    generate = module("mlx_vlm.generate.ar")
    model, make_cache = model_of(name, mx.float32)
    prompts = [words(rng, 1, count) for count in (40, 7, 25, 33)]
    said: dict[int, list[int]] = {}
    with mlx_cuda.patch():
        generator = generate.BatchGenerator(model, Tokenizer(), stop_tokens=set(), completion_batch_size=4, prefill_batch_size=2)

        def take(count: int) -> None:
            for _ in range(count):
                for each in generator.next()[1]:
                    said[each.uid].append(each.token)

        for index, prompt in enumerate(prompts):
            forget_positions(model)
            given = [{"inputs_embeds": model.model.embed_tokens(prompt)}]
            numbers = generator.insert(prompt.tolist(), max_tokens=[COUNT - 12 * index], prompt_kwargs=given)
            said |= {number: [] for number in numbers}
            take(8)
        take(4 * COUNT)
        state = decoding_of(model)
    assert [len(said[number]) for number in sorted(said)] == [COUNT - 12 * index for index in range(4)]
    assert state.replayed > COUNT // 2, state.reason
    assert not state.errors
    for prompt, number in zip(prompts, sorted(said), strict=True):
        best(model, make_cache, prompt[0], said[number])


def test_linear_attention_of_mlx_vlm(rng: np.random.Generator) -> None:
    """Ours where its functions do what mlx-lm's do; what they do besides is left to them."""
    delta, chunks = module("mlx_vlm.models.gated_delta"), module("mlx_vlm.models.qwen3_5.gated_delta")
    q, k = (normal(rng, (2, 70, 2, 64), mx.bfloat16, 0.1) for _ in range(2))
    v = normal(rng, (2, 70, 4, 64), mx.bfloat16)
    g, beta = (mx.array(rng.uniform(0.8, 1, (2, 70, 4)).astype(np.float32)) for _ in range(2))
    state = normal(rng, (2, 4, 64, 64), mx.float32)
    own, own_chunks = delta.gated_delta_ops, chunks.gated_delta_chunked
    exact = own(*(each.astype(mx.float32) for each in (q, k, v, g, beta)), state)
    with mlx_cuda.patch():
        for ours in (delta.gated_delta_ops, chunks.gated_delta_ops, chunks.gated_delta_chunked):
            assert hasattr(ours, "unpatched")
            for one, other in zip(ours(q, k, v, g, beta, state), exact, strict=True):
                assert relative_error(one, host(other)) < 1e-2
        steps = delta.gated_delta_ops(q, k, v, g, beta, state, None, 3)
        y, last = chunks.gated_delta_chunked(q, k, v, g, beta, state)
    for one, other in zip(steps, own(q, k, v, g, beta, state, None, 3), strict=True):
        assert np.array_equal(host(one), host(other))
    assert [(each.shape, each.dtype) for each in (y, last)] == [
        (each.shape, each.dtype) for each in own_chunks(q, k, v, g, beta, state)
    ]  # fmt: skip


def test_a_masked_scan_of_mlx_vlm_is_its_own(rng: np.random.Generator) -> None:
    """Its code, of mlx-lm 0.31, has masked tokens forget, which today's does not."""
    ssm = module("mlx_vlm.models.ssm")
    x, dt = normal(rng, (1, 40, 4, 64), mx.float32), normal(rng, (1, 40, 4), mx.float32)
    b, c = (normal(rng, (1, 40, 2, 64), mx.float32, 0.1) for _ in range(2))
    log, d, bias = (normal(rng, (4,), mx.float32, 0.1) for _ in range(3))
    mask = mx.arange(40)[None] >= 5
    given = (x, log, b, c, d, dt, bias)
    own = ssm.ssm_attn
    theirs, masked = own(*given), own(*given, mask=mask)
    with mlx_cuda.patch():
        assert ssm.ssm_attn is not own
        for one, other in zip(ssm.ssm_attn(*given), theirs, strict=True):
            assert relative_error(one, host(other)) < 1e-2
        for one, other in zip(ssm.ssm_attn(*given, mask=mask), masked, strict=True):
            assert relative_error(one, host(other)) < 1e-5
