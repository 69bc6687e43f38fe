"""The parts of a check that are measured with MLX alone and with :func:`mlx_cuda.patch`, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import engines, measure, plan
from .forms import Answer, Side
from .plan import Plan


def prompts_for(tokenizer: Any, plan_: Plan) -> list[list[int]]:
    """Return the prompts as tokens, in the model's chat template; of different lengths, none too long for it."""
    beginning = " ".join(plan.text().split(" ")[:400])
    prompts = []
    for question in [*plan.PROMPTS[:-1], plan.PROMPTS[-1] + beginning][: plan_.batch]:
        if getattr(tokenizer, "chat_template", None):
            tokens = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
            tokens = tokens["input_ids"] if hasattr(tokens, "keys") else tokens
        else:
            tokens = tokenizer.encode(question)
        prompts.append([int(token) for token in tokens][: plan_.prompt])
    return prompts


class Measurement:
    """The measurements of a model. ``upstream``: for the patched side, those of the other side, which say where to look."""

    def __init__(self, model: Any, tokenizer: Any, plan_: Plan, upstream: Side | None) -> None:
        self.model, self.plan, self.upstream = model, plan_, upstream
        self.patched = upstream is not None
        self.found: Side = {"passages": {}, "answers": {}, "speeds": {}, "memory": {}, "steps": [], "calls": [], "errors": {}}
        if upstream is None:
            tokens = [int(token) for token in tokenizer.encode(plan.text())]
            self.found["tokens"], self.found["prompts"] = tokens[: plan_.text + 1], prompts_for(tokenizer, plan_)
        else:
            self.found["unused"], self.found["broken"] = engines.unused(), engines.is_broken()
        self.tokens = (upstream or self.found)["tokens"]
        self.prompts = (upstream or self.found)["prompts"]

    @property
    def parts(self) -> dict[str, Callable[[], None]]:
        common = {
            "prompt": lambda: self._read("prompt", measure.read_prompt),
            "steps": lambda: self._read("steps", measure.read_steps),
            "cache": self._cache,
            "answers": self._answers,
            "speed": self._speed,
            "cache speed": self._cache_speed,
            "at once": self._at_once,
        }
        return {**common, "engines": self._engines} if self.patched else common

    def _read(self, name: str, read: Callable[..., Any], **options: Any) -> None:
        known = {} if self.upstream is None else self.upstream["passages"]
        ids = known[name]["ids"] if name in known else None
        self.found["passages"][name] = read(self.model, self.tokens, self.plan, ids, **options)

    def _cache(self) -> None:
        """MLX has no kernel for some shapes of a quantized KV cache: then its side uses the dequantized cache."""
        try:
            self._read("cache", measure.read_steps, few=measure.quantized)
        except RuntimeError as error:
            if self.patched or isinstance(error, NotImplementedError):  # mlx-lm quantizes no windows
                raise
            self._read("cache", measure.read_steps, few=measure.rounded)
            self.found["errors"]["cache"] = f"{type(error).__name__}: {error}"

    def _answers(self) -> None:
        prompts = self.prompts[: self.plan.answers]
        self.found["answers"]["answers"] = [
            measure.answer(self.model, each, self.plan.answer, leading=not self.patched) for each in prompts
        ]

    def _speed(self) -> None:
        plan_, tokens = self.plan, self.tokens
        prompt = (tokens * (plan_.prompt // len(tokens) + 1))[: plan_.prompt]
        with self._counted("one request", plan_.runs + 1, plan_.timed):
            speeds, peak = measure.peak_of(lambda: measure.speeds(self.model, prompt, plan_.timed, plan_.runs))
        self.found["memory"]["one request"] = peak
        self.found["speeds"]["prompt"], self.found["speeds"]["one request"] = speeds

    def _cache_speed(self) -> None:
        if "cache" in self.found["errors"]:
            self.found["errors"]["cache speed"] = self.found["errors"]["cache"]
            return
        options = {"kv_bits": measure.KV_BITS, "kv_group_size": measure.KV_GROUP, "quantized_kv_start": 0}
        with self._counted("8-bit KV cache", 2, self.plan.timed):
            _, self.found["speeds"]["cache"] = measure.speeds(self.model, self.tokens[: self.plan.context], self.plan.timed, 1, **options)

    def _at_once(self) -> None:
        def run(*, leading: bool) -> tuple[list[Answer], float]:
            return measure.answer_at_once(self.model, self.prompts, self.plan.answer, leading=leading)

        with self._counted(f"{len(self.prompts)} requests at once", 2, self.plan.answer):
            self.found["answers"]["at once"], _ = run(leading=not self.patched)
            (_, speed), peak = measure.peak_of(lambda: run(leading=False))
        self.found["speeds"]["at once"], self.found["memory"]["at once"] = speed, peak

    def _counted(self, where: str, runs: int, tokens: int) -> Any:
        """Each run begins with the last token of the prompt, and computes one token more than it returns."""
        return engines.counted_steps(self.model if self.patched else None, where, runs * (tokens + 1), self.found["steps"])

    def _engines(self) -> None:
        """Record the engines of prefill, and those of a decode step if none was captured."""
        with engines.captured() as calls:
            reading = measure.Reading(self.model, self.tokens, None, call=engines.unpatched_call(self.model))
            reading.skip(0, self.plan.context)
            if not any(each["replayed"] for each in self.found["steps"]):
                reading.skip(self.plan.context, self.plan.context + 1)
        self.found["calls"] = calls()
