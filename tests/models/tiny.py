"""GGUFs of small models with random weights, and the weights that they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .vocabulary import CONTROL, NORMAL, SPACE, USER_DEFINED

Weights = dict[str, NDArray[np.float32]]

SIZE, HIDDEN, HEADS, KV_HEADS, DIM, WINDOW = 256, 192, 4, 2, 64, 64
LAYERS = 6  # of which the last one of Gemma's sees all tokens
UNKNOWN, BYTE = 2, 6  # kinds of a GGUF's tokens
BEGIN, END = "<|begin|>", "<|end|>"


def byte_characters() -> list[str]:
    """How BPE of bytes writes each of them: printable ones as they are, the others as characters from 256 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


def of_bytes() -> dict[str, Any]:
    """A tokenizer as SmolLM2's."""
    tokens = [BEGIN, END, *byte_characters(), "Ġt", "he", "Ġthe"]
    kinds = [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2)
    return {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": kinds, "merges": ["Ġ t", "h e", "Ġt he"],
        "bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 1, "unknown_token_id": 0, "add_bos_token": False,
    }  # fmt: skip


def of_pieces() -> dict[str, Any]:
    """A tokenizer as Gemma's: pieces with scores, the best first."""
    special, own = ["<pad>", "<eos>", "<bos>", "<unk>"], ["\n", "\n\n", "  "]
    pieces = [f"{SPACE}t", "he", f"{SPACE}the", SPACE, *(chr(code) for code in range(33, 127))]
    tokens = [*special, *own, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[USER_DEFINED] * len(own), *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [-1000.0] * 7 + [0.0] * 256 + [-float(rank) for rank in range(len(pieces))]
    return {
        "model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 2, "eos_token_id": 1,
        "padding_token_id": 0, "unknown_token_id": 3, "add_bos_token": True, "add_space_prefix": False,
    }  # fmt: skip


def weights(vocabulary: int, *, gemma: bool) -> Weights:
    """By mlx-lm's names, and as mlx-lm has them."""
    rng = np.random.default_rng(5)
    shapes = {"embed_tokens": (vocabulary, SIZE), "norm": (SIZE,)}
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HEADS * DIM, SIZE), "self_attn.k_proj": (KV_HEADS * DIM, SIZE), "self_attn.v_proj": (KV_HEADS * DIM, SIZE),
        "self_attn.o_proj": (SIZE, HEADS * DIM), "mlp.gate_proj": (HIDDEN, SIZE), "mlp.up_proj": (HIDDEN, SIZE),
        "mlp.down_proj": (SIZE, HIDDEN), "input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,),
    }  # fmt: skip
    if gemma:
        layer |= {"pre_feedforward_layernorm": (SIZE,), "post_feedforward_layernorm": (SIZE,)}
        layer |= {"self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,)}
    shapes |= {f"layers.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}
    about = 0.0 if gemma else 1.0  # what norms lie around

    def draw(shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = rng.standard_normal(shape, np.float32)
        result: NDArray[np.float32] = (
            values / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else np.float32(about) + values / np.float32(8)
        )
        return result

    return {f"model.{name}.weight": draw(shape) for name, shape in shapes.items()}


def interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of each head as a GGUF of Llama's kind has them: halves taken in turn."""
    result: NDArray[np.float32] = weight.reshape(heads, 2, DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)
    return result


def write(file: Path, *, gemma: bool = False, quantized: bool = False) -> Weights:
    """A GGUF of a model, whose weights by mlx-lm's names are returned. ``quantized``: matrices are of 8 bit there."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    from .convert import ARCHITECTURES, OUTER

    kind, fields = ("gemma3", of_pieces()) if gemma else ("llama", of_bytes())
    given = weights(len(fields["tokens"]), gemma=gemma)
    writer: Any = GGUFWriter(file, kind)
    writer.add_context_length(4096)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if gemma:
        writer.add_key_length(DIM)
        writer.add_sliding_window(WINDOW)
    for name, value in fields.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(f"tokenizer.ggml.{name}", value)
    names = {mine: theirs for theirs, mine in {**OUTER, **ARCHITECTURES[kind].names}.items()}
    for name, weight in given.items():
        index, _, inner = name.removeprefix("model.").removesuffix(".weight").removeprefix("layers.").partition(".")
        theirs = f"blk.{index}.{names[inner]}" if inner else names[index]
        stored = weight + 1 if gemma and weight.ndim == 1 else weight
        if not gemma and names[inner or index] in {"attn_q", "attn_k"}:
            stored = interleaved(stored, HEADS if names[inner] == "attn_q" else KV_HEADS)
        if quantized and weight.ndim > 1:
            packed = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{theirs}.weight", quantize(stored, packed), raw_dtype=packed)
        else:
            writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return given
