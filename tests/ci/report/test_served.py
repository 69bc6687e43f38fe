"""The report and the package, which cannot share a module, have one rule for the code that a GPU gets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, combinations

import pytest

from ci.matrix import REPOSITORY
from ci.report.coverage import GPUS, _served

SASS, PTX = ("75", "80", "86", "90a", "100", "103a", "120"), ("75", "80", "89", "90a")


def subsets(names: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))


@pytest.mark.parametrize("gpu", [int(gpu) for gpu in GPUS])
def test_the_package_loads_what_the_report_says(gpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "python"))
    from mlx_cuda._loader.device_code import Fatbin

    for sass in subsets(SASS):
        for ptx in subsets(PTX):
            reported = _served([*(("sass", each) for each in sass), *(("ptx", each) for each in ptx)], gpu)
            loaded = Fatbin("", sass, ptx).serving((gpu // 10, gpu % 10))
            assert loaded == (reported[1] if reported else ""), (sass, ptx)
