"""``python -m benchmarks``: measure, and make tables and charts of what was measured.

Exit codes: 0 ok, 1 a case failed (the others are recorded), 2 usage or environment.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measuring import Log, import_torch, measure_case, summary
from .result_file import read, write

if TYPE_CHECKING:
    from .record import CaseResult, Results

RESULTS = Path(__file__).parent / "results"
ATTENTION = (
    "attention", "masks", "window", "softcap", "sinks", "decode", "paged", "varlen", "backward", "mla", "float32", "small", "growing",
)  # fmt: skip
MATMUL = ("linear", "swiglu", "quantized", "experts", "fp8")
INSTALL = "pip install 'mlx-cuda[cu13]' numpy, and start from the root of the checkout"
ELSEWHERE = "run on a machine with an NVIDIA GPU; --quick tries the program out anywhere"
GROUPS = (*ATTENTION, *MATMUL, "linear_attention", "quantized_cache")


def run(args: argparse.Namespace) -> int:
    log = Log()
    try:
        import mlx.core as mx

        from . import provenance
        from .cases import GROUPS as CASES
        from .record import Results
        from .timing import Settings, TorchEngine
    except ImportError as error:
        raise ValueError(f"{error}\n  fix: {INSTALL}") from error

    torch = import_torch(log, wanted=not (args.no_torch or args.alone))
    known = provenance.collect(args.argv, torch=torch, commit_name=args.commit, wheel=args.wheel, quick=args.quick)
    if not args.quick and (known["native"] is None or "error" in known["native"]):
        reason = "MLX sees no CUDA GPU" if known["native"] is None else known["native"]["error"]
        raise ValueError(f"{reason}\n  fix: {ELSEWHERE}")
    output = args.output or RESULTS / default_name(known)
    groups = list(dict.fromkeys(args.case or GROUPS))
    results = Results(known)
    if args.keep and output.exists():
        results.cases = kept(Results.load(output), known, groups)
    settings = Settings(repetitions=args.repetitions or (1 if args.quick else 6), batch_seconds=0.002 if args.quick else 0.03)
    engine = TorchEngine(torch) if torch else None
    mx.random.seed(0)
    gc.freeze()

    for group in groups:
        for case in CASES[group](quick=args.quick):
            outcome = measure_case(group, case, engine, settings, alone=args.alone)
            results.cases.append(outcome)
            known["seconds"] = round(time.monotonic() - log.start, 1)
            results.save(output)
            log(summary(outcome))
            gc.collect()
            gc.freeze()  # torch's modules alone would make each of the next collections take long
            mx.clear_cache()
            if torch:
                torch.cuda.empty_cache()
    gc.unfreeze()
    if args.keep:
        results.cases.sort(key=lambda case: GROUPS.index(case.group))
    known["gpu_after"], known["loaded_libraries"] = provenance.gpu_state(), provenance.loaded_libraries()
    results.save(output)
    failed = [case.name for case in results.cases if case.error]
    for text in warnings(results.cases):
        log(text)
    log(f"{len(results.cases) - len(failed)} cases measured, {len(failed)} failed; results in {output}")
    return 1 if failed else 0


def prepare(args: argparse.Namespace) -> int:
    log = Log()
    try:
        import mlx.core as mx

        from .cases import GROUPS as CASES
        from .prepare import cache_folder, default_processes, jobs_of, prepare_all
    except ImportError as error:
        raise ValueError(f"{error}\n  fix: {INSTALL}") from error
    if not args.quick and not mx.cuda.is_available():
        raise ValueError(f"MLX sees no CUDA GPU\n  fix: {ELSEWHERE}")
    jobs = jobs_of(list(dict.fromkeys(args.case or GROUPS)), lambda group: CASES[group](quick=args.quick))
    processes = args.processes or default_processes()
    log(f"{len(jobs)} cases in up to {processes} processes; what they compile goes to {cache_folder()}")
    failed = prepare_all(jobs, processes, log, quick=args.quick, torch=not args.no_torch)
    log(f"{len(jobs) - len(failed)} cases prepared, {len(failed)} failed; `run` will compile for those itself")
    return 1 if failed else 0


def kept(earlier: Results, known: dict[str, Any], groups: Sequence[str]) -> list[CaseResult]:
    """The cases of an earlier run of the same build on the same kind of machine, but for the groups that are measured anew."""
    from .record import SAME, builds_of

    before = earlier.provenance
    for name in (*SAME, "wheel", "commit"):
        if before[name] != known[name]:
            raise ValueError(f"the results to keep are of another {name}: {before[name]}, not {known[name]}")
    known["earlier_runs"] = [
        *before.get("earlier_runs", []),
        {name: before.get(name) for name in ("date", "command", "seconds", "gpu_before")},
    ]
    cases = [case for case in earlier.cases if case.group not in groups]
    known["earlier_builds"] = builds_of(cases, before.get("earlier_builds", {}))
    return cases


def default_name(known: dict[str, Any]) -> str:
    """Such as ``nvidia-h200-cu13.jsonl``."""
    words = known["device"].lower().split()
    if known["native"] and "build" in known["native"]:
        words.append(f"cu{str(known['native']['build']['cuda']).split('.')[0]}")
    return "-".join([*words, *(["quick"] if known["quick"] else [])]) + ".jsonl"


def warnings(cases: Sequence[CaseResult]) -> list[str]:
    """What nobody should have to look for in a long log."""
    slower = [case for case in cases if (case.speedup("upstream") or 1.0) < 1.0]
    return [
        *(f"UNAVAILABLE {case.group} {case.name}: {case.unavailable}" for case in cases if case.unavailable),
        *(
            f"SLOWER than MLX, {kind} the noise: {case.group} {case.name}: {case.speedup('upstream'):.3f}x"
            for kind in ("beyond", "within")
            for case in slower
            if case.behind() == (kind == "beyond")
        ),
    ]


def join(args: argparse.Namespace) -> int:
    from .decoding import join_models
    from .record import Results

    data = read(args.results)
    if data["kind"] == "models":
        count = join_models(data, read(args.earlier, "models"))
        write(args.results, data)
        print(f"{count} models of {args.earlier} added to those of {args.results}")
        return 0
    results = Results.load(args.results)
    own = len(results.cases)
    results.join(Results.load(args.earlier))
    results.cases.sort(key=lambda case: GROUPS.index(case.group))
    results.save(args.results)
    print(f"{len(results.cases) - own} cases of {args.earlier} added to the {own} of {args.results}")
    return 0


def table(args: argparse.Namespace) -> int:
    from .record import Results
    from .table import fill, sections

    results = Results.load(args.results)
    if args.update:
        args.update.write_text(fill(args.update.read_text("utf-8"), results), "utf-8")
    else:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in sections(results).items()))
    return 0


def compare(args: argparse.Namespace) -> int:
    from .record import Results
    from .table import compared_table

    print(compared_table([Results.load(path) for path in args.first], [Results.load(path) for path in args.second]))
    return 0


def targets(args: argparse.Namespace) -> int:
    from .record import Results
    from .targets import ATTENTION, MATMUL, targets_table

    results = Results.load(args.results)
    print(f"## Attention\n\n{targets_table(ATTENTION, results)}\n\n## Matmul\n\n{targets_table(MATMUL, results)}\n")
    print("\n".join(warnings(results.cases)) or "no case is slower than MLX")
    return 0


def gallery(args: argparse.Namespace) -> int:
    from .gallery import gallery_table

    return _put(args, {"gallery": gallery_table()})


def platforms(args: argparse.Namespace) -> int:
    from .platforms import load, platform_tables

    return _put(args, platform_tables(load()))


def models(args: argparse.Namespace) -> int:
    from .table import models_table

    return _put(args, {"models": models_table(read(args.results, "models"))})


def decoding(args: argparse.Namespace) -> int:
    from .decoding import decoding_tables, draw_decoding
    from .models import SHAPES

    results = read(args.results, "models")
    if args.picture:
        draw_decoding(results, SHAPES, args.picture)
    return _put(args, decoding_tables(results, SHAPES))


def serving(args: argparse.Namespace) -> int:
    from .serving_table import serving_tables

    return _put(args, serving_tables([read(path, "serving") for path in args.results]))


def parallel(args: argparse.Namespace) -> int:
    from .parallel import parallel_tables

    return _put(args, parallel_tables([read(path, "models") for path in args.results]))


def families(args: argparse.Namespace) -> int:
    from .families.table import family_tables

    return _put(args, family_tables(read(args.results, "families")))


def invariance(args: argparse.Namespace) -> int:
    from .invariance import table

    return _put(args, {"invariance": table(read(args.results, "invariance")["cases"])})


def check(args: argparse.Namespace) -> int:
    from .cells import console

    return _put(args, {"check": "\n\n".join(console(path.read_text("utf-8")) for path in args.results)})


def gpus(args: argparse.Namespace) -> int:
    from .gpus import gpu_tables
    from .models import SHAPES

    return _put(args, gpu_tables(SHAPES))


def readme(args: argparse.Namespace) -> int:
    from .front_page import drawing, readme_blocks

    if args.picture:
        args.picture.write_text(drawing(), "utf-8")
    return _put(args, readme_blocks())


def numbers(args: argparse.Namespace) -> int:
    from .numbers import numbers as known
    from .numbers import update

    if args.update:
        print("\n".join(f"filled {path}" for path in update()) or "nothing changed")
    else:
        print("\n".join(f"{name}: {value}" for name, value in known().items()))
    return 0


def pipeline(args: argparse.Namespace) -> int:
    import json

    from .pipeline import pipeline_table

    return _put(args, {"pipeline": pipeline_table(json.loads(args.results.read_text("utf-8")))})


def _put(args: argparse.Namespace, blocks: Mapping[str, str]) -> int:
    from .table import put

    return put(blocks, args.update)


def pictures(args: argparse.Namespace) -> int:
    from .pictures import draw_pictures
    from .record import Results

    for path in draw_pictures(Results.load(args.results), args.output):
        print(path)
    return 0


def timeline(args: argparse.Namespace) -> int:
    from .timeline import drawing

    args.output.write_text(drawing([read(path, "timeline") for path in args.results]), "utf-8")
    return 0


def chart(args: argparse.Namespace) -> int:
    from .chart import draw
    from .record import Results

    cases = Results.load(args.results).cases
    draw([case for case in cases if case.group in (args.case or GROUPS) and args.match in case.name], args.output)
    return 0


OPTIONS: dict[str, dict[str, Any]] = {  # of several commands
    "results": {"type": Path},
    "--case": {"action": "append", "choices": GROUPS, "help": "only this operation (may be given several times)"},
    "--quick": {"action": "store_true", "help": "tiny sizes, also without a GPU: proves that the program works"},
    "--update": {"type": Path, "metavar": "DOCUMENT", "help": "fill the marked blocks of this document instead"},
}


def _add(commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str, *options: str) -> Any:
    """A command with some of the options; the function that adds others."""
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(function=function)
    for option in options:
        command.add_argument(option, **OPTIONS[option])
    return command.add_argument


def _add_measuring(commands: Any) -> None:
    add = _add(commands, "run", run, "Measure on this machine's GPU.", "--case", "--quick")
    add("-o", "--output", type=Path, help="results file (default: benchmarks/results/<device>-cu<major>.jsonl)")
    add("--keep", action="store_true", help="keep the other groups of the results file, if it is of the same build and GPU")
    add("--repetitions", type=int, metavar="N", help="about as many batches of a side, at most (default: 6)")
    add("--no-torch", action="store_true", help="leave torch out, as beside the CUDA 12 backend")
    add("--alone", action="store_true", help="ours alone, to compare builds in processes of their own with `compare`")
    add("--commit", help="commit to record where there is no git (or MLX_CUDA_COMMIT)")
    add("--wheel", type=Path, help="the wheel that is installed, to record its sha256")

    text = "Compile beforehand, in several processes, what MLX and torch compile at a first call."
    add = _add(commands, "prepare", prepare, text, "--case", "--quick")
    add("--processes", type=int, metavar="N", help="at a time (default: as many as there are CPUs, at most 16)")
    add("--no-torch", action="store_true", help="leave torch out")

    add = _add(
        commands, "join", join, "Add the cases, or models, of an earlier build that were not measured again, marked with its commit."
    )
    add("results", type=Path, help="changed in place")
    add("earlier", type=Path)


def _add_tables(commands: Any) -> None:
    _add(commands, "table", table, "Print the results as Markdown, or put them into a document.", "results", "--update")
    text = "Print how many times as long ours takes in one build as in another, and which cases are apart."
    add = _add(commands, "compare", compare, text)
    for name in ("first", "second"):
        add(name, type=lambda text: list(map(Path, text.split(","))), help="results of a build, with commas for several runs")
    _add(commands, "targets", targets, "Print the targets beside the results, and every case that is slower than MLX.", "results")
    for name, function, text in (
        ("models", models, "Print the prefill results of `python -m benchmarks.models`, or put them into a document."),
        ("decoding", decoding, "The same of decoding, beside the bandwidth limit."),
        ("serving", serving, "Print what `python -m benchmarks.serving` measured, also several files of it, or put it into a document."),
        ("parallel", parallel, "Print what `python -m benchmarks.models` measured on one and on several GPUs, or put it into a document."),
        ("families", families, "Print what `python -m benchmarks.families` found of mlx-lm's models, or put it into a document."),
        ("invariance", invariance, "Print what `python -m benchmarks.invariance` measured, or put it into a document."),
        ("check", check, "Print what `python -m mlx_cuda check` has printed into files, or put it into a document."),
        ("pipeline", pipeline, "Print what `nox -s pipeline` measured, or put it into a document."),
        ("gallery", gallery, "Print which engine serves which case, or put it into a document."),
        ("platforms", platforms, "Print what ran where, by docs/results/platforms.toml, or put it into a document."),
        ("gpus", gpus, "Print the dispatch thresholds and bandwidth limits of GPUs, or put them into a document."),
        ("readme", readme, "Print the numbers of the README, by committed results, or put them into it."),
    ):
        add = _add(commands, name, function, text, "--update")
        if function not in {gallery, platforms, gpus, readme}:
            add("results", type=Path, nargs="+" if function in {serving, parallel, check} else None)
        if function in {decoding, readme}:
            add("--picture", type=Path, metavar="SVG", help="draw it too")

    add = _add(commands, "numbers", numbers, "Print the numbers that sentences of the documents may have, by name and committed results.")
    add("--update", action="store_true", help="put them into all documents instead")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_measuring(commands)
    _add_tables(commands)
    add = _add(commands, "pictures", pictures, "Draw the pictures of the documents.", "results")
    add("-o", "--output", type=Path, required=True, metavar="FOLDER")
    add = _add(
        commands, "timeline", timeline, "Draw what `python -m benchmarks.timeline` measured of each build, earlier ones first, as an SVG."
    )
    add("results", type=Path, nargs="+")
    add("-o", "--output", type=Path, required=True, metavar="SVG")
    add = _add(commands, "chart", chart, "Draw the results as an SVG.", "results", "--case")
    add("--match", default="", metavar="TEXT", help="only the cases whose name has this in it, such as L=8192")
    add("-o", "--output", type=Path, required=True)
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
