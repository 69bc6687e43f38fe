"""How one case is measured: prepared, held to the reference, timed, and said in a line."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case
    from .cases.base import Prepared
    from .record import CaseResult
    from .timing import Settings, Side, TorchEngine


class Log:
    """Progress on stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, message: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {message}", file=sys.stderr, flush=True)


def import_torch(log: Callable[[str], None], *, wanted: bool) -> Any | None:
    """torch, if it is there and sees the GPU; otherwise the reason is said and its sides are left out."""
    if not wanted:
        log("torch is left out, as asked")
        return None
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.nn.attention")
    except (ImportError, OSError) as error:
        log(f"WITHOUT torch: {error}")
        return None
    if not torch.cuda.is_available():
        log("WITHOUT torch: it sees no CUDA device")
        return None
    return torch


def measure_case(group: str, case: Case, torch: TorchEngine | None, settings: Settings, *, alone: bool = False) -> CaseResult:
    """Prepare, check, then time, ours ``alone`` or every side; whatever goes wrong becomes the case's error.

    Where the installed package lacks what the case is about, the other sides are timed all the same.
    """
    from .record import CaseResult, SideResult
    from .timing import measure

    header: dict[str, Any] = {"group": group, "name": case.name, "unit": case.unit, "work": case.work, "parameters": case.parameters()}
    took, lap = header.setdefault("took", {}), time.monotonic()

    def note(part: str) -> None:
        nonlocal lap
        took[part], lap = round(time.monotonic() - lap, 2), time.monotonic()

    try:
        prepared = case.prepare(torch)
        if alone and not prepared.measure:
            prepared = replace(prepared, sides=prepared.sides[:1])
        note("prepare")
        result_bytes = check(case, prepared, header)
        note("check")
        measured = prepared.measure(settings) if prepared.measure else measure(prepared.sides, result_bytes, settings)
        note("measure")
        if isinstance(failure := measured["ours"], Exception) and "unavailable" not in header:
            raise failure
        sides = {name: SideResult.of(outcome) for name, outcome in measured.items()}
        return CaseResult(**header, sides=sides, numbers=prepared.numbers)
    except Exception:
        return CaseResult(**header, error=traceback.format_exc().strip())


def check(case: Case, prepared: Prepared, header: dict[str, Any]) -> int:
    """Hold the sides of MLX, and those of torch that get the same numbers, to the reference, and note who computes ours. Returns the
    bytes of one call's results.
    """
    from .cases.base import UnavailableError, WrongResultError, arrays_of
    from .timing import MlxEngine

    errors, result_bytes = header.setdefault("errors", {}), 0
    for side in prepared.sides:
        error_of = prepared.error if isinstance(side.engine, MlxEngine) else prepared.same_inputs.get(side.name)
        if error_of is None:
            continue
        own = side.name.partition(",")[0] == "ours"
        try:
            with side.context():
                result = side.call(*side.inputs[0])
                if side.name == "ours":
                    note_route(case, side, result, header)
            if side.name not in prepared.unchecked:
                errors[side.name] = error_of(result)
        except UnavailableError as error:
            header.update({"unavailable": str(error)} if side.name == "ours" else {})
            continue
        except Exception:
            if own:
                raise
            continue  # it will have no time either, and an error in its place
        result_bytes = max(result_bytes, sum(array.nbytes for array in arrays_of(result)))
        if own and side.name in errors and not errors[side.name] <= prepared.tolerance:
            raise WrongResultError(f"relative error {errors[side.name]:.2e} of {side.name} is above {prepared.tolerance:.0e}")
    return result_bytes


def note_route(case: Case, side: Side, result: Any, header: dict[str, Any]) -> None:
    """The primitives of the result, which is not evaluated yet, and the engine that the package says it chose for the same inputs."""
    import mlx.core as mx

    from tests.gpu.support import LAYOUT, primitives

    from .cases.base import WrongResultError, arrays_of

    header["primitives"] = sorted(primitives(*arrays_of(result)))
    if mx.cuda.is_available() and case.primitive and case.primitive not in header["primitives"]:
        raise WrongResultError(f"ours is composed of MLX's own operations here: {', '.join(header['primitives'])}")
    if side.explain:
        choice = side.explain(*side.inputs[0])
        header["engine"], header["reason"] = choice.engine, choice.reason
    elif case.primitive is None:  # explain() does not know it
        computing = set(header["primitives"]) - LAYOUT
        header["engine"] = computing.pop() if len(computing) == 1 else "fallback"


def summary(case: CaseResult) -> str:
    if case.error:
        return f"{case.group} {case.name}: FAILED\n{case.error}"
    sides = (
        f"{name} failed: {side.error}" if side.error else f"{name} {(side.median or 0) * 1e3:.3f} ms {case.rate(name):.2f} {case.unit}"
        for name, side in case.sides.items()
    )
    notes = [f"relative error: {', '.join(f'{name} {error:.1e}' for name, error in case.errors.items())}"] if case.errors else []
    notes += [f"engine: {case.engine}"] if case.engine else []
    notes += [f"{name} {number:g}" for name, number in case.numbers.items()]
    notes += [f"took {' + '.join(f'{seconds:g}' for seconds in case.took.values())} s"]
    return f"{case.group} {case.name}: {' | '.join(sides)} ({'; '.join(notes)})"
