"""MLX's limits once steps are recorded: room for what MLX does not count, and nothing of the user's own is taken away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
from mlx_cuda._decoding import memory, models

if TYPE_CHECKING:
    from collections.abc import Callable

TOTAL = 1000
OWN = 950  # both limits of MLX, where nobody has set one


class Gpu:
    """A GPU's memory, and MLX's limits and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = self.kept = OWN
        self.active, self.cached, self.free = 300, 100, 570  # 30 of others
        mlx = SimpleNamespace(
            set_memory_limit=self._setter("memory"), set_cache_limit=self._setter("kept"), get_active_memory=lambda: self.active,
            get_cache_memory=lambda: self.cached, Device=mx.Device, gpu=mx.gpu,
            device_info=lambda _: {"total_memory": TOTAL, "free_memory": self.free},
        )  # fmt: skip
        monkeypatch.setattr(memory, "mx", mlx)
        monkeypatch.setattr(memory.native, "on_cuda", lambda: True)
        monkeypatch.setattr(memory, "_memory", memory.Lowered(mlx.set_memory_limit))
        monkeypatch.setattr(memory, "_kept", memory.Lowered(mlx.set_cache_limit))

    def _setter(self, name: str) -> Callable[[int], int]:
        def put(limit: int) -> int:
            before: int = getattr(self, name)
            setattr(self, name, limit)
            return before

        return put


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_what_mlx_does_not_count_has_room(gpu: Gpu) -> None:
    memory.leave_room()
    assert (gpu.memory, gpu.kept) == (OWN - 30, (OWN - 30) // 4)
    gpu.free -= 40
    memory.leave_room()
    assert (gpu.memory, gpu.kept) == (OWN - 70, (OWN - 70) // 4)


def test_the_limits_rise_again(gpu: Gpu) -> None:
    gpu.free = 100
    memory.leave_room()
    assert gpu.memory == TOTAL // 2  # whatever the others have
    gpu.free = 570
    memory.leave_room()
    assert (gpu.memory, gpu.kept) == (OWN - 30, (OWN - 30) // 4)


def test_memory_of_another_device_counts_for_nothing(gpu: Gpu) -> None:
    gpu.active = 5000
    memory.leave_room()
    assert (gpu.memory, gpu.kept) == (OWN, OWN // 4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_limits_of_the_users_own_stay(gpu: Gpu, when: str) -> None:
    if when == "after":
        memory.leave_room()
    gpu.memory, gpu.kept = 600, 400
    memory.leave_room()
    assert (gpu.memory, gpu.kept) == (600, 400)
    memory.bring_back()
    assert (gpu.memory, gpu.kept) == (600, 400)


def test_what_is_kept_follows_a_limit_of_the_users_own(gpu: Gpu) -> None:
    gpu.memory = 600
    memory.leave_room()
    assert (gpu.memory, gpu.kept) == (600, 150)


def test_they_are_brought_back(gpu: Gpu) -> None:
    memory.leave_room()
    memory.leave_room()
    models.remove()
    assert (gpu.memory, gpu.kept) == (OWN, OWN)
    gpu.memory, gpu.kept = 1, 2
    models.remove()
    assert (gpu.memory, gpu.kept) == (1, 2)


def test_without_cuda_nothing_is_set(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.native, "on_cuda", lambda: False)
    memory.leave_room()
    assert (gpu.memory, gpu.kept) == (OWN, OWN)
