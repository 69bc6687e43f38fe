"""What MLX keeps for its next calls once steps are recorded: others have room, and nothing of the user's own is changed."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_cuda._decoding import memory, models
from mlx_cuda._loader import native

TOTAL = 1000
OWN = 950  # both limits of MLX, where nobody has set one


class Gpu:
    """A GPU's memory, and MLX's limits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept = self.memory = OWN
        self.cached, self.free = 100, 500
        mlx = SimpleNamespace(
            set_cache_limit=self.set_cache_limit, get_memory_limit=lambda: self.memory, get_cache_memory=lambda: self.cached,
            Device=mx.Device, gpu=mx.gpu, device_info=lambda _: {"total_memory": TOTAL, "free_memory": self.free},
        )  # fmt: skip
        monkeypatch.setattr(memory, "mx", mlx)
        monkeypatch.setattr(native, "on_cuda", lambda: True)
        monkeypatch.setattr(memory, "_limit", memory.Limit())

    def set_cache_limit(self, limit: int) -> int:
        before, self.kept = self.kept, limit
        return before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_part_of_what_nobody_uses_is_kept(gpu: Gpu) -> None:
    memory.leave_room()
    assert gpu.kept == 200
    gpu.free = 200
    memory.leave_room()
    assert gpu.kept == 100
    gpu.free = 500  # others have gone
    memory.leave_room()
    assert gpu.kept == 200


def test_something_is_kept_where_nothing_is_free(gpu: Gpu) -> None:
    gpu.free = gpu.cached = 0
    memory.leave_room()
    assert gpu.kept == TOTAL // 20


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("chosen", [20, 400])
def test_a_limit_of_the_users_own_stays(gpu: Gpu, chosen: int, when: str) -> None:
    if when == "after":
        memory.leave_room()
    gpu.kept = chosen
    memory.leave_room()
    memory.leave_room()
    assert gpu.kept == chosen
    memory.bring_back()
    assert gpu.kept == chosen


def test_a_lower_limit_of_all_memory_is_no_limit_of_what_is_kept(gpu: Gpu) -> None:
    gpu.memory = 300
    memory.leave_room()
    assert gpu.kept == 200


def test_it_is_brought_back(gpu: Gpu) -> None:
    memory.leave_room()
    memory.leave_room()
    models.remove()
    assert gpu.kept == OWN
    gpu.kept = 7
    models.remove()
    assert gpu.kept == 7


def test_what_is_set_since_is_not_taken_away(gpu: Gpu) -> None:
    memory.leave_room()
    gpu.kept = 7
    memory.bring_back()
    assert gpu.kept == 7


def test_without_cuda_nothing_is_set(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "on_cuda", lambda: False)
    memory.leave_room()
    assert gpu.kept == OWN
