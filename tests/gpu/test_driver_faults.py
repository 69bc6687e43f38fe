"""Whatever call of the CUDA driver fails, a model's call raises or gives what it should."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from .driver_faults import KINDS, preloaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="compiles a library that is preloaded"),
]


@pytest.mark.parametrize("scenario", ["prompt", "steps", "batch", "pages"])
def test_a_call_whose_memory_is_refused_raises_or_is_right(scenario: str) -> None:
    done = preloaded(["--only", scenario])
    assert done.returncode == 0, done.stdout
    lines = dict(re.findall(rf"{scenario}, (\w+): (.*)", done.stdout))
    assert lines.keys() == KINDS.keys()
    for line in lines.values():  # the driver's calls did fail
        assert "'raised'" in line or "'right'" in line, done.stdout
