"""Every model of ``mlx_lm.models``, small: patched it is as near to float32 as MLX's own, and requests at once have their own tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.families.__main__ import in_process
from benchmarks.families.judging import worse
from benchmarks.families.walk import Lengths, families

pytestmark = pytest.mark.gpu

SHORT = Lengths(prompt=150, steps=12, turns=0)
PROCESSES, SECONDS = 8, 300.0


def names() -> list[Any]:
    try:
        return families()
    except ImportError:
        return [pytest.param("", marks=pytest.mark.skip("mlx_lm is not installed"))]


@pytest.fixture(scope="module")
def walked(request: pytest.FixtureRequest) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Several are under way at once, where xdist has not several workers that each have one."""

    def walk(name: str) -> dict[str, Any]:
        return in_process(name, SHORT, SECONDS)

    if hasattr(request.config, "workerinput"):
        yield walk
        return
    with ThreadPoolExecutor(PROCESSES) as pool:
        under_way = {name: pool.submit(walk, name) for name in families()}
        yield lambda name: under_way[name].result()
        for future in under_way.values():
            future.cancel()


@pytest.mark.parametrize("name", names())
def test_a_patched_model_is_as_good_as_upstreams(walked: Callable[[str], dict[str, Any]], name: str) -> None:
    assert not worse(walked(name))
