"""A stand-in for the models that mlx-lm's tests load from a hub: ``python model.py FOLDER`` makes a small one with random weights.

Its tokens are bytes, in the order of GPT-2's, as Qwen's begin. Logits lie far apart, so that few of the most likely tokens are ties.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HUB_NAME = re.compile(r'"(mlx-community/[\w.-]+)"')  # as they stand in mlx-lm's tests
REVISION = "0" * 40
CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e6,
    "tie_word_embeddings": False, "eos_token_id": 258, "bos_token_id": 256,
}  # fmt: skip
QUANTIZATION = {"group_size": 64, "bits": 4}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Write a model and its tokenizer, as mlx-lm loads them."""
    import importlib

    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten

    mx.set_default_device(mx.Device(mx.cpu, 0))  # the same weights on every machine
    module: Any = importlib.import_module("mlx_lm.models.qwen2")
    model = module.Model(module.ModelArgs.from_dict(CONFIG))
    chance = np.random.default_rng(0)
    weights: dict[str, mx.array] = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, like in parameters:
        if like.ndim < 2:
            weights[name] = mx.full(like.shape, float("norm" in name), mx.float16)
            continue
        scale = 1.0 if "embed_tokens" in name else 0.35 if "lm_head" in name else 0.06
        drawn = mx.array((chance.standard_normal(like.shape) * scale).astype(np.float16))
        parts = mx.quantize(drawn, group_size=QUANTIZATION["group_size"], bits=QUANTIZATION["bits"])
        weights |= {name.replace("weight", part): array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization": QUANTIZATION}), "utf-8")
    make_tokenizer(folder)


def make_tokenizer(folder: Path) -> None:
    import importlib

    tokenizers: Any = importlib.import_module("tokenizers")
    every = [
        *range(ord("!"), ord("~") + 1),
        *range(0xA1, 0xAD),
        *range(0xAE, 0x100),
    ]  # GPT-2's: those that can be seen, and then the others
    letters = [chr(each) for each in every] + [chr(0x100 + number) for number in range(256 - len(every))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={each: number for number, each in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def hub(folder: Path, tests: Path, model: Path | None) -> dict[str, str]:
    """A hub's cache with a model in the place of all that the tests name, and the variables by which it is found."""
    if model is None:
        model = folder / "model"
        subprocess.run([sys.executable, __file__, str(model)], check=True)
    names = {name for path in tests.glob("*.py") for name in HUB_NAME.findall(path.read_text("utf-8"))}
    for name in sorted(names):
        place = folder / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text(REVISION, "utf-8")
        (place / "snapshots").mkdir()
        (place / "snapshots" / REVISION).symlink_to(model.resolve(), target_is_directory=True)
    return {"HF_HUB_CACHE": str(folder)}


if __name__ == "__main__":
    make(Path(sys.argv[1]))
