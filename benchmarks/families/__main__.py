"""``python -m benchmarks.families``: every model of ``mlx_lm.models``, small and with random weights, with and without ``patch()``.

Each module has a process of its own, so that one that crashes stops no other, and several run at a time. Of each: the logits of a prompt
and of steps beside those in float32, what replays its steps, the engines of its calls, the tokens of a few requests at once, and the least
time of several turns. What runs beside it slows both sides; ``--jobs 1`` has the machine to itself.

Exit codes: 0 ok, 1 a model fails, is wrong or crashes where MLX's own side does not (the results say which), 2 usage or environment.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measuring import Log
from ..result_file import write
from .judging import BEGINS, summary, worse

if TYPE_CHECKING:
    from .walk import Lengths

CHECKOUT = Path(__file__).parents[2]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--family", nargs="+", metavar="MODULE", help="only these modules of mlx_lm.models (default: all that have a model)")
    add("--jobs", type=int, default=4, help="processes at a time (default: %(default)s)")
    add("--limit", type=float, default=300.0, metavar="SECONDS", help="of one module at most (default: %(default)s)")
    add("--prompt", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    add("--steps", type=int, default=32, help="greedy steps after it (default: %(default)s)")
    add("--turns", type=int, default=5, help="that each side is timed; 0: not at all (default: %(default)s)")
    add("--commit", help="name of the commit, where there is no checkout")
    add("--wheel", type=Path, help="the wheel that is installed, for its digest")
    add("--one", action="store_true", help=argparse.SUPPRESS)  # what the processes are started with
    add("-o", "--output", type=Path, help="results file (required)")
    return parser


def ended(code: int, text: str) -> dict[str, str]:
    """Why a process gave no result, and which side it was at."""
    lines = text.strip().splitlines()
    sides = [line.removeprefix(BEGINS) for line in lines if line.startswith(BEGINS)]
    told = [line for line in lines if not line.startswith("  fix: ")]
    reason = f"crashes: {signal.Signals(-code).name}" if code < 0 else told[-1] if told else f"ended with {code}"
    return {"failed": reason, "side": sides[-1] if sides else "none"}


def in_process(name: str, lengths: Lengths, limit: float) -> dict[str, Any]:
    """What ``walk`` finds of a module, or why it ended without."""
    words = ["--one", "--family", name, "--prompt", lengths.prompt, "--steps", lengths.steps, "--turns", lengths.turns]
    command = [sys.executable, "-m", "benchmarks.families", *map(str, words)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, cwd=CHECKOUT)
    except subprocess.TimeoutExpired:
        return {"family": name, "failed": f"took over {limit:.0f} s", "side": "none"}
    if done.returncode:
        return {"family": name, **ended(done.returncode, done.stderr)}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(words)
    if not args.one and not args.output:
        parser.error("-o is required")
    try:
        from ..provenance import collect
        from .sizes import LEFT_OUT
        from .walk import Lengths, families, walk

        known = families()
    except ImportError as error:
        print(f"error: {error}\n  fix: pip install 'mlx-cuda[cu13]' mlx-lm, and start from the root of the checkout", file=sys.stderr)
        return 2
    if unknown := set(args.family or known) - set(known):
        print(f"error: mlx_lm.models has no model called {', '.join(sorted(unknown))}, or it is left out: {LEFT_OUT}", file=sys.stderr)
        return 2
    lengths = Lengths(args.prompt, args.steps, args.turns)
    if args.one:
        print(json.dumps(walk(args.family[0], lengths)))
        return 0

    log, names = Log(), args.family or known
    results: dict[str, Any] = {
        "kind": "families",
        "provenance": collect(words, torch=None, commit_name=args.commit, wheel=args.wheel, quick=False),
        "settings": {"prompt": args.prompt, "steps": args.steps, "turns": args.turns, "jobs": args.jobs},
        "left out": LEFT_OUT,
        "cases": [],
    }
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(in_process, name, lengths, args.limit): name for name in names}
        try:
            for index, done in enumerate(as_completed(running)):
                results["cases"].append(done.result())
                results["cases"].sort(key=lambda each: str(each["family"]))
                write(args.output, results)
                log(f"{index + 1}/{len(names)} {running[done]}: {summary(done.result())}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"interrupted; what was measured is in {args.output}", file=sys.stderr)
            return 130
    failed = {each["family"]: found for each in results["cases"] if (found := worse(each))}
    for name, reason in failed.items():
        log(f"WORSE than MLX's own: {name}: {reason}")
    log(f"{len(names)} models, {len(failed)} worse than MLX's own; results in {args.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
