"""``python -m ci wheel``: build, repair and audit a wheel, with one command.

Installs missing toolkits first. Prints a table of the wheel's contents and of the seconds of each stage. The wheel is written to the output
directory only if its audit passes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from . import audit, console, device, matrix, process, toolkit
from .build import build, compiler
from .errors import CheckFailed
from .matrix import gpu
from .repair import PLAT_HELP, repair

if TYPE_CHECKING:
    from .wheelfile.facts import WheelFacts


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    console.stage(name)
    start = time.monotonic()
    yield
    seconds[name] = time.monotonic() - start


def make_wheel(
    versions: Sequence[str],
    requested: Sequence[str],
    output: Path,
    *,
    plat: str = "auto",
    platform: matrix.Platform | None = None,
) -> tuple[Path, dict[str, float]]:
    """Provision, build, repair and audit; return the finished wheel and the seconds of each stage.

    The wheel reaches ``output`` only when its audit has passed.
    """
    if list(requested) == ["native"]:
        requested = [name for capability in gpu.capabilities() for name in matrix.load().device.native(capability)]
    platform = platform or matrix.host_platform()
    seconds: dict[str, float] = {}
    # An unknown name, or a platform that nothing here compiles for, is found out before anything is made.
    compiler.toolchain(platform)
    device.plan.sources(requested)
    output.mkdir(parents=True, exist_ok=True)
    with _stage("toolkit", seconds):
        for name, where in toolkit.roots.needed(versions, platform).items():
            toolkit.install([name], where)
    with tempfile.TemporaryDirectory(dir=output, prefix=".partial-") as folder:
        with _stage("build", seconds):
            built = build.build_wheel(versions, requested, Path(folder) / "built", platform=platform)
        with _stage("repair", seconds):
            repaired = repair(built, Path(folder) / "repaired", plat=plat)
        with _stage("audit", seconds):
            violations = audit.audit_wheel(repaired, cuda=versions, arch=requested)
        if violations:
            raise CheckFailed("\n".join(["the audit found:", *map(str, violations)]))
        return repaired.replace(output / repaired.name), seconds


def show(facts: WheelFacts, seconds: dict[str, float]) -> None:
    """Print the table of a finished wheel."""
    table = console.table(title=facts.file, show_header=False)
    table.add_row("tag", " ".join(facts.tags))
    table.add_row("size", f"{facts.size / 2**20:.2f} MiB of {matrix.load().size_budget_mib} MiB")
    table.add_row("device code", f"{facts.device.size / 2**20:.2f} MiB in {len(facts.device.fatbins)} fatbins")
    table.add_row("SASS", " ".join(f"sm_{arch}" for arch in facts.device.sass) or "none")
    table.add_row("PTX", " ".join(f"compute_{arch}" for arch in facts.device.ptx) or "none")
    for module in facts.modules:
        table.add_section()
        table.add_row("native module", f"{module.member} ({module.size / 2**20:.2f} MiB)")
        table.add_row("needs", "\n".join(module.needed))
        table.add_row("RPATH", "\n".join(module.rpath))
        versions = {"GLIBC": module.glibc, "GLIBCXX": module.glibcxx}
        table.add_row("symbol versions", " ".join(f"{name}_{version}" for name, version in versions.items() if version))
    table.add_section()
    for name, value in seconds.items():
        table.add_row(f"{name}, seconds", f"{value:.1f}")
    table.add_row("total, seconds", f"{sum(seconds.values()):.1f}")
    console.show(table)


def run(args: argparse.Namespace) -> int:
    wheel, seconds = make_wheel(build.selected(args), args.arch, args.output, plat=args.plat, platform=matrix.platform(args.platform))
    facts = audit.describe(wheel)
    if args.json:
        print(json.dumps({"wheel": str(wheel), "seconds": seconds, "facts": asdict(facts)}, indent=2))
    else:
        show(facts, seconds)
        print(wheel)
        for version in build.selected(args):
            install = process.shown(["pip", "install", f"{wheel}[{matrix.load().cuda[version].extra}]"])
            print(f"CUDA {version}: {install}", file=sys.stderr)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    build.add_selection(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("wheelhouse"), help="output directory (default: wheelhouse)")
    parser.add_argument("--plat", default="auto", metavar="TAG", help=PLAT_HELP)
    console.add_json(parser, "facts and seconds")
