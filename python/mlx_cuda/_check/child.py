"""One process of a check: it loads the model, measures its side, and prints the results as JSON."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .forms import Side, Task
from .plan import plan_for
from .processes import CannotLoad


def main(task: Task) -> None:
    """Run the task; output of libraries goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def say(**message: Any) -> None:
            print(json.dumps(message), file=out, flush=True)

        try:
            say(found=run(task, lambda name: say(part=name)))
        except CannotLoad as error:
            say(cannot_load=str(error))


def run(task: Task, begin: Callable[[str], None]) -> Side:
    """Measure one side. ``begin`` is called before each part; a part that fails is reported, and the others still run."""
    begin("load")
    if task["side"] == "patched":
        importlib.import_module(str(__package__).partition(".")[0]).patch()
    model, tokenizer = load(task)
    side = _side(model, tokenizer, task)
    for name, measure in side.parts.items():
        begin(name)
        try:
            measure()
        except Exception as error:
            side.found["errors"][name] = f"{type(error).__name__}: {error}"
    found: Side = side.found
    return found


def _side(model: Any, tokenizer: Any, task: Task) -> Any:
    plan = plan_for(model, quick=task["quick"])
    if task["side"] == "float32":
        from .reference import Reference

        return Reference(model, plan, task["upstream"], task["patched"])
    from .side import Measurement

    side = Measurement(model, tokenizer, plan, task["upstream"] if task["side"] == "patched" else None)
    side.found["about"] = about(model)
    side.found["folder"] = str(getattr(tokenizer, "name_or_path", ""))
    return side


def load(task: Task) -> tuple[Any, Any]:
    """Load the model, and for the first side its tokenizer: the other sides get its tokens and its folder."""
    folder = Path(task["upstream"].get("folder", ""))
    try:
        if folder.name and folder.is_dir():
            return importlib.import_module("mlx_lm.utils").load_model(folder)[0], None
        model, tokenizer = importlib.import_module("mlx_lm").load(task["model"])[:2]
    except Exception as error:  # of the folder, the network, a library or the memory: mlx-lm has none of its own
        raise CannotLoad(f"{type(error).__name__}: {error}") from error
    return model, tokenizer


def about(model: Any) -> dict[str, str]:
    """Return the versions, the device and the kind of the model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from .._common.choice import dtype_name
    from .._version import __version__

    weights: Any = tree_flatten(model.parameters())
    dtypes = {dtype_name(array.dtype) for _, array in weights}
    bits = sorted({f"{each.bits} bit ({getattr(each, 'mode', 'affine')})" for each in model.modules() if hasattr(each, "bits")})
    return {
        "mlx-cuda": __version__,
        "mlx": importlib.metadata.version("mlx"),
        "mlx-lm": importlib.metadata.version("mlx-lm"),
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "model type": str(getattr(model, "model_type", "") or type(model).__module__.rpartition(".")[2]),
        "weights": ", ".join([*bits, *(name for name in ("bfloat16", "float16", "float32") if name in dtypes)]),
    }
