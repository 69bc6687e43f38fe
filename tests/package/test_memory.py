"""What MLX keeps for its next calls is let go of where too little is free beside it, and the driver is asked seldom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._decoding import memory, models

LIMIT = 6400  # of MLX's memory: 100 are noticed


class Gpu:
    """A GPU's memory, as MLX and the driver count it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active = self.kept = 0
        self.free = 6000
        self.asked: list[Any] = []
        mlx = SimpleNamespace(
            get_cache_memory=lambda: self.kept, get_active_memory=lambda: self.active, get_memory_limit=lambda: LIMIT,
            default_device=lambda: "the second GPU", device_info=self.device_info, clear_cache=self.clear_cache,
        )  # fmt: skip
        monkeypatch.setattr(memory, "mx", mlx)
        monkeypatch.setattr(memory, "_seen", 0)

    def device_info(self, device: Any) -> dict[str, int]:
        self.asked.append(device)
        return {"free_memory": self.free}

    def clear_cache(self) -> None:
        self.free += self.kept
        self.kept = 0

    def runs(self, most: int, kept: int) -> None:
        """MLX has had so much in use, of which it keeps something."""
        self.free -= most - self.active - self.kept
        self.active, self.kept = most - kept, kept


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_what_is_kept_goes_where_little_is_free(gpu: Gpu) -> None:
    gpu.runs(2500, kept=1500)
    memory.make_room()
    assert gpu.kept == 1500  # 3500 are free
    gpu.runs(4000, kept=1500)
    memory.make_room()
    assert (gpu.kept, gpu.free) == (0, 3500)
    gpu.runs(4200, kept=1700)
    memory.make_room()
    assert gpu.kept == 0


def test_it_goes_where_others_have_taken_memory(gpu: Gpu) -> None:
    gpu.runs(1000, kept=900)
    gpu.free = 1799
    memory.make_room()
    assert gpu.kept == 0


def test_nothing_is_lost_where_all_is_in_use(gpu: Gpu) -> None:
    gpu.runs(6000, kept=0)
    memory.make_room()
    assert (gpu.active, gpu.kept) == (6000, 0)


def test_the_driver_is_asked_where_mlx_has_grown_or_shrunk(gpu: Gpu) -> None:
    gpu.runs(99, kept=0)
    memory.make_room()
    assert not gpu.asked
    gpu.runs(100, kept=0)
    memory.make_room()
    gpu.runs(100, kept=100)  # the same memory
    memory.make_room()
    assert gpu.asked == ["the second GPU"]
    gpu.runs(0, kept=0)
    memory.make_room()
    assert gpu.asked == ["the second GPU"] * 2


def test_after_all_has_gone_it_is_asked_as_soon_as_mlx_grows(gpu: Gpu) -> None:
    gpu.free = 0
    gpu.runs(2000, kept=1900)
    memory.make_room()
    assert (gpu.kept, len(gpu.asked)) == (0, 1)
    memory.make_room()
    assert len(gpu.asked) == 1
    gpu.runs(200, kept=100)
    gpu.free = 0
    memory.make_room()
    assert (gpu.kept, len(gpu.asked)) == (0, 2)


def test_each_step_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    monkeypatch.setattr(models, "make_room", lambda: looks.append(True))
    decoding = models.Decoding()
    monkeypatch.setattr(decoding, "_replayed", lambda *_, **__: mx.zeros((1, 1)))
    for _ in range(3):
        decoding.step(None, lambda *_: None, mx.zeros((1, 1)), [], at_once=True)
    assert len(looks) == 3
