"""Does the audit refuse what users' machines refuse? `nox -s fuzz-audit -- --count 2000 --seed 7` makes mutants of the built wheel.

ld.so loads the modules of a mutant against stubs of all that lies outside the wheel; pip and uv install it into empty folders. A mutant
that the audit takes, and that one of them refuses or makes something else of than of the good wheel, is an escape, and so is one on which
the audit breaks: it is kept in the folder `escapes`, and the exit code is 1. Then tests/ci/test_audit_fuzz.py gives the audit random bytes,
on which it must neither break nor hang. A seed gives its mutants and bytes again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ci import audit
from ci.errors import CheckFailed, CiError
from ci.wheelfile.wheel import read

from .mutants import Mutant, Subject
from .oracles import Loader, expected, oracles


class Fuzzer:
    """The good wheel, and what each oracle makes of it."""

    def __init__(self, wheel: Path, folder: Path, keep: Path, cuda: Sequence[str], arch: Sequence[str]) -> None:
        self.subject, self.folder, self.keep, self.cuda, self.arch = Subject(wheel), folder, keep, cuda, arch
        good = self.subject.unchanged(folder)
        self.oracles = oracles(self.subject, folder / "loaded")
        self.good = {name: oracle(good) for name, oracle in self.oracles.items()}
        refused_by = [name for name, made in self.good.items() if made is None] + ["the audit"] * (
            self.refused(wheel) or self.refused(good.path)
        )
        if refused_by:
            raise CheckFailed(f"{wheel.name} is no good wheel to begin with: {', '.join(refused_by)} refuses it")

    def refused(self, path: Path) -> bool:
        try:
            return any(True for _ in audit.examine(read(path), self.cuda, self.arch))
        except CiError:
            return True

    def tried(self, seed: str) -> tuple[str, bool, list[str]]:
        """The kind of a mutant, whether the audit refuses it, and who else does where the audit does not, or what broke."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            mutant = self.subject.mutant(seed, Path(folder))
            try:
                if self.refused(mutant.path):  # which needs no second opinion
                    return mutant.kind, True, []
                escapes = [f"the audit takes it; {found}" for name in self.oracles if (found := self._escape(name, mutant))]
            except Exception as error:  # a check that breaks does not refuse it
                escapes = [f"{type(error).__name__}: {error}"]
            if escapes:
                self.keep.mkdir(exist_ok=True)
                (self.keep / f"{seed.replace(':', '-')}.whl").write_bytes(mutant.path.read_bytes())
            return mutant.kind, False, escapes

    def _escape(self, name: str, mutant: Mutant) -> str:
        good, made = self.good[name], self.oracles[name](mutant)
        if not isinstance(self.oracles[name], Loader):
            good = expected(good, mutant.files)
        return f"{name} refuses it" if made is None else f"{name} makes something else of it" if made != good else ""


_fuzzer: list[Fuzzer] = []  # of a process


def _start(wheel: Path, folder: Path, *options: Any) -> None:
    own = folder / str(os.getpid())
    (own / "loaded").mkdir(parents=True)
    _fuzzer[:] = [Fuzzer(wheel, own, *options)]


def _tried(seed: str) -> tuple[str, bool, list[str]]:
    return _fuzzer[0].tried(seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nox -s fuzz-audit --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("wheel", type=Path, help="a finished Linux wheel of this checkout")
    add("--seed", default="1", help="another seed makes other mutants (default: %(default)s)")
    add("--count", type=int, default=2000, metavar="N", help="how many (default: %(default)s)")
    add("--examples", type=int, default=10_000, metavar="N", help="how many of random bytes for each test (default: %(default)s)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one for each core)")
    add("--cuda", nargs="+", default=(), metavar="VERSION", help="as for `python -m ci audit`: what a developer's build was asked for")
    add("--arch", nargs="+", default=(), metavar="ARCH", help="the same")
    add("--keep", type=Path, default=Path("escapes"), metavar="FOLDER", help="where escapes are kept (default: %(default)s)")
    args = parser.parse_args(arguments)
    figures, escapes = Counter[str](), 0
    seeds = [f"{args.seed}:{number}" for number in range(args.count)]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        own = (args.wheel.resolve(), Path(folder).resolve(), args.keep.resolve(), args.cuda, args.arch)
        try:
            _start(*own)
        except CiError as error:
            parser.error(str(error))
        with ProcessPoolExecutor(args.workers, initializer=_start, initargs=own) as pool:
            for seed, (kind, refused, found) in zip(seeds, pool.map(_tried, seeds, chunksize=8), strict=True):
                figures[f"{kind}: {'refused' if refused else 'taken'}"] += 1
                escapes += bool(found)
                if found:
                    print(f"seed {seed}: {kind}: {', '.join(found)}", flush=True)
    print(json.dumps(dict(sorted(figures.items())), indent=1))
    told = sum(count for kind, count in figures.items() if kind.endswith("refused"))
    print(f"{args.count} mutants with seed {args.seed}: {told} refused by the audit, {escapes} escapes", flush=True)
    tests = ["-q", f"--numprocesses={args.workers}", f"--examples={args.examples}", f"--hypothesis-seed={args.seed}"]
    broke = args.examples and pytest.main([*tests, str(Path(__file__).parents[1] / "test_audit_fuzz.py")])
    return bool(escapes or broke)


if __name__ == "__main__":
    sys.exit(main())
