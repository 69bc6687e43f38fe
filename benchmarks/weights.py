"""Fetched models for ``benchmarks.models``: each in some forms with its real weights, and with random ones of the same sizes beside."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .mlx_lm_parts import part

REAL, RANDOM = "real", "random"


@dataclass(frozen=True)
class Fetched:
    """A row: ``shape`` as those of ``SHAPES``, whose weights are the folder's, or random ones."""

    name: str
    shape: tuple[str, dict[str, Any]]
    folder: Path
    weights: str

    def fill(self, model: Any) -> None:
        """Load the folder's weights, in 16 bits, into a model that mlx-lm has made."""
        files = sorted(self.folder.glob("model*.safetensors"))
        loaded: dict[str, Any] = {name: weight for file in files for name, weight in mx.load(str(file)).items()}  # type: ignore[union-attr]
        model.load_weights(list((model.sanitize(loaded) if hasattr(model, "sanitize") else loaded).items()))

    def prompt(self, batch: int, length: int) -> mx.array:
        """Text of different places for each sequence, the same for both kinds of weights."""
        from tests.models.trial import text

        tokenizer = part("tokenizer_utils").load(self.folder)
        ids: list[int] = tokenizer.encode(text())
        begin = ids[:1] if ids[0] == tokenizer.bos_token_id else []
        ids = ids[len(begin) :] * (1 + length // len(ids))
        places = [index * len(ids) // batch for index in range(batch)]
        return mx.array([[*begin, *ids[at:], *ids[:at]][:length] for at in places])


def rows(named: Iterable[str], forms: Iterable[str]) -> list[Fetched]:
    """Of folders, or of models that ``python -m tests.models fetch`` has fetched."""
    from ci.errors import EnvironmentProblem
    from tests.models import places
    from tests.models.loading import FORMS

    found = []
    for name in named:
        known = places.known().get(name)
        folder = places.folder() / name if known else Path(name)
        if not (folder / "config.json").is_file():
            fix = f"python -m tests.models fetch {name}" if known else f"name a folder, or one of {', '.join(places.known())}"
            raise EnvironmentProblem(f"{folder} has no config.json", fix=fix)
        config = json.loads((folder / "config.json").read_text("utf-8"))
        if "quantization" in config:
            raise EnvironmentProblem(f"{folder} is quantized already", fix="name the model in 16 bits: its forms are made here")
        title = known.title if known else folder.resolve().name
        for form in forms:
            if form not in FORMS:
                raise EnvironmentProblem(f"unknown form {form!r}", fix=f"one of {', '.join(FORMS)}")
            own = config | ({"quantization": FORMS[form]} if FORMS[form] else {})
            shape = config["model_type"], own
            found += [Fetched(f"{title}, {form}, {weights} weights", shape, folder, weights) for weights in (REAL, RANDOM)]
    return found
