"""Every part of a trial with a small model: without a GPU both sides are MLX's, and a wrong one is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.mlx_lm_parts import part
from benchmarks.result_file import read, write

from . import places, tiny
from .__main__ import main
from .convert import convert
from .loading import FORMS
from .parts import PARTS, judge
from .trial import Sizes, Trial

SIZES = Sizes(parts=(20, 41, 9), steps=8, answer=12, long=80, prompts=3, trained=20, rows=2, length=24)

pytest.importorskip("mlx_lm", reason="mlx_lm is not installed")


@pytest.fixture(scope="module", params=[False, True], ids=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    tiny.write(folder / "model.gguf", gemma=request.param)
    convert(folder / "model.gguf", folder)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_what_a_form_stands_for(folder: Path, form: str) -> None:
    trial = Trial(folder, form, SIZES)
    ids = mx.array([trial.ids[:40]])
    exact = trial.exact(ids)
    assert exact.dtype == mx.float32
    assert (form == "bf16") == (not any(hasattr(layer, "bits") for layer in trial.model.modules()))
    trial.model.set_dtype(mx.float32)
    off: Any = mx.linalg.norm(trial.model(ids).astype(mx.float32) - exact) / mx.linalg.norm(exact)
    assert off.item() < (0.03 if form == "mxfp4" else 1e-3)  # the embeddings of mxfp4 give bfloat16


@pytest.mark.parametrize(
    ("form", "name"),
    [*(("bf16", name) for name in PARTS if name != "100 at once"), ("mxfp4", "text"), ("4 bit", "kv")],  # 100 are 20 and more
)
def test_a_part(folder: Path, form: str, name: str) -> None:
    result = json.loads(json.dumps(PARTS[name](Trial(folder, form, SIZES))))
    assert judge(name, result) == []
    if name == "alone":
        assert mx.cuda.is_available() or result["differences"] == [{"equal": 12}] * 3
    elif name == "training":
        assert {side: len(curve) for side, curve in result["losses"].items()} == {"float32": 20, "upstream": 20, "patched": 20}
    elif name == "20 at once":
        assert result["answers"] == {"upstream": 20, "patched": 20}
        assert mx.cuda.is_available() or result["answers of equal tokens"] == 20


@pytest.mark.parametrize("name", ["text", "alone", "20 at once", "saved", "drafts", "kv"])
def test_a_patched_side_that_is_wrong_is_noticed(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that weigh some columns more than others, while MLX is patched."""
    trial, wrong = Trial(folder, "bf16", SIZES), list[bool]()
    norm, on_both = mx.fast.rms_norm, trial.on_both

    def off(x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        result = norm(x, *arguments, **options)
        return result * (1 + 0.8 * mx.sin(mx.arange(x.shape[-1]))).astype(x.dtype) if wrong else result

    def on_each(function: Any, **options: Any) -> dict[str, Any]:
        found = on_both(function, **options)
        wrong.append(True)
        found["patched"] = function()
        wrong.clear()
        return found

    monkeypatch.setattr(mx.fast, "rms_norm", off)
    monkeypatch.setattr(trial, "on_both", on_each)
    assert judge(name, PARTS[name](trial))


def test_a_failure_of_upstreams_alone_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, calls = Trial(folder, "bf16", SIZES), [0]
    step = part("generate").speculative_generate_step

    def fails_at_first(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise ValueError("no windows")
        return step(*arguments, **options)

    monkeypatch.setattr(part("generate"), "speculative_generate_step", fails_at_first)
    result = PARTS["drafts"](trial)
    assert result["upstream failed"] == "ValueError: no windows"
    assert result["answers"] == {"patched": 2}


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(places.VARIABLE, str(folder.parent))
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    monkeypatch.setattr(places, "known", lambda: {"small": None})
    assert main(["measure", "small", "--quick", "--part", "alone"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["form"], result["part"], result["quick"]) == ("small", "bf16", "alone", True)
    path = tmp_path / "real.jsonl"
    for part_name in ("alone", "saved", "alone"):
        assert main(["measure", "small", "--quick", "--part", part_name, "-o", str(path)]) == 0
    results = read(path, "real")
    assert [each["part"] for each in results["cases"]] == ["saved", "alone"]
    assert results["provenance"]["command"][2] == "tests.models"
    write(path, results | {"provenance": results["provenance"] | {"device": "another"}})
    assert main(["measure", "small", "--quick", "--part", "alone", "-o", str(path)]) == 2
    path.write_text("[INFO]\n", "utf-8")
    assert main(["measure", "small", "--quick", "--part", "alone", "-o", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"error: {path} has results of another device\n  fix: write to another file" in said
    assert f"error: {path} is no file of results" in said
    assert main(["measure", "small", "--form", "3 bit"]) == 2
    assert "unknown form '3 bit' or part\n  fix: one of bf16, 8 bit, 4 bit, mxfp4; text, " in capsys.readouterr().err
    monkeypatch.setenv(places.VARIABLE, str(folder))
    assert main(["measure", "small"]) == 2
    assert capsys.readouterr().err.endswith("fix: python -m tests.models fetch small\n")
