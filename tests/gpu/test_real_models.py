"""Published models with real weights, with and without ``patch()``: perplexity, greedy tokens, requests at once, caches, drafts, LoRA.

Each part of each form of a model has a process of its own, so that all of them begin alike and several run at a time. The models are
those that ``python -m tests.models fetch`` has put on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.models", reason="tests.models is in a checkout alone")

from collections.abc import Callable, Iterator

from ci.errors import EnvironmentProblem

from ..models import places
from ..models.loading import FORMS
from ..models.parts import CAPTURED, PARTS, judge

pytestmark = pytest.mark.gpu

CHECKOUT = Path(__file__).parents[2]
PROCESSES, SECONDS = 6, 400.0
CASES = [(name, form, part) for name in places.known() for form in FORMS for part in PARTS]


def why_not(name: str) -> str:
    """What there has to be; nothing where all of it is there."""
    if not find_spec("mlx_lm"):
        return "mlx_lm is not installed"
    try:
        folder = places.folder() / name
    except EnvironmentProblem as problem:
        return str(problem)
    return "" if folder.is_dir() else f"{folder} is not there: python -m tests.models fetch"


def measured(case: tuple[str, str, str]) -> dict[str, Any]:
    name, form, part = case
    command = [sys.executable, "-m", "tests.models", "measure", name, "--form", form, "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=CHECKOUT)
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        pytest.fail(f"ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Callable[[tuple[str, str, str]], dict[str, Any]]]:
    """Several are under way at once, where xdist has not several workers that each have one."""
    if hasattr(request.config, "workerinput"):
        yield measured
        return
    wanted = [item.callspec.params["case"] for item in request.session.items if item.fspath == request.node.fspath]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(PROCESSES) as pool:
        under_way = {case: pool.submit(measured, case) for case in wanted if not why_not(case[0])}
        yield lambda case: under_way[case].result()
        for future in under_way.values():
            future.cancel()


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_patched_model_is_as_good_as_upstreams(
    case: tuple[str, str, str], results: Callable[[tuple[str, str, str]], dict[str, Any]], record_property: Callable[[str, object], None]
) -> None:
    name, _, part = case
    if reason := why_not(name):
        pytest.skip(reason)
    result = results(case)
    record_property("result", json.dumps(result))
    print(json.dumps(result))
    assert judge(part, result) == []
    assert part not in CAPTURED or result["replayed"] > 0
