"""mlx-lm's tensor parallel models, a process for each GPU: their steps are replayed, with the sums over all GPUs in them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

pytestmark = pytest.mark.gpu
TOLERANCE = 6e-2  # of logits in bfloat16 after two layers
OTHERS = {"sums", "residuals", "keeps", "numbers"}  # than models
LONGEST = 90  # seconds: processes that wait for each other would wait for ever


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if mx.device_count(mx.gpu) < 2:
        pytest.skip("needs two GPUs")
    pytest.importorskip("mlx_lm.models.qwen3", reason="mlx_lm cannot be imported")
    output: Path = tmp_path_factory.mktemp("tensor-parallel") / "found.json"
    launch = "import sys; from mlx._distributed_utils.launch import main; sys.exit(main())"
    command = [sys.executable, "-c", launch, "-n", "2", "--backend", "nccl", "--", sys.executable, "-m", "tests.gpu.tensor_parallel"]
    with (output.parent / "log").open("w+") as log:
        process = subprocess.Popen([*command, str(output)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LONGEST)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # those that it has started too
        log.seek(0)
        assert output.exists(), log.read()
    result: dict[str, Any] = json.loads(output.read_text("utf-8"))
    return result


@pytest.fixture(scope="module")
def steps(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of models, where the GPUs reach each other."""
    return {name: each for name, each in found.items() if name not in OTHERS and "NCCL" not in name}


def test_sums(found: dict[str, Any]) -> None:
    """Small and large ones, several in one graph."""
    tolerance = {"mlx.core.float32": 1e-6, "mlx.core.float16": 1e-3, "mlx.core.bfloat16": 8e-3, "gradient": 1e-5, "compiled": 1e-5}
    assert found["sums"].keys() == tolerance.keys()
    assert all(found["sums"][name] < most for name, most in tolerance.items()), found["sums"]


def test_additions_become_part_of_sums(found: dict[str, Any]) -> None:
    error, sums, additions = found["residuals"]["taken"]
    assert error < 8e-3
    assert (sums, additions) == (4, 0)


def test_additions_that_others_depend_on_stay(found: dict[str, Any]) -> None:
    """Where the sum is read besides, the other term is broadcast, or has a sum of its own."""
    error, sums, additions = found["residuals"]["left"]
    assert error < 8e-3
    assert (sums, additions) == (4, 3)


def test_numbers_of_letters_begin_anew(found: dict[str, Any]) -> None:
    assert found["numbers"] < 1e-5


def test_what_one_process_records_alone(found: dict[str, Any]) -> None:
    assert found["keeps"]


def test_steps_are_replayed(steps: dict[str, dict[str, Any]]) -> None:
    assert len(steps) == 6
    for name, each in steps.items():
        assert each["recorded"] == 1, (name, each)
        assert each["replayed"] > 80, (name, each)


def test_a_sum_and_the_residual_are_one_kernel(steps: dict[str, dict[str, Any]]) -> None:
    assert all("4 all-reduce + add" in each["kernel"] for each in steps.values()), steps


def test_logits_are_those_of_the_whole_model(found: dict[str, Any]) -> None:
    for name, each in found.items():
        assert name in OTHERS or (each["error"] < TOLERANCE and each["equal everywhere"]), (name, each)


def test_without_memory_that_all_reach_it_is_mlxs(found: dict[str, Any]) -> None:
    assert found["bfloat16, through NCCL"]["replayed"] == 0
    assert "Sum AllReduce" in found["bfloat16, through NCCL"]["reason"]
