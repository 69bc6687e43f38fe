"""mlx-lm's own generation over captured steps: its caches are cut, copied, saved and loaded, and tokens are those that float32 wants.

Logits of random weights lie close together, so a token is compared where float32 separates the two best by more than MLX's own error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_cuda._mlx_lm import caches
from mlx_cuda._mlx_lm.models import decoding_of
from mlx_cuda._patch import _unpatched

from . import mlx_lm_parts
from .mlx_lm_parts import Tokenizer, make_model, part, wide
from .reference import Array
from .support import host, relative_error
from .test_linear_models import COMMON, LINEAR

pytestmark = pytest.mark.gpu

COUNT = 512
TOLERANCE = 6e-2  # of logits in bfloat16 after two layers
FEWEST_SEPARATED = 0.4
SAMPLERS: dict[str, dict[str, float]] = {
    "temperature": {"temp": 0.8},
    "top p": {"temp": 0.8, "top_p": 0.9},
    "top k": {"temp": 1.0, "top_k": 20},
    "min p": {"temp": 1.0, "min_p": 0.05},
    "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
}


def mlx_lm(name: str) -> Any:
    try:
        return part(name)
    except ImportError as error:
        pytest.skip(f"mlx_lm.{name} cannot be imported: {error}")


@pytest.fixture(autouse=True)
def _patched_with_small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mlx_lm("generate")
    monkeypatch.setattr(caches, "LEAST_CAPACITY", 256)
    monkeypatch.setattr(caches, "HEADROOM", 16)
    with mlx_cuda.patch():
        yield


def words(rng: np.random.Generator, count: int) -> mx.array:
    return mx.array(rng.integers(0, 512, count), mx.uint32)


def tokens_of(steps: Iterator[tuple[Any, ...]]) -> list[int]:
    return [int(step[0]) for step in steps]


def greedy(model: Any, prompt: mx.array, count: int = COUNT, **options: Any) -> list[int]:
    return tokens_of(mlx_lm("generate").generate_step(prompt, model, max_tokens=count, **options))


def replayed(model: Any) -> int:
    return decoding_of(model).replayed


def logits_after(model: Any, prompt: mx.array, tokens: list[int], size: int | None) -> Array:
    """The model's own logits before each of these tokens, one step after another."""
    cache = mlx_lm("models.cache").make_prompt_cache(model, size)
    rest = [*prompt.tolist(), *tokens]  # type: ignore[misc]
    found = []
    with _unpatched():
        function = getattr(type(model).__call__, "unpatched", type(model).__call__)
        if prompt.size > 1:
            function(model, prompt[None, :-1], cache=cache)
        for index in range(prompt.size - 1, len(rest) - 1):
            found.append(function(model, mx.array([[rest[index]]]), cache=cache)[:, -1])
            mx.async_eval(found[-1])  # type: ignore[no-untyped-call]
        return host(mx.concatenate(found))


def check(model: Any, prompt: mx.array, tokens: list[int], size: int | None = None) -> None:
    """These are the best tokens wherever float32 says clearly which one that is.

    mlx-lm chooses by logarithms of probability in the model's dtype: those of bfloat16 are 1/32 apart from 4 to 8, and of equal ones it
    takes the first.
    """
    exact, own = (logits_after(each, prompt, tokens, size) for each in (wide(model), model))
    best = np.sort(exact, axis=1)[:, -2:]
    gap, error = best[:, 1] - best[:, 0], np.abs(own - exact).max()
    logprobs = np.maximum(np.log(np.exp(exact - best[:, 1:]).sum(axis=1)), _epsilon(model))
    spacing = _epsilon(model) * 2 ** np.floor(np.log2(logprobs))
    separated = gap > 2 * error + spacing
    assert np.mean(separated) >= FEWEST_SEPARATED
    wrong = np.flatnonzero(separated & (np.array(tokens) != exact.argmax(axis=1)))
    assert not wrong.size, f"tokens {wrong} are not the best by {gap[wrong]}, where MLX's own logits are off by {error} at most"


def _epsilon(model: Any) -> float:
    """That of the numbers that it computes with."""
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return float(mx.finfo(next(each.dtype for each in weights.values() if mx.issubdtype(each.dtype, mx.floating))).eps)


def with_windows() -> Any:
    """A model whose first two layers see 64 tokens."""
    mlx_lm("models.gemma3_text")
    model = mlx_lm_parts.with_windows(64)
    model.set_dtype(mx.float16)  # which separates more tokens
    mx.eval(model.parameters())
    return model


def with_linear_attention() -> Any:
    """A model with states in two of its four layers."""
    module = mlx_lm("models.qwen3_5")
    mx.random.seed(3)
    config = {**COMMON, **LINEAR, "full_attention_interval": 2}
    model = module.Model(module.ModelArgs.from_dict({"model_type": "qwen3_5", **config}))
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: make_model(3), lambda: make_model(3, 4), with_windows, with_linear_attention],
    ids=["bfloat16", "4 bit", "windows", "linear attention"],
)
def test_requests_that_come_and_go(rng: np.random.Generator, make: Callable[[], Any]) -> None:
    """Each has the tokens of its own prompt, whoever else is in the batch; what one has said goes on alone."""
    model = make()
    generator = mlx_lm("generate").BatchGenerator(model, completion_batch_size=8, prefill_batch_size=3)
    prompts = [words(rng, count) for count in (30, 1, 90, 17, 64, 200, 5, 41)]
    wanted = [70, 20, 130, 9, 50, 40, 64, 90]
    said: dict[int, list[int]] = {}
    left: dict[int, list[Any]] = {}
    cancelled = 4
    for turn in range(400):
        if turn % 9 == 0 and turn // 9 < len(prompts):
            (number,) = generator.insert([prompts[turn // 9].tolist()], max_tokens=[wanted[turn // 9]])
            said[number] = []
        for response in generator.next_generated() if said else []:
            said[response.uid].append(response.token)
            if response.finish_reason:
                left[response.uid] = response.prompt_cache
        if turn == 60:
            generator.remove([cancelled])
    assert left.keys() == said.keys() - {cancelled}
    for number, tokens in said.items():
        assert number == cancelled or len(tokens) == wanted[number]
        check(model, prompts[number], tokens)
    batches = decoding_of(model).batches
    assert not decoding_of(model).errors
    assert {session.batch for session in batches.sessions} == {1, 2, 4, 8}
    assert replayed(model) > 150
    if all(each.is_trimmable() for each in left[7]):
        assert {each.trim(1) for each in left[7]} == {1}
        more = greedy(model, mx.array(said[7][-1:]), 30, prompt_cache=left[7])
        check(model, prompts[7], [*said[7], *more])
    left.clear()
    del response  # which holds the last one's cache
    generator.remove(list(said))
    assert batches.pool is not None
    assert len(batches.pool.regions[0].free) == batches.pool.regions[0].count - 1


@pytest.mark.parametrize("size", [None, 128], ids=["growing", "rotating"])
@pytest.mark.parametrize("bits", [None, 4])
def test_generate_step(rng: np.random.Generator, bits: int | None, size: int | None) -> None:
    model, prompt = make_model(0, bits), words(rng, 40)
    tokens = greedy(model, prompt, max_kv_size=size)
    assert replayed(model) > COUNT - 20
    check(model, prompt, tokens, size)


def test_a_prompt_of_one_token_after_another_conversation(rng: np.random.Generator) -> None:
    model = make_model(0)
    greedy(model, words(rng, 10), 20)
    prompt = words(rng, 1)
    check(model, prompt, greedy(model, prompt, 60))


@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
def test_samplers(rng: np.random.Generator, options: dict[str, Any]) -> None:
    generate, sampling = mlx_lm("generate"), mlx_lm("sample_utils")
    model, prompt = make_model(0), words(rng, 20)
    random: Any = mx.random.state
    found: list[tuple[list[int], mx.array, mx.array]] = []
    for _ in range(3):
        mx.random.seed(7)
        steps = list(generate.generate_step(prompt, model, max_tokens=128, sampler=sampling.make_sampler(**options)))
        found.append(([int(step[0]) for step in steps], mx.stack([step[1] for step in steps]), mx.array(random[0])))
    assert replayed(model) > 300
    (_, _, _), (tokens, logits, key), (again, same, same_key) = found  # the first of them records
    assert tokens == again
    assert mx.array_equal(logits, same).item()
    assert mx.array_equal(key, same_key).item()
    exact = mx.array(logits_after(wide(model), prompt, tokens, None))
    assert relative_error(logits, host(exact - mx.logsumexp(exact, axis=1, keepdims=True))) < TOLERANCE
    mlx_cuda.unpatch()
    mx.random.seed(7)
    list(generate.generate_step(prompt, model, max_tokens=128, sampler=sampling.make_sampler(**options)))
    assert mx.array_equal(mx.array(random[0]), key).item()  # nothing else has drawn numbers


def test_logits_processors(rng: np.random.Generator) -> None:
    """What looks at all tokens so far is given them."""
    model, prompt = make_model(0), words(rng, 20)
    seen: list[int] = []

    def count(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.size)
        return logits

    check(model, prompt, greedy(model, prompt, 100, logits_processors=[count]))
    assert seen == list(range(20, 20 + len(seen)))
    assert replayed(model) > 80


def test_stream_generate(rng: np.random.Generator) -> None:
    model, prompt = make_model(0), words(rng, 20)
    wrapper = mlx_lm("tokenizer_utils").TokenizerWrapper(Tokenizer())
    found = []
    for _ in range(3):
        responses = list(mlx_lm("generate").stream_generate(model, wrapper, prompt.tolist(), max_tokens=200))
        assert "".join(response.text for response in responses).split() == [str(response.token) for response in responses]
        found.append([response.token for response in responses])
    assert replayed(model) > 500
    assert found[1] == found[2]
    check(model, prompt, found[0])
    check(model, prompt, found[1])


@pytest.mark.parametrize("alike", [False, True], ids=["another model", "the same model"])
def test_speculative_decoding(rng: np.random.Generator, alike: bool) -> None:
    """Drafts are steps of one token that are taken back, where the model wants others."""
    model, prompt = make_model(0), words(rng, 30)
    draft = make_model(0) if alike else make_model(1, num_hidden_layers=1)
    steps = list(mlx_lm("generate").speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=COUNT))
    accepted = sum(step[2] for step in steps)
    assert accepted > COUNT / 2 if alike else accepted < COUNT / 2
    assert replayed(draft) > 100
    check(model, prompt, tokens_of(iter(steps)))


@pytest.mark.parametrize("alike", [False, True], ids=["another model", "the same model"])
def test_speculative_decoding_with_full_windows(rng: np.random.Generator, alike: bool) -> None:
    """mlx-lm 0.32.2 leaves in such caches what the model does not confirm, and gives other tokens."""
    model, prompt = with_windows(), words(rng, 100)
    draft = with_windows() if alike else make_model(1, num_hidden_layers=1)
    steps = list(mlx_lm("generate").speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=COUNT))
    check(model, prompt, tokens_of(iter(steps)))


def prompt_cache(model: Any) -> Any:
    return mlx_lm("models.cache").make_prompt_cache(model)


def test_a_cache_that_was_saved_and_loaded(rng: np.random.Generator, tmp_path: Path) -> None:
    parts = mlx_lm("models.cache")
    model, prompt, cache = make_model(0), words(rng, 30), prompt_cache(make_model(0))
    first = greedy(model, prompt, 100, prompt_cache=cache)
    parts.save_prompt_cache(str(tmp_path / "cache.safetensors"), cache, {"of": "test"})
    held = cache[0].offset - prompt.size  # of the tokens: one more than were asked for may be under way
    rest = mx.array(words(rng, 5))
    whole = mx.concatenate([prompt, mx.array(first[:held], mx.uint32), rest])
    for _ in range(2):
        loaded, metadata = parts.load_prompt_cache(str(tmp_path / "cache.safetensors"), return_metadata=True)
        assert metadata == {"of": "test"}
        assert [each.offset for each in loaded] == [each.offset for each in cache]
        check(model, whole, greedy(model, rest, 100, prompt_cache=loaded))
    check(model, whole, greedy(model, rest, 100, prompt_cache=cache))  # which goes on as well


def test_a_cache_that_was_trimmed(rng: np.random.Generator) -> None:
    parts = mlx_lm("models.cache")
    model, prompt = make_model(0), words(rng, 30)
    cache = prompt_cache(model)
    kept = greedy(model, prompt, 150, prompt_cache=cache)
    for many in (40, 1, 60):
        assert parts.trim_prompt_cache(cache, many) == many
        before = mx.concatenate([prompt, mx.array(kept, mx.uint32)])[: cache[0].offset]
        rest = words(rng, 2)
        prompt, kept = mx.concatenate([before, rest]), greedy(model, rest, 70, prompt_cache=cache)
        check(model, prompt, kept)
    assert replayed(model) > 250


def test_copies_of_a_cache_for_several_conversations(rng: np.random.Generator) -> None:
    """``LRUPromptCache`` gives copies of what it holds, cut where they are longer, while others go on with theirs."""
    parts = mlx_lm("models.cache")
    model, common = make_model(0), words(rng, 50)
    memory = parts.LRUPromptCache(max_size=4)
    cache = prompt_cache(model)
    tokens = greedy(model, common, 80, prompt_cache=cache)
    held = [*common.tolist(), *tokens][: cache[0].offset]  # type: ignore[misc]
    memory.insert_cache("model", held, cache)
    del cache
    more: Any = words(rng, 4).tolist()
    prompts = [held + more, held[:70] + more[::-1], held[: common.size], held + more[:1]]
    running: list[tuple[mx.array, Any, list[int]]] = []
    for prompt in prompts:
        copied, rest = memory.fetch_nearest_cache("model", prompt)
        assert copied is not None
        assert 0 < len(rest) <= 4
        steps = mlx_lm("generate").generate_step(mx.array(rest, mx.uint32), model, max_tokens=60, prompt_cache=copied)
        running.append((mx.array(prompt, mx.uint32), steps, []))
    for _ in range(60):  # in turn
        for _, steps, found in running:
            found.append(int(next(steps)[0]))
    for prompt, _, found in running:
        check(model, prompt, found)
    again, _ = memory.fetch_nearest_cache("model", held)
    steps = mlx_lm("generate").generate_step(words(rng, 3), model, max_tokens=3, prompt_cache=again)
    assert len(list(itertools.islice(steps, 3))) == 3


@pytest.mark.parametrize("change", ["weights", "layer"])
def test_weights_that_change_between_generations(rng: np.random.Generator, change: str) -> None:
    model, prompt = make_model(0), words(rng, 20)
    greedy(model, prompt, 40)
    if change == "weights":
        model.model.layers[1].mlp.down_proj.weight = model.model.layers[1].mlp.down_proj.weight * 3
    else:
        model.model.layers[0] = make_model(5).model.layers[0]
    check(model, prompt, greedy(model, prompt, 100))
    assert replayed(model) > 80


def batched(model: Any, prompts: list[mx.array], count: int, caches: Any = None) -> tuple[list[list[int]], list[Any]]:
    """Tokens of requests at once, and the caches that they leave behind."""
    generator = mlx_lm("generate").BatchGenerator(model, completion_batch_size=8, prefill_batch_size=8)
    numbers = generator.insert([prompt.tolist() for prompt in prompts], max_tokens=[count] * len(prompts), caches=caches)
    said: dict[int, list[int]] = {number: [] for number in numbers}
    left: dict[int, Any] = {}
    while len(left) < len(numbers):
        for response in generator.next_generated():
            said[response.uid].append(response.token)
            if response.finish_reason:
                left[response.uid] = response.prompt_cache
    return [said[number] for number in numbers], [left[number] for number in numbers]


@pytest.mark.parametrize("make", [lambda: make_model(3), with_windows], ids=["bfloat16", "windows"])
def test_caches_that_were_left_go_on_together(rng: np.random.Generator, make: Callable[[], Any]) -> None:
    model, prompts = make(), [words(rng, count) for count in (30, 5, 71)]
    said, left = batched(model, prompts, 40)
    assert replayed(model) > 20
    before, ends = replayed(model), [words(rng, count) for count in (9, 1, 20)]
    more, _ = batched(model, ends, 40, left)
    assert replayed(model) > before + 20
    for prompt, first, end, rest in zip(prompts, said, ends, more, strict=True):
        check(model, mx.concatenate([prompt, mx.array(first, mx.uint32), end]), rest)


def test_weights_that_the_host_has_read_between_batches(rng: np.random.Generator) -> None:
    """They lie elsewhere then, and what was captured of where they lay is not replayed."""
    model, prompts = make_model(0), [words(rng, count) for count in (20, 33)]
    batched(model, prompts, 20)
    arrays = list(dict(tree_flatten(model.parameters())).values())
    for array in arrays:
        np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    noise = [mx.full((1 << n,), np.nan) for n in range(8, 22) for _ in range(4)]
    mx.eval(noise)
    said, _ = batched(model, prompts, 60)
    for prompt, tokens in zip(prompts, said, strict=True):
        check(model, prompt, tokens)
