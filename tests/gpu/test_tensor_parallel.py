"""mlx-lm's tensor parallel models, a process for each GPU: their steps are replayed, with the sums over all GPUs in them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]
TOLERANCE = 6e-2  # of logits in bfloat16 after two layers
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
    return {name: each for name, each in found.items() if name != "sums"}


def test_sums(found: dict[str, Any]) -> None:
    """Small and large ones, in letters and in pieces, several in one graph."""
    assert found["sums"].keys() == {"mlx.core.float32", "mlx.core.float16", "mlx.core.bfloat16"}
    for dtype, error in found["sums"].items():
        assert error < {"mlx.core.float32": 1e-6, "mlx.core.float16": 1e-3, "mlx.core.bfloat16": 8e-3}[dtype]


def test_steps_are_replayed(steps: dict[str, dict[str, Any]]) -> None:
    for name, each in steps.items():
        assert each["recorded"] == 1, (name, each)
        assert each["replayed"] > 80, (name, each)


def test_sums_are_one_kernel_where_gpus_reach_each_other(steps: dict[str, dict[str, Any]]) -> None:
    for name, each in steps.items():
        through_nccl = "NCCL" in name
        assert ("Sum AllReduce" in each["kernel"]) == through_nccl, (name, each)
        assert ("4 sum over GPUs + add" in each["kernel"]) != through_nccl, (name, each)


def test_logits_are_those_of_the_whole_model(steps: dict[str, dict[str, Any]]) -> None:
    for name, each in steps.items():
        assert each["error"] < TOLERANCE, (name, each)


def test_all_processes_have_the_same(steps: dict[str, dict[str, Any]]) -> None:
    assert all(each["equal everywhere"] for each in steps.values()), steps
