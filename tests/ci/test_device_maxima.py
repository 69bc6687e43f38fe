"""fmaxf and fminf pass NaN by: device code has nan_max instead, but where that is right."""

from __future__ import annotations

import re

from ci.matrix import REPOSITORY

PASSING_BY = {
    "attention/flash/mask_tiles.cu": "what is taken off a row of a mask: with NaN in it the row is NaN whatever that is",
    "matmul/gemv/integers.cuh": "the largest of a group of x, whose sum goes with it and is NaN",
    "decoding/append/quantized_row.cuh": "mx.quantize does so",
    "matmul/dense/epilogue.cu": "relu looks for NaN itself",
    "matmul/fp8/fp8.cu": "the largest finite magnitude",
    "recurrence/chunk_prepare.cuh": "how much of A is above 1: a chunk with NaN in it is marked for that",
}


def test_where_nan_is_passed_by() -> None:
    root = REPOSITORY / "src"
    code = {path: re.sub(r"//.*", "", path.read_text("utf-8")) for suffix in ("cu", "cuh") for path in root.rglob(f"*.{suffix}")}
    found = {path.relative_to(root).as_posix() for path, text in code.items() if re.search(r"\bf(max|min)f?\(", text)}
    assert found == set(PASSING_BY)
