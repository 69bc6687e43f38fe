"""``python -m benchmarks``: measure, and make tables and charts of what was measured.

Exit codes: 0 ok, 1 a case failed (the others are recorded), 2 usage or environment.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Case
    from .record import CaseResult
    from .timing import Settings, TorchEngine

RESULTS = Path(__file__).parent / "results"
GROUPS = ("attention", "decode", "linear", "swiglu")


class Log:
    """Progress on stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, message: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {message}", file=sys.stderr, flush=True)


def import_torch(log: Log, *, wanted: bool) -> Any | None:
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


def measure_case(group: str, case: Case, torch: TorchEngine | None, settings: Settings) -> CaseResult:
    """Prepare, check, then time; whatever goes wrong becomes the case's error."""
    import mlx.core as mx

    from tests.gpu.support import primitives

    from .cases.base import WrongResultError
    from .record import CaseResult, SideResult
    from .timing import measure

    header: dict[str, Any] = {"group": group, "name": case.name, "unit": case.unit, "work": case.work, "parameters": case.parameters()}
    try:
        prepared = case.prepare(torch)
        result = prepared.sides[0].call(*prepared.sides[0].inputs[0])
        header["primitives"] = sorted(primitives(result))
        if mx.cuda.is_available() and case.primitive not in header["primitives"]:
            raise WrongResultError(f"ours is composed of MLX's own operations here: {', '.join(header['primitives'])}")
        errors = header["errors"] = prepared.errors()
        if not errors["ours"] <= prepared.tolerance:
            raise WrongResultError(f"relative error {errors['ours']:.2e} is above {prepared.tolerance:.0e}")
        measured = measure(prepared.sides, result.nbytes, settings)
        if isinstance(failure := measured["ours"], Exception):
            raise failure
        return CaseResult(**header, sides={name: SideResult.of(outcome) for name, outcome in measured.items()})
    except Exception:
        return CaseResult(**header, error=traceback.format_exc().strip())


def run(args: argparse.Namespace) -> int:
    log = Log()
    try:
        import mlx.core as mx

        from . import provenance
        from .cases import GROUPS as CASES
        from .record import Results
        from .timing import Settings, TorchEngine
    except ImportError as error:
        print(f"error: {error}\n  cure: pip install 'mlx-cuda[cu13]' numpy, and start from the root of the checkout", file=sys.stderr)
        return 2

    torch = import_torch(log, wanted=not args.no_torch)
    known = provenance.collect(args.argv, torch=torch, commit_name=args.commit, wheel=args.wheel, quick=args.quick)
    if not args.quick and (known["native"] is None or "error" in known["native"]):
        reason = "MLX sees no CUDA GPU" if known["native"] is None else known["native"]["error"]
        print(f"error: {reason}\n  cure: run on a machine with an NVIDIA GPU; --quick tries the program out anywhere", file=sys.stderr)
        return 2
    output = args.output or RESULTS / default_name(known)
    results = Results(known)
    settings = Settings(repetitions=args.repetitions or (3 if args.quick else 9), batch_seconds=0.002 if args.quick else 0.02)
    engine = TorchEngine(torch) if torch else None
    mx.random.seed(0)

    for group in dict.fromkeys(args.case or GROUPS):
        for case in CASES[group](quick=args.quick):
            outcome = measure_case(group, case, engine, settings)
            results.cases.append(outcome)
            known["gpu_after"], known["loaded_libraries"] = provenance.gpu_state(), provenance.loaded_libraries()
            known["seconds"] = round(time.monotonic() - log.start, 1)
            results.save(output)
            log(summary(outcome))
            gc.collect()
            mx.clear_cache()
            if torch:
                torch.cuda.empty_cache()
    failed = [case.name for case in results.cases if case.error]
    log(f"{len(results.cases) - len(failed)} cases measured, {len(failed)} failed; results in {output}")
    return 1 if failed else 0


def default_name(known: dict[str, Any]) -> str:
    """Such as ``nvidia-h200-cu13.json``."""
    words = known["device"].lower().split()
    if known["native"] and "build" in known["native"]:
        words.append(f"cu{str(known['native']['build']['cuda']).split('.')[0]}")
    return "-".join([*words, *(["quick"] if known["quick"] else [])]) + ".json"


def summary(case: CaseResult) -> str:
    if case.error:
        return f"{case.group} {case.name}: FAILED\n{case.error}"
    sides = (
        f"{name} failed: {side.error}" if side.error else f"{name} {(side.median or 0) * 1e3:.3f} ms {case.rate(name):.2f} {case.unit}"
        for name, side in case.sides.items()
    )
    errors = ", ".join(f"{name} {error:.1e}" for name, error in case.errors.items())
    return f"{case.group} {case.name}: {' | '.join(sides)} (relative error: {errors})"


def table(args: argparse.Namespace) -> int:
    from .record import Results
    from .table import fill, sections

    results = Results.load(args.results)
    if args.update:
        args.update.write_text(fill(args.update.read_text("utf-8"), results), "utf-8")
    else:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in sections(results).items()))
    return 0


def chart(args: argparse.Namespace) -> int:
    from .chart import draw
    from .record import Results

    cases = Results.load(args.results).cases
    draw([case for case in cases if case.group in (args.case or GROUPS) and args.match in case.name], args.output)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        return command

    def add_case(command: argparse.ArgumentParser) -> None:
        command.add_argument("--case", action="append", choices=GROUPS, help="only this operation (may be given several times)")

    command = add("run", run, "Measure on this machine's GPU.")
    add_case(command)
    command.add_argument("--quick", action="store_true", help="tiny sizes, also without a GPU: proves that the program works")
    command.add_argument("-o", "--output", type=Path, help="results file (default: benchmarks/results/<device>-cu<major>.json)")
    command.add_argument("--repetitions", type=int, metavar="N", help="batches of each side (default: 9)")
    command.add_argument("--no-torch", action="store_true", help="leave torch out, as beside the CUDA 12 backend")
    command.add_argument("--commit", help="commit to record where there is no git (or MLX_CUDA_COMMIT)")
    command.add_argument("--wheel", type=Path, help="the wheel that is installed, to record its sha256")

    command = add("table", table, "Print the results as Markdown, or put them into a document.")
    command.add_argument("results", type=Path)
    command.add_argument("--update", type=Path, metavar="DOCUMENT", help="fill the marked blocks of this document instead")

    command = add("chart", chart, "Draw the results as an SVG.")
    command.add_argument("results", type=Path)
    add_case(command)
    command.add_argument("--match", default="", metavar="TEXT", help="only the cases whose name has this in it, such as L=8192")
    command.add_argument("-o", "--output", type=Path, required=True)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    args.argv = words
    try:
        return int(args.function(args))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was measured is in the results file", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
