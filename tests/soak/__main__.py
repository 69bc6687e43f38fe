"""mlx-lm's server under ``patch()``, over HTTP, with a model's real weights: ``python -m tests.soak FOLDER --minutes 20``.

Rounds of requests of all kinds come several at a time: completions and chats, streamed or not, greedy and sampled, of many lengths, some
beyond the model's window, some that are closed midway, some malformed. Then known requests are made alone, twice and as a stream, and the
server says what it holds. On a GPU all but a little of the memory is taken by another process from the middle of the run on.

Exit codes: 0 ok; 1 a wrong answer, a wrong status, other bits, growth, a hang, or no clean end; 2 usage or environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci.errors import CheckFailed, EnvironmentProblem, ending

from .judging import GROWTH
from .run import Soak


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="a folder that mlx-lm loads, as `python -m tests.models fetch` makes them")
    add("--minutes", type=float, default=20.0, help="stop after so long, and nine rounds at least (default: %(default)s)")
    add("--clients", type=int, default=8, help="requests at a time (default: %(default)s)")
    add("--requests", type=int, default=12, help="of a client in each round (default: %(default)s)")
    add("--longest", type=int, default=1000, help="tokens of a prompt, but for those beyond the window (default: %(default)s)")
    add("--tokens", type=int, default=64, help="of the known requests' answers (default: %(default)s)")
    add("--window", type=int, help="tokens beyond which some prompts are (default: max_position_embeddings of the model)")
    add("--fill", type=float, default=95.0, metavar="PERCENT", help="of the GPU's memory that is in use then; 0: no more than the server's")
    add("--fill-after", type=float, metavar="MINUTES", help="when that begins (default: half of the run)")
    add("--upstream", action="store_true", help="without patch(), to compare")
    add("--seed", type=int, default=0)
    add("--port", type=int, default=0, help="of the server (default: any that is free)")
    add("--say-every", type=float, default=10.0, metavar="SECONDS")
    add("--log", type=Path, help="what the server writes (default: a temporary file)")
    add("-o", "--output", type=Path, help="write the results there")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = make_parser().parse_args(arguments)
    if importlib.util.find_spec("mlx_lm") is None:
        raise EnvironmentProblem("mlx_lm is not installed", fix="pip install mlx-lm")
    if not (options.model / "config.json").is_file():
        raise EnvironmentProblem(f"{options.model} is no model's folder", fix="python -m tests.models fetch")
    config = json.loads((options.model / "config.json").read_text("utf-8"))
    config |= config.get("text_config", {})
    options.window = options.window or config.get("max_position_embeddings", 8192)
    import mlx.core as mx

    if not mx.cuda.is_available():
        options.fill = 0.0
    if options.fill_after is None:
        options.fill_after = options.minutes / 2
    if not options.port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options.port = free.getsockname()[1]
    return options


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def table(result: dict[str, Any]) -> str:
    requests = ", ".join(f"{count:,} {kind}" for kind, count in result["requests"].items())
    rows = {
        "time": f"{result['minutes']:.1f} minutes, {result['rounds']} rounds",
        "requests": f"{sum(result['requests'].values()):,}: {requests}",
        "tokens": f"{result['tokens']:,}; {result['steps replayed']:,} steps replayed",
        "answers": ", ".join(f"{count:,} {kind}" for kind, count in result["answers"].items()),
        "growth": ", ".join(f"{name} {by:+.1f} of at most {GROWTH[name]:.0f}" for name, by in result["growth"].items())
        or "too few readings",
        "shutdown": f"{result['seconds'].get('shutdown', float('nan')):.1f} s",
        "failures": f"{len(result['failures'])}",
    }
    return "\n".join(["| what | result |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def run(arguments: Sequence[str] | None) -> int:
    options = parse(arguments)
    log = options.log or Path(tempfile.mkstemp(prefix="soak-", suffix=".log")[1])
    say(f"{options.model}, port {options.port}, the server's log is {log}")
    soak = Soak(options, options.window, log, say)
    soak.run()
    from benchmarks.provenance import collect
    from benchmarks.result_file import write

    provenance = collect(sys.argv[1:], torch=None, commit_name=None, wheel=None, quick=False)
    provenance["command"][2] = "tests.soak"
    settings = {name: value for name, value in vars(options).items() if isinstance(value, (int, float, str))}
    result = {"kind": "soak", "provenance": provenance, "model": options.model.name, "settings": settings, **soak.to_json()}
    if options.output:
        write(options.output, result)
    print(table(result))
    for failure in soak.failures:
        print(f"FAILED: {failure}")
    sys.stdout.flush()
    if soak.failures:
        raise CheckFailed(f"{len(soak.failures)} failures")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return ending(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
