"""What a real model is tried with: each part runs it with and without ``patch()``, and gives numbers; ``judge`` says what is worse."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_cuda._check.measure import rounded

from benchmarks.mlx_lm_parts import part

from .judging import compare, near, worse, worse_curve, wrong
from .loading import in_float32, load, read
from .trial import SIDES, Answer, Trial, as_numbers, generate

QUESTIONS = (
    "What is the capital of France? Then tell me a short story about it.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Explain why the sky is blue to a child in three sentences.",
    "List the planets of the solar system in order, and one fact for each.",
    "Translate 'good morning, my friend' into Spanish, French and German.",
    "Once upon a time, there was a little fox who",
    "The three most important inventions of the nineteenth century are",
    "def quicksort(values):",
    "Dear Sir or Madam, I am writing to complain about",
    "In 1969, the first humans to walk on the Moon",
)
KV_GROUP = 64
LORA = {"rank": 8, "scale": 20.0, "dropout": 0.0}
LORA_LAYERS, RATE = 8, 1e-4


def forced(model: Any, ids: Sequence[int], lengths: Sequence[int], cache: list[Any] | None) -> mx.array:
    """The logits of given tokens, which are read in parts of these lengths, ``[tokens, vocabulary]``."""
    found, at = [], 0
    for length in lengths:
        found.append(model(mx.array([ids[at : at + length]]), cache=cache)[0])
        mx.eval(found[-1])
        at += length
    return mx.concatenate(found)


def text(trial: Trial) -> dict[str, Any]:
    """Logits of a text: of one call without a cache, of a prompt in parts, and of steps of one token after it."""
    parts, steps = trial.sizes.parts, trial.sizes.steps
    prompt = sum(parts)
    ids, lengths = trial.ids[: prompt + steps + 1], [*parts, *[1] * steps]
    after = mx.array(ids[1:])
    whole = ids[: max(parts)]

    def one_call(model: Any) -> mx.array:
        return forced(model, whole, [len(whole)], None)

    def all_calls(model: Any) -> mx.array:
        return forced(model, ids, lengths, trial.new_cache(model))

    result: dict[str, Any] = {}
    for call, places in (
        (one_call, {"one call": slice(0, len(whole))}),
        (all_calls, {"prompt": slice(0, prompt), "steps": slice(prompt, prompt + steps)}),
    ):
        exact, sides = call(trial.exact), trial.on_both(lambda call=call: call(trial.model))  # type: ignore[misc]
        for where, place in places.items():
            readings = [read(sides[side][place], exact[place], after[place]) for side in SIDES]
            result[where] = compare(read(exact[place], exact[place], after[place]).nll, *readings)
    return result | {"replayed": trial.replayed}


def alone(trial: Trial) -> dict[str, Any]:
    """Single requests: where the sides' greedy tokens part, whether that is a tie, and whose logits are nearer to float32's."""
    prompts = [trial.ask(question) for question in QUESTIONS[: trial.sizes.prompts]]
    sides = trial.on_both(lambda: [generate(trial.model, prompt, trial.sizes.answer) for prompt in prompts])
    result = trial.judged(sides)
    if "upstream" in sides:
        pairs = zip(sides["upstream"], sides["patched"], strict=True)
        result["differences"] = [as_numbers(trial.difference(*pair), trial.sizes.answer) for pair in pairs]
    result["text"] = trial.tokenizer.decode(sides["patched"][0].tokens[:40])
    return result


def at_once(trial: Trial, count: int) -> dict[str, Any]:
    """As many requests together, of which half join one after the other while others leave; some are taken away before they end."""
    chance = random.Random(count)  # noqa: S311
    longest = trial.sizes.answer
    prompts = [trial.cut(chance.randrange(len(trial.ids) // 2), chance.randint(4, 2 * longest)) for _ in range(count)]
    wanted = [chance.randint(max(1, longest // 10), longest) for _ in range(count)]
    taken_away = set(chance.sample(range(count), count // 10))

    def serve() -> list[Answer]:
        generator = part("generate").BatchGenerator(trial.model, completion_batch_size=count, prefill_batch_size=8)
        answers = [Answer(prompt, []) for prompt in prompts]
        uids: dict[int, int] = {}
        waiting, ended = list(range(count)), set[int]()
        while waiting or len(ended) < count:
            joining, waiting = (waiting[: count // 2], waiting[count // 2 :]) if not uids else (waiting[:1], waiting[1:])
            if joining:
                made = generator.insert([prompts[index] for index in joining], [wanted[index] for index in joining])
                uids.update(zip(made, joining, strict=True))
            for response in generator.next_generated():
                index = uids[response.uid]
                answers[index].tokens.append(int(response.token))
                if response.finish_reason:
                    ended.add(index)
            gone = [uid for uid, index in uids.items() if index in taken_away - ended and 2 * len(answers[index].tokens) > wanted[index]]
            if gone:
                generator.remove(gone)
                ended.update(uids[uid] for uid in gone)
        generator.close()
        return answers

    sides = trial.on_both(serve)
    result = trial.judged(sides)
    if "upstream" in sides:
        pairs = zip(sides["upstream"], sides["patched"], strict=True)
        result["answers of equal tokens"] = sum(one.tokens == other.tokens for one, other in pairs)
    return result


def saved(trial: Trial) -> dict[str, Any]:
    """A conversation whose cache is saved and loaded, and goes on; and on from the cache that was saved."""
    parts = part("models.cache")
    prompt, rest = trial.cut(0, trial.sizes.long), trial.cut(5000, 7)[len(trial.begin) :]
    same: list[bool] = []

    def talk() -> list[Answer]:
        cache = trial.new_cache()
        first = generate(trial.model, prompt, 30, prompt_cache=cache)
        held = [*first.prompt, *first.tokens][: cache[0].offset]
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "cache.safetensors"))
            parts.save_prompt_cache(file, cache)
            caches = [parts.load_prompt_cache(file), cache]
            found = [generate(trial.model, rest, trial.sizes.answer, prompt_cache=each) for each in caches]
        same.append(found[0].tokens == found[1].tokens)
        return [first, *(Answer([*held, *rest], each.tokens, each.logits) for each in found)]

    result = trial.judged(trial.on_both(talk))
    return result | {"loaded and kept caches go on alike": same[-1]}


def drafts(trial: Trial) -> dict[str, Any]:
    """A copy of 4 bit drafts tokens that the model takes or refuses, after a short prompt and after one beyond the windows."""
    draft, _ = load(trial.folder, "4 bit")
    prompts = [trial.ask(QUESTIONS[0]), trial.cut(300, trial.sizes.long)]
    taken: list[int] = []

    def generated() -> list[Answer]:
        found = []
        for prompt in prompts:
            options = {"num_draft_tokens": 3, "max_tokens": trial.sizes.answer}
            steps = list(part("generate").speculative_generate_step(mx.array(prompt, mx.uint32), trial.model, draft, **options))
            found.append(Answer(prompt, [int(step[0]) for step in steps]))
            taken.append(sum(bool(step[2]) for step in steps))
        return found

    result = trial.judged(trial.on_both(generated, steps_of=draft))
    return result | {"drafted tokens taken": taken[-len(prompts) :]}


def _quantized(cache: list[Any], bits: int, group_size: int) -> list[Any]:
    """Rows of few bits where mlx-lm has them: it has none for windows."""

    def quantized(rows: Any) -> Any:
        try:
            return rows.to_quantized(group_size=group_size, bits=bits)
        except NotImplementedError:
            return rows

    return list(map(quantized, cache))


def kv(trial: Trial) -> dict[str, Any]:
    """Keys and values of 8 and 4 bit after a prompt. mlx-lm's own attention to them does not work everywhere: where it fails, or gives
    other tokens, upstream's side attends to the same values in 16 bits.
    """
    prompt, steps = max(trial.sizes.parts), trial.sizes.steps
    ids = trial.ids[: prompt + steps + 1]
    after = mx.array(ids[prompt + 1 :])

    def run(model: Any, few: Callable[[list[Any], int, int], list[Any]], bits: int) -> mx.array:
        cache = trial.new_cache(model)
        forced(model, ids, [prompt], cache)
        return forced(model, ids[prompt:-1], [1] * steps, few(cache, bits, KV_GROUP))

    result: dict[str, Any] = {}
    for bits in (8, 4):
        exact, upstream = run(trial.exact, rounded, bits), run(trial.model, rounded, bits)
        sides = trial.on_both(lambda bits=bits: run(trial.model, _quantized, bits))  # type: ignore[misc]
        held, patched = (read(each, exact, after) for each in (upstream, sides["patched"]))
        own = read(sides["upstream"], exact, after) if "upstream" in sides else None
        works = own is not None and not wrong(own, near(held))
        found = compare(read(exact, exact, after).nll, own if own and works else held, patched)
        said = "" if works else trial.upstream_failed or "has wrong tokens"
        result[f"{bits} bit"] = found | {"mlx-lm's own attention fails": said, "replayed": trial.replayed}
    return result


def training(trial: Trial) -> dict[str, Any]:
    """LoRA by mlx-lm's trainer: the losses of each step, in float32 and of both sides, and the tokens that they train on in a second."""
    sizes = trial.sizes
    rows = [(trial.cut(at * sizes.length, sizes.length), 0) for at in range(sizes.rows * 12)]

    def trained(*, exact: bool = False) -> tuple[list[float], float]:
        model = load(trial.folder, trial.form)[0]
        return _trained(in_float32(trial.folder, model) if exact else model, rows, sizes.trained, sizes.rows)

    made = {"float32": trained(exact=True), **trial.on_both(trained)}
    losses, speeds = ({side: each[index] for side, each in made.items()} for index in (0, 1))
    return {"losses": losses, "tokens/s": speeds, **({"upstream failed": trial.upstream_failed} if trial.upstream_failed else {})}


def _trained(model: Any, rows: list[tuple[list[int], int]], steps: int, batch: int) -> tuple[list[float], float]:
    import numpy as np
    from mlx.optimizers import Adam

    trainer = part("tuner.trainer")

    mx.random.seed(0)  # which the adapters begin with
    np.random.seed(0)
    model.freeze()
    part("tuner.utils").linear_to_lora_layers(model, LORA_LAYERS, LORA)
    told: list[dict[str, float]] = []

    class Told(part("tuner.callbacks").TrainingCallback):  # type: ignore[misc]
        def on_train_loss_report(self, train_info: dict[str, float]) -> None:
            told.append(train_info)

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "adapters.safetensors"))
        options = trainer.TrainingArgs(batch_size=batch, iters=steps, steps_per_report=1, steps_per_save=10 * steps, adapter_file=file)
        trainer.train(model, Adam(learning_rate=RATE), rows, args=options, training_callback=Told())
    return [each["train_loss"] for each in told], statistics.median(each["tokens_per_second"] for each in told)


PARTS: dict[str, Callable[[Trial], dict[str, Any]]] = {
    "text": text,
    "alone": alone,
    "20 at once": lambda trial: at_once(trial, 20),
    "100 at once": lambda trial: at_once(trial, 100),
    "saved": saved,
    "drafts": drafts,
    "kv": kv,
    "training": training,
}
CAPTURED = ("text", "alone", "20 at once", "100 at once", "saved", "drafts")  # parts whose steps a GPU replays


def judge(part: str, result: dict[str, Any]) -> list[str]:
    """In what the patched model is worse than it may be; nothing where it is not."""
    if part == "training":
        losses = result["losses"]
        return worse_curve(losses["float32"], losses.get("upstream", losses["float32"]), losses["patched"])
    if part in {"text", "kv"}:
        places = {name: each for name, each in result.items() if isinstance(each, dict)}
        return [f"{name}: {reason}" for name, each in places.items() for reason in worse(each)]
    count = result["wrong tokens"]["patched"]
    found = [f"{count} of {result['tokens']['patched']} tokens are not float32's best, and no ties"] if count else []
    if result.get("loaded and kept caches go on alike") is False:
        found.append("a cache that was loaded goes on otherwise than the one that was saved")
    return found
