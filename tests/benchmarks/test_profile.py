"""What a trace says of a step's kernels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.decoding import profile_table
from benchmarks.profile import REST, by_part, covered, last_step, of_trace, part_of, profile, short
from benchmarks.result_file import read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "decoding"
EVENTS = [
    {"cat": "kernel", "name": "void mlx::core::cu::(anonymous namespace)::gemv_single<__nv_bfloat16, 8>(int)", "ts": 10.0, "dur": 4.0},
    {"cat": "kernel", "name": "row_product_bfloat16_4_64", "ts": 12.0, "dur": 6.0},
    {"cat": "kernel", "name": "row_product_bfloat16_4_64", "ts": 20.0, "dur": 2.0},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 30.0, "dur": 1.0},
    {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 50.0},
]


@pytest.mark.parametrize(("spans", "time"), [([], 0), ([(0, 2), (1, 3), (5, 6)], 4), ([(5, 6), (0, 9)], 9), ([(1, 2), (2, 3)], 2)])
def test_how_long_at_least_one_lasts(spans: list[tuple[float, float]], time: float) -> None:
    assert covered(spans) == time


@pytest.mark.parametrize(("name", "expected", "part"), [
    ("void mlx::core::cu::rms_norm<float, 4>(float*)", "rms_norm", "norms"),
    ("void mlx::core::cu::(anonymous namespace)::gemv_single<__nv_bfloat16, 8>(int)", "gemv_single", "matmul"),
    ("row_product_experts_bfloat16_4_64", "row_product_experts_bfloat16_4_64", "matmul"),
    ("SigmoidMultiplyMultiply_contiguous", "SigmoidMultiplyMultiply_contiguous", REST),
    ("token_128_bfloat16", "token_128_bfloat16", "attention"),
    ("persistent_experts_bfloat16", "persistent_experts_bfloat16", "persistent kernels: all of it in several layers"),
])  # fmt: skip
def test_names(name: str, expected: str, part: str) -> None:
    assert short(name) == expected
    assert part_of(short(name)) == part


def test_a_trace() -> None:
    found = of_trace(EVENTS, 2)
    kernels = {"copy": (0.5, 0.5), "gemv_single": (0.5, 2.0), "row_product_bfloat16_4_64": (1.0, 4.0)}
    assert found == {"steps": 2, "busy us": 5.5, "kernels": kernels}
    assert by_part(found)["matmul"] == (1.5, 6.0)
    assert last_step(EVENTS[::-1], 2) == {"row_product_bfloat16_4_64": [(0, 2000)], "copy": [(10000, 1000)]}


def test_the_profiler_sees_the_steps_but_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []

    class Profile:
        on = False

        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> Profile:
            Profile.on = True
            return self

        def __exit__(self, *_: object) -> None:
            Profile.on = False

        def export_chrome_trace(self, file: str) -> None:
            Path(file).write_text(json.dumps({"traceEvents": EVENTS}), "utf-8")

    fake = SimpleNamespace(profile=Profile, ProfilerActivity=SimpleNamespace(CUDA="CUDA"))
    monkeypatch.setitem(__import__("sys").modules, "torch.profiler", fake)
    torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))
    assert profile(torch, lambda: called.append(Profile.on), 2) == of_trace(EVENTS, 2)
    assert called == [False, True, True]


def test_a_table_of_what_was_profiled() -> None:
    results = read(RESULTS / "nvidia-h200-cu13.jsonl")
    one = results["cases"][0]
    one["profile"] = {side: of_trace(EVENTS, 1) for side in ("upstream", "patched")}
    header, _, *rows = profile_table({**results, "cases": [one, *results["cases"][1:]]}).splitlines()
    assert header.count("MLX") == header.count("patched") >= 1
    assert any(row.startswith("| matmul | 3, 12 us |") for row in rows)
    assert not any(row.startswith("| router") for row in rows) or header.count("MLX") > 1
