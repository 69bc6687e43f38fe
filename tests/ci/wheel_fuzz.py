"""``python -m tests.ci.wheel_fuzz WHEEL``: mutants of a finished wheel. What a loader or an installer refuses, the audit must refuse.

The oracle is what runs on users' machines: ld.so loads the modules of a mutant against stand-ins of all that lies outside the wheel, and
pip installs it into an empty folder. A mutant that either refuses and the audit takes is an escape: it is kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ci.audit import audit_wheel, describe
from ci.audit.binary.elf import ENTRY, HEADER, SEGMENT, Elf
from ci.audit.wheel import read
from ci.errors import CiError
from ci.files import record_digest
from ci.repair import sbom
from ci.trial import load, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Files = dict[str, bytes]

NUMBERS = (0, 1, 2, 7, 8, 0x18, 0x40, 0xFF, 0x1000, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**47, 2**63, 2**64 - 1)
TEXTS = ("METADATA", "WHEEL", "RECORD", "_build.json", "manifest.json", "_libraries.json")
SPECIAL = (
    b"\n",
    b"\r",
    b"\f",
    b"\0",
    b" ",
    b":",
    b",",
    b'"',
    b"\xff",
    b"Requires-Dist: evil\n",
    b"Root-Is-Purelib: true\n",
    b"Tag: py3-none-any\n",
)


@dataclass(frozen=True)
class Mutant:
    kind: str
    path: Path


def number(chance: random.Random, old: int, size: int) -> int:
    """Another one of so many bytes: one of those that matter, a neighbour, or one bit."""
    new = chance.choice([chance.choice(NUMBERS), old + chance.choice([-8, -1, 1, 8, 0x1000]), old ^ 1 << chance.randrange(8 * size)])
    return int(new % 256**size)


def at(data: bytes, chance: random.Random, place: int, size: int) -> bytes:
    old = int.from_bytes(data[place : place + size], "little")
    return data[:place] + number(chance, old, size).to_bytes(size, "little") + data[place + size :]


def elf(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """A number of the header, of a segment, of a dynamic entry, or of what the dynamic section leads to."""
    read_ = Elf(data)
    kind = chance.choice(["header", "segment", "dynamic", "symbol", "relocation", "version", "hash", "tail"])
    if kind == "header":
        return kind, at(
            data,
            chance,
            *chance.choice(
                [(4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (16, 2), (18, 2), (20, 4), (32, 8), (40, 8), (48, 4), (54, 2), (56, 2), (60, 2)]
            ),
        )
    if kind == "segment":
        place = HEADER.size + SEGMENT.size * chance.randrange(len(read_.segments))
        return kind, at(data, chance, *chance.choice([(place, 4), (place + 4, 4), *((place + each, 8) for each in range(8, 56, 8))]))
    if kind == "dynamic":
        place = read_.of(2)[0].offset + ENTRY.size * chance.randrange(len(read_.entries) + 1)
        return kind, at(data, chance, place + chance.choice([0, 8]), 8)
    if kind == "tail":
        return kind, chance.choice([data + b"evil", data[: -chance.randrange(1, 5000)], data[: len(data) // 2]])
    table, size, count = {
        "symbol": ("SYMTAB", 24, len(read_.symbols)),
        "relocation": ("RELA", 24, len(read_.relocations)),
        "version": ("VERNEED", 16, len(read_.needs)),
        "hash": ("GNU_HASH", 4, len(read_.symbols)),
    }[kind]
    place = read_.place(read_.tags[table]) + size * chance.randrange(count)
    return kind, at(data, chance, place + chance.randrange(size), chance.choice([1, 1, 4]))


def text(data: bytes, chance: random.Random) -> bytes:
    place, special = chance.randrange(len(data) + 1), chance.choice(SPECIAL)
    start = data.rfind(b"\n", 0, place) + 1
    return chance.choice(
        [
            data[:place] + special + data[place:],
            data[:start] + special + data[start:],
            data[:place] + data[place + 1 :],
            data[:start] + data[data.find(b"\n", place) + 1 :],
            special + data,
            data + special,
        ]
    )


def packed(files: Files, path: Path) -> None:
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in ((name, data) for name, data in files.items() if name != record):
            archive.writestr(_entry(name), data)
        archive.writestr(_entry(record), files[record])


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
    entry.create_system, entry.external_attr, entry.compress_type = 3, 0o100644 << 16, zipfile.ZIP_DEFLATED
    return entry


def recorded(files: Files) -> bytes:
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    rows = [f"{name},{record_digest(data)},{len(data)}\n" for name, data in files.items() if name != record]
    return "".join([*rows, f"{record},,\n"]).encode()


def mutant(good: Files, seed: int, path: Path) -> Mutant:
    """The mutant of a seed. RECORD is made right, and so is the SBOM where it can be: the fault itself is to be found."""
    chance, files = random.Random(seed), dict(good)  # noqa: S311  # a seed gives its mutant again
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    kind = chance.choice(["elf", "elf", "elf", "text", "zip"])
    if kind == "elf":
        name = chance.choice([each for each in files if each.endswith(".so")])
        part, files[name] = elf(files[name], chance)
        kind = f"elf: {part}"
        files[record] = recorded(files)
        packed(files, path)
        try:
            sbom.embed(path)
        except CiError:
            return Mutant(kind, path)
        files = dict(read(path).members)
    elif kind == "text":
        ending = chance.choice(TEXTS)
        name = next(each for each in files if each.endswith(ending))
        files[name] = text(files[name], chance)
        kind = f"text: {name.rpartition('/')[2]}"
        if name != record:
            files[record] = recorded(files)
    packed(files, path)
    if kind == "zip":
        data = path.read_bytes()
        (start,) = struct.unpack_from("<I", data, len(data) - 6)
        places = [start, data.find(b"PK\1\2", start + chance.randrange(len(data) - start)), len(data) - 22, 0]
        place = max(0, chance.choice(places)) + chance.randrange(22)
        path.write_bytes(at(data, chance, place, chance.choice([1, 2])))
    return Mutant(kind, path)


def refused_by_audit(path: Path, arch: Sequence[str]) -> bool:
    try:
        return bool(audit_wheel(path, arch=arch))
    except CiError:
        return True


def refused_by_loader(path: Path) -> bool:
    """Each module loads in a process of its own that is not this one: it may be killed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            load.prepare(read(path), Path(folder))
        except (CiError, KeyError, ValueError):
            return True
        script = [sys.executable, str(Path(folder) / "load.py")]
        done = subprocess.run(script, env=variables.for_code(Path(folder)), check=False, capture_output=True, timeout=120)
        return done.returncode != 0


def refused_by_pip(path: Path) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "uv", "tool", "run", "pip"] if not _has_pip() else [sys.executable, "-m", "pip"]
        options = [
            "install",
            "--no-deps",
            "--no-index",
            "--no-compile",
            "--ignore-installed",
            "--disable-pip-version-check",
            "--target",
            folder,
        ]
        return subprocess.run([*command, *options, str(path)], check=False, capture_output=True, timeout=120).returncode != 0


def _has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], check=False, capture_output=True).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="the first one (default: %(default)s)")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--keep", type=Path, default=Path("escapes"), help="where escapes are kept (default: %(default)s)")
    args = parser.parse_args(arguments)
    code = describe(args.wheel).device
    arch = [*code.sass, *(f"compute_{each}" for each in code.ptx)]
    good, figures, escapes = dict(read(args.wheel).members), Counter[str](), 0
    oracles: dict[str, Callable[[Path], bool]] = {"ld.so": refused_by_loader, "pip": refused_by_pip}
    if refused_by_audit(args.wheel, arch) or any(refused(args.wheel) for refused in oracles.values()):
        parser.error(f"{args.wheel} is not a good wheel to begin with")
    for seed in range(args.seed, args.seed + args.count):
        with tempfile.TemporaryDirectory() as folder:
            made = mutant(good, seed, Path(folder) / args.wheel.name)
            refused = refused_by_audit(made.path, arch)
            figures["refused by the audit" if refused else "taken by the audit"] += 1
            figures[f"{made.kind}: {'refused' if refused else 'taken'}"] += 1
            # What the audit refuses needs no second opinion.
            for name in [] if refused else [name for name, oracle in oracles.items() if oracle(made.path)]:
                escapes += 1
                args.keep.mkdir(exist_ok=True)
                (args.keep / f"{seed}-{name}.whl").write_bytes(made.path.read_bytes())
                print(f"seed {seed}: {made.kind}: {name} refuses what the audit takes", flush=True)
    print(json.dumps({"mutants": args.count, "escapes": escapes, **dict(sorted(figures.items()))}, indent=1))
    return escapes > 0


if __name__ == "__main__":
    sys.exit(main())
