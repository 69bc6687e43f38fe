"""``python -m mlx_cuda check`` with a small model of mlx-lm, where both sides are MLX's own: equal, a tie, and wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_cuda.__main__ import main
from mlx_cuda._check import child, engines, plan, processes, reference
from mlx_cuda._check.forms import Side, Task

from ..gpu.mlx_lm_parts import part, write_folder

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("mlx_lm is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("on_the_cpu")

COMMON: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "rms_norm_eps": 1e-5, "vocab_size": 257, "max_position_embeddings": 200, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = {"sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64, "rope_local_base_freq": 10000.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
           "norm_topk_prob": True}  # fmt: skip
MAMBA = {"num_heads": 2, "head_dim": 64, "intermediate_size": 128, "state_size": 16, "layer_norm_epsilon": 1e-5, "conv_kernel": 4,
         "n_groups": 1, "use_bias": False, "use_conv_bias": True, "time_step_limit": [0.0, 100.0], "time_step_rank": "auto"}  # fmt: skip
PACKED = {"group_size": 32, "bits": 4}


def made(name: str = "llama", quantization: dict[str, Any] | None = None, **config: Any) -> Any:
    module = part(f"models.{name}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **COMMON, **config}))
    model.set_dtype(mx.bfloat16)
    if quantization:
        importlib.import_module("mlx.nn").quantize(model, **quantization)
    mx.eval(model.parameters())
    return model


class Tokenizer:
    """A token for each character."""

    chat_template: str | None = None

    def encode(self, text: str) -> list[int]:
        return [ord(each) % 250 for each in text]

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> Any:
        assert add_generation_prompt
        return [251, *self.encode(messages[0]["content"]), 252]


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Have the processes of a check run in this one, with models that are given; the folder to check."""
    measured = plan.Plan(text=150, context=60, steps=40, answers=2, answer=40, batch=8, prompt=40, timed=10, runs=1)
    monkeypatch.setattr(plan, "QUICK", measured)
    monkeypatch.setattr(processes, "require_mlx_lm", lambda: None)
    (tmp_path / "config.json").touch()
    generate = part("generate")  # whose stream is the GPU's, where there is one
    monkeypatch.setattr(generate, "generation_stream", mx.default_stream(mx.cpu))
    monkeypatch.setattr(generate, "generate_step", partial(generate.generate_step, stream=mx.default_stream(mx.cpu)))

    def use(models: Callable[[str], Any]) -> str:
        def run(task: Task, begin: Any) -> Side:
            with pytest.MonkeyPatch.context() as patch:
                for name in ("quantized_matmul", "gather_qmm", "dequantize"):
                    patch.setattr(mx, name, getattr(mx, name))
                patch.setattr(child, "load", lambda _: (models(task["side"]), Tokenizer()))
                try:
                    found: Side = json.loads(json.dumps(child.run(task, begin)))
                finally:
                    mlx_cuda.unpatch()
                return found

        monkeypatch.setattr(processes, "run", run)
        return str(tmp_path)

    return use


def rows(name: str, **options: Any) -> dict[str, Any]:
    return {row.name: row for row in mlx_cuda.check(name, quick=True, **options).rows}


def test_equal_sides(sides: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = sides(lambda _: made())
    assert main(["check", folder, "--quick"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith(f"{folder}: llama, bfloat16\n")
    assert "[skip] kernels " in out
    assert "WRONG" not in out
    assert out.count("all equal") == 2
    assert "one request: 0 of 22; MLX offers no CUDA GPU here\n" in out
    assert "4 scaled_dot_product_attention: MLX's own, the stream is on the CPU\n" in out
    assert error.count("\n") == sum(processes.PARTS.values())


def widened(model: Any) -> Any:
    model.set_dtype(mx.float32)
    return model


def test_what_is_in_float32_differs_by_ties(sides: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """A side that computes better than MLX: other tokens, and none of them wrong."""
    folder = sides(lambda side: widened(made()) if side == "patched" else made())
    found = mlx_cuda.check(folder, quick=True)
    assert found.ok
    tokens = {row.name: row for row in found.rows}["greedy tokens, 8 requests at once"]
    assert tokens.patched is not None
    assert tokens.upstream is not None
    assert tokens.patched < tokens.upstream
    assert tokens.note.startswith("tie: ")
    assert main(["check", folder, "--quick"]) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_a_quantized_cache_that_mlx_cannot_attend_to(sides: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLX side then attends to the dequantized cache, so the patched side is judged all the same."""
    base, name = part("models.base"), "quantized_scaled_dot_product_attention"
    theirs = getattr(base, name)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No implementation")

    def models(side: str) -> Any:
        monkeypatch.setattr(base, name, fails if side == "upstream" else theirs)
        return made()

    found = rows(sides(models))
    passage, speed = found["perplexity, 8-bit KV cache"], found["decode, 8-bit KV cache"]
    assert passage.status == "ok"
    assert passage.patched == pytest.approx(passage.upstream, rel=0.02)
    assert passage.patched != passage.upstream
    assert "uses the dequantized cache: RuntimeError: No implementation" in passage.note
    assert found["error of the logits, 8-bit KV cache"].status != "fail"
    assert (speed.status, speed.upstream) == ("skip", None)
    assert speed.patched is not None


def changed(change: Callable[[mx.array], mx.array]) -> Any:
    """A model whose logits are changed."""
    model = made()
    call = type(model).__call__
    model.__class__ = type("Model", (type(model),), {"__call__": lambda *arguments, **options: change(call(*arguments, **options))})
    return model


def noise(logits: mx.array) -> mx.array:
    """Of decode steps alone."""
    if logits.shape[1] > 1:
        return logits
    return logits + mx.array(np.random.default_rng(5).normal(0, 1, logits.shape[-1])).astype(logits.dtype)


def test_wrong_logits(sides: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = sides(lambda side: changed(noise) if side == "patched" else made())
    assert main(["check", folder, "--quick", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    wrong = {row["name"] for row in report["rows"] if row["status"] == "fail"}
    assert wrong == {
        *(f"{row}, {part}" for row in ("perplexity", "error of the logits") for part in ("decode steps", "8-bit KV cache")),
        "greedy tokens, one request", "greedy tokens, 8 requests at once",
    }  # fmt: skip
    assert all("WRONG" in row["note"] for row in report["rows"] if row["name"] in wrong)


def test_nan(sides: Callable[..., str]) -> None:
    folder = sides(lambda side: changed(lambda logits: logits * float("nan")) if side == "patched" else made())
    assert rows(folder)["perplexity, prompt"].note == "WRONG: NaN"


def test_an_error_of_one_part(sides: Callable[..., str]) -> None:
    def refuse(logits: mx.array) -> mx.array:
        if logits.shape[0] > 1:
            raise ValueError("no batches")
        return logits

    found = rows(sides(lambda side: changed(refuse) if side == "patched" else made()))
    assert {name for name, row in found.items() if row.status == "fail"} == {
        "greedy tokens, 8 requests at once", "decode, 8 requests at once",
    }  # fmt: skip
    assert found["decode, 8 requests at once"].note == "fails only with patch(): ValueError: no batches"


@pytest.mark.parametrize(("name", "config", "skipped"), [
    ("gemma3_text", WINDOWS, True),
    ("qwen3_moe", {**EXPERTS, "quantization": PACKED}, False),
    ("llama", {"quantization": {**PACKED, "mode": "mxfp4"}}, False),
    ("mamba2", MAMBA, True),
], ids=["windows", "experts", "mxfp4", "mamba"])  # fmt: skip
def test_kinds_of_models(sides: Callable[..., str], name: str, config: dict[str, Any], skipped: bool) -> None:
    found = rows(sides(lambda _: made(name, **config)))
    assert {row for row, each in found.items() if each.status not in {"ok", "skip"}} == set()
    assert (found["perplexity, 8-bit KV cache"].status == "skip") is skipped
    error = found["error of the logits, prompt"].upstream
    assert 0 < error < 0.5


@pytest.mark.parametrize(("name", "config"), [
    ("llama", {}),
    ("llama", {"quantization": PACKED}),
    ("qwen3_moe", {**EXPERTS, "quantization": PACKED}),
    ("qwen3_moe", {**EXPERTS, "quantization": {**PACKED, "mode": "mxfp4"}}),
], ids=["bfloat16", "4 bit", "experts", "experts, mxfp4"])  # fmt: skip
def test_float32_is_that_of_all_weights_in_float32(monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any]) -> None:
    """16-bit matrices that stay, and packed ones that are dequantized for each matmul, give what float32 ones give."""
    model, dense = made(name, **config), made(name, **config)
    for function in ("quantized_matmul", "gather_qmm", "dequantize"):
        monkeypatch.setattr(mx, function, getattr(mx, function))
    dense.set_dtype(mx.float32)
    if "quantization" in config:
        part("utils").dequantize_model(dense)
    tokens = mx.array([Tokenizer().encode("The ferry at Harl crosses the river")])
    right = dense(tokens)
    before = sum(array.nbytes for _, array in tree_flatten(model.parameters()))  # type: ignore[union-attr,str-unpack]
    reference.widen(model)
    logits = model(tokens)
    assert logits.dtype == mx.float32
    assert mx.allclose(logits, right, rtol=1e-4, atol=1e-4).item()
    embedding = 0 if config.get("quantization") else model.model.embed_tokens.weight.nbytes // 2
    after = sum(array.nbytes for _, array in tree_flatten(model.parameters()))  # type: ignore[union-attr,str-unpack]
    assert after - embedding <= before * 1.02


def test_prompts_in_the_model_s_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_cuda._check.side import prompts_for

    plain = prompts_for(Tokenizer(), plan.FULL)
    assert len(plain) == 8
    assert len({*map(len, plain)}) > 5  # a batch has to pad them
    monkeypatch.setattr(Tokenizer, "chat_template", "…")
    assert prompts_for(Tokenizer(), plan.FULL)[0] == [251, *plain[0], 252]
    assert max(map(len, prompts_for(Tokenizer(), plan.FULL))) == plan.FULL.prompt


def test_functions_are_as_before_after_they_were_counted() -> None:
    before = mx.fast.scaled_dot_product_attention
    q = mx.zeros((1, 1, 2, 64))
    with engines.captured() as calls:
        mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0)
        with pytest.raises(ValueError, match="shape"):
            mx.fast.scaled_dot_product_attention(q, q, mx.zeros((1, 1, 3, 64)), scale=1.0)
    assert mx.fast.scaled_dot_product_attention is before
    assert [each["ours"] for each in calls()] == [False, False]


def test_the_processes(tmp_path: Path) -> None:
    if importlib.util.find_spec("tokenizers") is None:
        pytest.skip("mlx_lm is not installed")  # whole: it requires that
    write_folder(tmp_path, made(), {"model_type": "llama", **COMMON})
    command = [sys.executable, "-m", "mlx_cuda", "check", str(tmp_path), "--quick", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["about"]["weights"] == "bfloat16"
    (row,) = (row for row in report["rows"] if row["name"] == "perplexity, prompt")
    assert row["patched"] == pytest.approx(row["upstream"], rel=1e-2)
    (tmp_path / "model.safetensors").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"mlx-lm does not load {tmp_path}: FileNotFoundError: No safetensors found" in done.stderr
    assert f"fix: check whether this works: python -m mlx_lm generate --model {tmp_path}\n" in done.stderr
