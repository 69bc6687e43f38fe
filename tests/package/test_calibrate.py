"""``calibrate`` and ``python -m mlx_cuda tune`` without a GPU: what is concluded from times, and what is kept."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda.__main__ import main
from mlx_cuda._common import limits as known
from mlx_cuda._common.limits import PLAIN, DispatchThresholds
from mlx_cuda._loader import limits_file
from mlx_cuda._loader import native as _native
from mlx_cuda._tuning import calibrate as calibration
from mlx_cuda._tuning import command
from mlx_cuda._tuning.calibrate import best, gain
from mlx_cuda._tuning.rules import Rule, rules

GPU = (8, 9)


class Module:
    def library_versions(self) -> dict[str, str]:
        return {"driver": "13.0"}

    def build_info(self) -> dict[str, str]:
        return {"mlx": "0.32.4"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A GPU that nobody has measured, and the file of what is."""
    monkeypatch.setenv("MLX_CUDA_TUNED", str(tmp_path / "tuned.json"))
    monkeypatch.setattr(_native, "on_cuda", lambda: True)
    monkeypatch.setattr(_native, "gpu_name", lambda: "RTX")
    monkeypatch.setattr(_native, "engine", lambda _: _native.Engine(Module(), GPU, (9, 19)))  # type: ignore[arg-type]
    monkeypatch.setattr(mx, "stream", contextlib.nullcontext)
    monkeypatch.setattr(mx, "default_stream", lambda _: None)
    yield tmp_path / "tuned-limits.json"
    known.put(GPU, None)


def times(monkeypatch: pytest.MonkeyPatch, of: Callable[[DispatchThresholds, str, int], float]) -> None:
    """Made-up times of the rules' calls, by the limits in force."""
    monkeypatch.setattr(calibration, "_seconds", lambda rule, size: of(known.limits(GPU), rule.name, size))
    monkeypatch.setattr(calibration, "_result", lambda *_: mx.ones(4))


def by_engine(limits: DispatchThresholds, name: str, size: int) -> float:
    """A GPU on which MLX's kernel takes 4-bit weights best up to 256 rows, and cuDNN chunks."""
    part, field = name.split(": ")
    if part == "attention":
        return 1.0 if limits.attention.chunks == "cudnn" or field != "chunks" else 1.5
    if part != "affine 4" or field not in {"half_precision", "upstream"}:
        return 1.0
    of = limits.matmul[part]
    if size <= of.half_precision:
        return size / 32
    return 0.9 + size / 200 if size <= of.upstream else 2.0 + size / 1000


def test_what_is_faster_is_kept_and_in_force(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, by_engine)
    seen: list[tuple[float, str]] = []
    found = mlx_cuda.calibrate(progress=lambda share, name: seen.append((share, name)))
    matmuls = found.limits.matmul["affine 4"]
    assert (matmuls.upstream, matmuls.half_precision) == (256, 32)
    assert found.limits.attention.chunks == "cudnn"
    assert known.limits(GPU) is found.limits
    assert {each.name for each in found.changes} == {"affine 4: upstream", "affine 4: half_precision", "attention: chunks"}
    assert next(each.gain for each in found.changes if each.name == "attention: chunks") == pytest.approx(1.25)
    assert not found.unmeasured
    kept = limits_file.measured("RTX", limits_file.versions("13.0", "0.32.4"), gpu)
    assert kept is not None
    assert (kept.matmul, kept.attention) == (found.limits.matmul, found.limits.attention)
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert seen[-1] == (1.0, "")


def test_the_same_again_changes_nothing(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, by_engine)
    first = mlx_cuda.calibrate()
    second = mlx_cuda.calibrate()
    assert second.limits == first.limits
    assert not second.changes
    assert gpu.exists()


def test_what_the_time_does_not_suffice_for_stays(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, by_engine)
    found = mlx_cuda.calibrate(seconds=calibration.COMPILING - 1)
    assert set(found.unmeasured) == {rule.name for rule in rules() if rule.compiles}
    assert found.limits.matmul["affine 4"].upstream == 0
    assert gpu.exists()


def test_where_there_is_no_time_nothing_is_kept(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, by_engine)
    found = mlx_cuda.calibrate(seconds=0)
    assert len(found.unmeasured) == len(rules())
    assert known.limits(GPU) is found.limits is PLAIN
    assert not gpu.exists()


def test_a_rule_that_fails_leaves_its_limit(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(limits: DispatchThresholds, name: str, size: int) -> float:
        if name == "affine 4: upstream" and size == 256:
            raise RuntimeError("out of memory\nand more")
        return by_engine(limits, name, size)

    times(monkeypatch, failing)
    found = mlx_cuda.calibrate()
    assert found.unmeasured == {"affine 4: upstream": "out of memory"}
    assert found.limits.matmul["affine 4"].upstream == 0
    assert found.limits.attention.chunks == "cudnn"
    assert gpu.exists()


@pytest.mark.parametrize("before", ["flash", "cudnn"])
@pytest.mark.parametrize(("ratio", "now"), [(1.1, "flash"), (1.3, "cudnn")])
def test_plans_that_are_not_timed_have_a_price(gpu: Path, monkeypatch: pytest.MonkeyPatch, before: Any, ratio: float, now: str) -> None:
    known.put(GPU, PLAIN._replace(attention=PLAIN.attention._replace(chunks=before)))
    times(monkeypatch, lambda limits, name, _: 1.0 if limits.attention.chunks == "cudnn" or "chunks" not in name else ratio)
    assert mlx_cuda.calibrate().limits.attention.chunks == now
    assert gpu.exists()


def test_a_limit_that_the_time_ends_in_stays(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, by_engine)
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) / 10)
    found = mlx_cuda.calibrate(seconds=50)
    assert found.unmeasured
    assert set(found.unmeasured.values()) == {"the time was over"}
    assert gpu.exists()


def test_calls_come_as_far_as_the_limit_that_is_measured(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def of(limits: DispatchThresholds, name: str, size: int) -> float:
        part, field = name.split(": ")
        if field == "upstream":
            seen.add((part, size, limits.matmul[part].half_precision))
        return by_engine(limits, name, size)

    times(monkeypatch, of)
    mlx_cuda.calibrate()
    assert {(part, half) for part, _, half in seen} == {(part, 0) for part in known.KINDS}
    assert gpu.exists()


@pytest.mark.parametrize("wrong", [0.0, float("nan"), 1.1])
def test_an_engine_whose_results_are_others_is_left_alone(gpu: Path, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    times(monkeypatch, by_engine)

    def result(rule: Rule, _: int) -> mx.array:
        is_wrong = rule.name == "attention: chunks" and known.limits(GPU).attention.chunks == "cudnn"
        return mx.ones(4) * (wrong if is_wrong else 1.0)

    monkeypatch.setattr(calibration, "_result", result)
    found = mlx_cuda.calibrate()
    assert found.limits.attention.chunks == "flash"
    assert found.unmeasured == {"attention: chunks": "the engines give other results of 512: please report it"}
    assert found.limits.matmul["affine 4"].upstream == 256
    assert gpu.exists()


def test_one_query_is_decoded_in_any_case(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of attention counts queries of one token as one; 0 rows of a matmul are none."""
    times(monkeypatch, lambda limits, name, _: 2.0 if "growing" in name and limits.attention.growing > 1 else 1.0)
    assert mlx_cuda.calibrate().limits.attention.growing == 1
    times(monkeypatch, lambda limits, name, _: 2.0 if "not_transposed" in name and limits.matmul["fp4"].not_transposed else 1.0)
    assert mlx_cuda.calibrate().limits.matmul["fp4"].not_transposed == 0
    assert gpu.exists()


def test_an_interrupt_leaves_everything(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go: list[bool] = []
    monkeypatch.setattr(calibration, "forget", lambda: let_go.append(True))

    def interrupted(_: DispatchThresholds, name: str, __: int) -> float:
        if name == "fp4: gathered":
            raise KeyboardInterrupt
        return 1.0

    times(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        mlx_cuda.calibrate()
    assert known.limits(GPU) is PLAIN
    assert let_go
    assert not gpu.exists()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_native, "on_cuda", lambda: False)
    with pytest.raises(mlx_cuda.BackendError, match=r"\[calibrate\] There is nothing to measure: MLX offers no CUDA GPU here"):
        mlx_cuda.calibrate()
    assert main(["tune"]) == 1
    assert "MLX offers no CUDA GPU here" in capsys.readouterr().out
    assert main(["tune", "--reset"]) == 0
    assert "no stored results" in capsys.readouterr().out


def test_a_gpu_that_is_another_one(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "gpu_name", lambda: "")
    with pytest.raises(ValueError, match=r"\[calibrate\] MLX_CUDA_CAPABILITY"):
        mlx_cuda.calibrate()
    assert main(["tune"]) == 1
    assert not gpu.exists()


POINTS: list[calibration.Point] = [(16, {16: 1.0, 0: 2.0}), (32, {32: 1.1, 0: 1.0}), (64, {64: 1.0, 0: 1.5}), (128, {128: 3.0, 0: 2.0})]


def test_one_wrong_time_decides_nothing() -> None:
    assert best(POINTS, (0, 16, 32, 64, 128), 0) == 64
    assert gain(POINTS, 0, 64) == 2.0
    assert best(POINTS, (0, 16, 32, 64, 128), 100) == 100  # as good
    assert best(POINTS[:1], (0, 16), 16) == 16


def test_engines() -> None:
    points: list[calibration.Point] = [(1, {"flash": 1.0, "cudnn": 1.01}), (2, {"flash": 1.0, "cudnn": 0.99})]
    assert best(points, ("flash", "cudnn"), "cudnn") == "cudnn"
    assert best([(1, {"flash": 1.0, "cudnn": 0.9})], ("flash", "cudnn"), "flash") == "cudnn"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_every_rule_is_about_a_limit(rule: Rule) -> None:
    value = rule.value(PLAIN)
    other = rule.engines[-1] if rule.engines else 7
    assert rule.value(rule.with_value(PLAIN, other)) == other
    assert rule.value(PLAIN) == value
    assert list(rule.sizes) == sorted(rule.sizes)


def test_the_command(gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times(monkeypatch, by_engine)
    assert main(["tune"]) == 0
    out, err = capsys.readouterr()
    assert "RTX: 3 thresholds changed" in out
    assert "attention: chunks         flash -> cudnn  up to 1.25x" in out
    assert "affine 4: upstream" in err
    assert main(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "no tuned matmul algorithms" in shown
    assert "RTX (driver 13.0, mlx 0.32.4, mlx_cuda" in shown
    assert "upstream 256" in shown
    assert main(["tune", "--reset"]) == 0
    assert "stored results of RTX are deleted" in capsys.readouterr().out
    assert limits_file.read(gpu) == {}
    assert main(["tune", "--show"]) == 0
    assert "no tuned thresholds" in capsys.readouterr().out


def test_a_bar_on_a_terminal() -> None:
    terminal = io.StringIO()
    monitor: Any = terminal
    monitor.isatty = lambda: True
    show = command.bar(terminal)
    show(0.5, "attention: chunks")
    show(1.0, "")
    assert terminal.getvalue().startswith("\r[###############...............]  50%  attention: chunks")
    assert terminal.getvalue().endswith("\n")
