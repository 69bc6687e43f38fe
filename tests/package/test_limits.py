"""Dispatch thresholds: by the data sheets of ten GPUs, in force, and in files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_cuda._attention.rules import choose_attention
from mlx_cuda._common import limits as known
from mlx_cuda._common.limits import (
    HOPPERS,
    KINDS,
    PLAIN,
    Attention,
    DispatchThresholds,
    Figures,
    Matmul,
    as_json,
    conservative,
    from_json,
    kind_of,
)
from mlx_cuda._loader import limits_file
from mlx_cuda._matmul.rules import choose_quantized

from .test_dispatch import PREFILL as CHUNK
from .test_matmul_dispatch import PREFILL

OWN = DispatchThresholds(dict.fromkeys(KINDS, Matmul(half_precision=96, upstream=640)), Attention(chunks="cudnn"), "measured here")
VERSIONS = {"driver": "13.0", "mlx": "0.32.4", "mlx_cuda": "1"}


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(known, "_in_force", {})
    yield
    known.put((8, 9), None)


@pytest.mark.parametrize(("capability", "figures", "rows"), [
    ((8, 0), Figures(108, 1.41, 2.039e12), 192),  # A100 80 GB
    ((8, 6), Figures(82, 1.695, 0.936e12), 192),  # RTX 3090
    ((8, 7), Figures(16, 1.3, 0.2048e12), 128),  # Jetson Orin
    ((8, 9), Figures(128, 2.52, 1.008e12), 416),  # RTX 4090
    ((8, 9), Figures(58, 2.04, 0.3e12), 544),  # L4
    ((9, 0), Figures(132, 1.98, 4.8e12), 0),  # H200, which was measured
    ((10, 0), Figures(148, 1.965, 8e12), 384),  # B200
    ((11, 0), Figures(20, 1.575, 0.273e12), 160),  # Jetson Thor
    ((12, 0), Figures(170, 2.407, 1.792e12), 320),  # RTX 5090
    ((12, 1), Figures(48, 2.5, 0.273e12), 576),  # DGX Spark
])  # fmt: skip
def test_data_sheets(capability: tuple[int, int], figures: Figures, rows: int) -> None:
    found = conservative(capability, figures)
    assert {each.upstream for each in found.matmul.values()} == {rows}
    assert found.attention.chunks == ("cudnn" if capability > (9, 0) else "flash")
    assert found.matmul["fp8"].half_precision == (512 if capability == (9, 0) else 64)
    assert found.source


def test_what_the_driver_says() -> None:
    figures = {"multiprocessors": 128, "clock_khz": 2520000, "memory_khz": 10501000, "memory_bits": 384}
    assert limits_file.by_data_sheet((8, 9), figures).matmul["affine 4"].upstream == 416
    shared = limits_file.by_data_sheet((12, 1), figures | {"multiprocessors": 48, "memory_khz": 0})  # memory that is the host's
    assert shared.matmul["affine 4"].upstream > 416


def test_calls_choose_by_the_limits_in_force() -> None:
    matmul, chunk = PREFILL._replace(capability=(8, 9)), CHUNK._replace(capability=(8, 9), k_len=8192)
    assert (choose_quantized(matmul).engine, choose_attention(chunk).engine) == ("dequantize", "flash")
    forgotten: list[bool] = []
    known.on_change(lambda: forgotten.append(True))
    known.put((8, 9), OWN)
    assert forgotten == [True]
    assert known.limits((8, 9)) is OWN
    assert (choose_quantized(matmul).engine, choose_attention(chunk).engine) == ("mlx", "cudnn")
    assert "up to 640 tokens MLX's kernel is faster" in choose_quantized(matmul).reason
    assert choose_quantized(matmul._replace(rows=96)).engine == "small_m"
    assert choose_quantized(matmul._replace(rows=641)).engine == "dequantize"
    # MLX's kernel that dequantises as it goes takes no others
    others: list[dict[str, Any]] = [
        {"bits": 3}, {"n": 14400}, {"k": 4128}, {"dtype": "float32"}, {"transpose": False}, {"k": 4160, "group_size": 128},
    ]  # fmt: skip
    for other in others:
        assert choose_quantized(matmul._replace(**other)).engine == "dequantize"
    known.put((8, 9), None)
    assert known.limits((8, 9)) is PLAIN
    assert choose_quantized(matmul).engine == "dequantize"


def test_a_choice_that_began_before_is_not_kept() -> None:
    """As where one thread calls while another puts other limits in force."""
    asked: list[int] = []

    @known.by_limits(8)
    def choice(number: int) -> str:
        asked.append(number)
        found = known.limits((8, 9)).source
        if len(asked) == 1:
            known.put((8, 9), OWN)
        return found

    assert choice(1) == PLAIN.source
    assert choice(1) == choice(1) == OWN.source
    assert asked == [1, 1]


def test_families() -> None:
    assert known.limits((9, 0)) is HOPPERS
    assert known.limits((12, 0)) is PLAIN
    assert [kind_of("affine", bits) for bits in (2, 4, 5, 8)] == ["affine 4", "affine 4", "affine 8", "affine 8"]
    assert [kind_of(*form) for form in (("mxfp4", 4), ("nvfp4", 4), ("mxfp8", 8))] == ["fp4", "fp4", "fp8"]


def test_as_json() -> None:
    assert from_json(json.loads(json.dumps(as_json(OWN))), "measured here") == OWN


def test_a_file_with_former_names() -> None:
    former = json.loads(json.dumps(as_json(OWN)).replace('"small_m"', '"skinny"').replace('"matmul"', '"products"'))
    assert from_json(former, "measured here") == OWN
    text = json.dumps({"mlx_cuda_limits": 1, "gpus": {"GPU": {"limits": former}}})
    assert limits_file.parse(text) == {"GPU": {"limits": as_json(OWN)}}


def _broken(**attention: Any) -> Any:
    content = as_json(OWN)
    content["attention"].update(attention)
    return content


@pytest.mark.parametrize("content", [
    None, {}, {"matmul": {}, "attention": {}}, _broken(growing=-1), _broken(growing=True), _broken(growing=1.5), _broken(chunks="best"),
    _broken(chunks=[]), _broken(unknown=1), {**as_json(OWN), "matmul": {"affine 4": {}}},
])  # fmt: skip
def test_what_are_no_limits(content: Any) -> None:
    with pytest.raises(ValueError, match="limits"):
        from_json(content, "a file")


def test_a_file_of_a_user(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuned-limits.json"
    assert limits_file.measured("GPU", VERSIONS, path) is None
    assert limits_file.keep(path, "GPU", VERSIONS, OWN)
    assert limits_file.keep(path, "other", VERSIONS, PLAIN)
    found = limits_file.measured("GPU", VERSIONS, path)
    assert found is not None
    assert found._replace(source="") == OWN._replace(source="")
    assert limits_file.measured("GPU", VERSIONS | {"driver": "13.1"}, path) is None
    assert limits_file.remove(path, "GPU")
    assert not limits_file.remove(path, "GPU")
    assert list(limits_file.read(path) or {}) == ["other"]
    assert [each.name for each in path.parent.iterdir()] == ["tuned-limits.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"mlx_cuda_limits": 2, "gpus": {}}', '{"mlx_cuda_limits": 1, "gpus": {"GPU": 1}}'])
def test_a_file_of_something_else_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned-limits.json"
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"leaves .*tuned-limits\.json alone"):
        assert not limits_file.keep(path, "GPU", VERSIONS, OWN)
    assert path.read_text() == text


def test_what_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = limits_file.read(limits_file.SHIPPED)
    assert entries is not None
    for name in entries:
        assert limits_file.measured(name, VERSIONS, None) is not None
    shipped, own = tmp_path / "_limits.json", tmp_path / "own.json"
    limits_file.keep(shipped, "GPU", VERSIONS, PLAIN)
    limits_file.keep(own, "GPU", VERSIONS, OWN)
    monkeypatch.setattr(limits_file, "SHIPPED", shipped)
    for versions, expected in ((VERSIONS, OWN), (VERSIONS | {"mlx": "0.33.0"}, PLAIN)):
        found = limits_file.measured("GPU", versions, own)
        assert found is not None
        assert found.matmul == expected.matmul
