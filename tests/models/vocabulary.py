"""A GGUF's tokenizer as the files that transformers and mlx-lm read: ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # kinds of a GGUF's tokens
SPACE = "\u2581"  # as SentencePiece writes it
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# By a GGUF's name of how text is cut before pairs are merged.
CUTS: dict[str, list[dict[str, Any]]] = {"smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}


def ranked_pairs(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> Iterator[tuple[str, str]]:
    """The pairs that BPE merges, best first: SentencePiece says only how good a piece is, whichever two it is made of."""
    pieces = [index for index, kind in enumerate(kinds) if kind == NORMAL]
    there = {tokens[index] for index in pieces}
    for index in sorted(pieces, key=lambda index: -scores[index]):
        piece = tokens[index]
        for cut in range(1, len(piece)):
            if piece[:cut] in there and piece[cut:] in there:
                yield piece[:cut], piece[cut:]


def tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer.json`` for a GGUF's fields, which are named without ``tokenizer.ggml.``."""
    tokens, kinds = fields["tokens"], fields["token_type"]
    kind = fields["model"]
    if kind == "gpt2" and fields.get("pre") in CUTS:
        pairs: Any = (pair.split(" ") for pair in fields["merges"])
        normalizer, cut, decoder = None, {"type": "Sequence", "pretokenizers": CUTS[fields["pre"]]}, BYTE_LEVEL
    elif kind == "llama" and not fields.get("add_space_prefix", True):
        pairs = ranked_pairs(tokens, fields["scores"], kinds)
        normalizer, cut = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}, None
        spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        decoder = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    else:
        raise ValueError(f"[tokenizer] Only the kinds of SmolLM2 and Gemma 3 are known, got {kind!r} cut as {fields.get('pre')!r}")
    in_bytes = kind == "llama"
    unknown = fields.get("unknown_token_id")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": index, "content": tokens[index], **flags, "special": kinds[index] == CONTROL}
            for index in range(len(tokens))
            if kinds[index] in {CONTROL, USER_DEFINED}
        ],
        "normalizer": normalizer, "pre_tokenizer": cut, "post_processor": _begin(fields), "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": tokens[unknown] if in_bytes and unknown is not None else None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": in_bytes, "byte_fallback": in_bytes,
            "ignore_merges": False, "vocab": {token: index for index, token in enumerate(tokens)}, "merges": [list(pair) for pair in pairs],
        },
    }  # fmt: skip


def _begin(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What puts the first token before a text, where the model wants one."""
    if not fields.get("add_bos_token"):
        return None
    index = fields["bos_token_id"]
    token, text = fields["tokens"][index], {"Sequence": {"id": "A", "type_id": 0}}
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def tokenizer_config(fields: Mapping[str, Any], template: str | None) -> dict[str, Any]:
    roles = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{role}_token": fields["tokens"][fields[name]] for role, name in roles.items() if name in fields}
    return config | ({"chat_template": template} if template else {})
