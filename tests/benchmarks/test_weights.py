"""Fetched models in the benchmark: rows with real weights and with random ones, which say which they are."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks import models
from benchmarks.cells import MEMORY
from benchmarks.decoding import bytes_of_step, limit
from benchmarks.result_file import read
from benchmarks.weights import RANDOM, REAL, rows
from ci.errors import EnvironmentProblem
from tests.models import places, tiny
from tests.models.convert import convert


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    tiny.write(folder / "model.gguf", gemma=True)
    convert(folder / "model.gguf", folder)
    return folder


def test_each_form_has_a_row_of_each_kind_of_weights(folder: Path) -> None:
    found = rows([str(folder)], ["bf16", "mxfp4"])
    assert [each.name for each in found] == [
        f"small, {form}, {weights} weights" for form in ("bf16", "mxfp4") for weights in ("real", "random")
    ]
    assert [each.weights for each in found] == [REAL, RANDOM] * 2
    module, config = found[2].shape
    assert module == "gemma3_text"
    assert config["quantization"] == {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    assert "quantization" not in found[0].shape[1]


def test_a_fetched_model_has_its_title(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(places.VARIABLE, str(folder.parent))
    (folder.rename(folder.with_name("smollm2-135m")) / "model.gguf").unlink()
    assert rows(["smollm2-135m"], ["bf16"])[0].name == "SmolLM2 135M Instruct, bf16, real weights"
    with pytest.raises(EnvironmentProblem, match=r"gemma-3-270m has no config\.json\n  fix: python -m tests\.models fetch gemma-3-270m$"):
        rows(["gemma-3-270m"], ["bf16"])


def test_what_cannot_be_measured_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnvironmentProblem, match=r"unknown form '3 bit'\n  fix: one of bf16, 8 bit, 4 bit, mxfp4$"):
        rows([str(folder)], ["3 bit"])
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4, "group_size": 64}}), "utf-8")
    with pytest.raises(SystemExit, match="2"):
        models.main(["--weights", str(folder), "-o", str(folder / "models.jsonl")])
    assert "is quantized already\n  fix: name the model in 16 bits" in capsys.readouterr().err


def test_a_groups_scale_of_8_bits_is_counted_as_such(folder: Path) -> None:
    """Weights of mxfp4 have no bias, and are read in 4.25 bits each."""
    plain, packed = (each.shape[1] for each in rows([str(folder)], ["bf16", "mxfp4"])[::2])
    assert bytes_of_step(packed, 0) * 16 == bytes_of_step(plain, 0) * 4.25


def test_they_are_measured_with_text(folder: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx_lm is not installed")
    path = folder / "models.jsonl"
    sizes = ["--prompt", "30", "--tokens", "4", "--batch", "2", "1", "--turns", "1", "--form", "bf16", "mxfp4"]
    assert models.main(["--weights", str(folder), *sizes, "-o", str(path)]) == 0
    measured = read(path, "models")["cases"]
    assert [(each["weights"], each["batch"]) for each in measured] == [("real", 2), ("real", 1), ("random", 2), ("random", 1)] * 2
    assert measured[0]["tokens"]["upstream"] != measured[2]["tokens"]["upstream"]
    assert limit(measured[0], {}, next(iter(MEMORY))) > limit(measured[1], {}, next(iter(MEMORY)))  # two sequences
    real, random = rows([str(folder)], ["bf16"])
    prompt = real.prompt(2, 30)
    assert prompt.shape == (2, 30)
    assert (prompt[:, 0] == 2).all()
    assert not mx.array_equal(prompt[0], prompt[1])
    assert mx.array_equal(prompt, random.prompt(2, 30))
