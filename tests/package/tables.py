"""Rules as tables: what is changed in a call, who computes it, and what the reason says."""

from __future__ import annotations

from functools import partial

import pytest
from mlx_cuda._common.choice import Choice

rows = partial(pytest.mark.parametrize, ("changed", "engine", "reason"), ids=str)


def says(choice: Choice, engine: str, reason: str) -> bool:
    return choice.engine == engine and reason in choice.reason and bool(choice.reason)
