"""``python -m ci resources``: print registers, spills and shared memory of each kernel.

Reads from the SASS of each kernel: registers, threads, static shared memory, the stack frame (spilled registers, and arrays that do not
fit in registers), and the number of blocks per multiprocessor that it is written for. The values are checked against every GPU that runs
the code (ci/matrix/gpus.toml) and printed as a table. No GPU is needed. The SASS comes from the cache of compiled device code.

Exit codes: 0 success, 1 a kernel needs more than a GPU has, 2 usage or environment.
"""

from __future__ import annotations

import argparse
import io
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from ..device import plan, store
from ..errors import CheckFailed, EnvironmentProblem
from ..files import tomllib, whole
from ..matrix import REPOSITORY, architecture_order

GPUS = REPOSITORY / "ci" / "matrix" / "gpus.toml"
REGION = re.compile(r"(<!-- results: (gpus|resources) -->\n).*?(<!-- end of results -->)", re.DOTALL)
REGISTERS = 65536  # of a multiprocessor, on every GPU, which gives them to warps by
UNIT = 256
MOST_REGISTERS = 255  # of a thread
MOST_SHARED = 48 * 1024  # bytes that a kernel can have of its own, and what the system adds
SYSTEMS = 1024
MOST_THREADS = 1024  # of a block
# Attributes of the section .nv.info, as `cuobjdump --dump-elf` names them, and the format of those whose size comes before the value.
FRAME_SIZE, REGCOUNT, SIZED = 0x11, 0x2F, 0x04
ENTRY = re.compile(r"^\.visible \.entry (\w+)\(.*?^\)(.*?)^\{", re.MULTILINE | re.DOTALL)  # of PTX
BOUNDS = re.compile(r"\.(maxntid|minnctapersm) (\d+)")


@dataclass(frozen=True)
class Kernel:
    source: str
    architecture: str
    name: str
    registers: int  # of a thread
    threads: int  # of a block, at most
    shared: int  # bytes
    frame: int  # bytes of a thread's stack
    blocks: int  # of a multiprocessor, at least

    @property
    def block_registers(self) -> int:
        return self.threads // 32 * -(-self.registers * 32 // UNIT) * UNIT

    def beyond(self, capability: dict[str, Any]) -> Iterator[str]:
        """Yield the resources that it needs and a multiprocessor lacks."""
        if self.registers > MOST_REGISTERS:
            yield f"{self.registers} registers a thread of {MOST_REGISTERS}"
        if self.shared > MOST_SHARED + SYSTEMS:
            yield f"{self.shared} bytes of shared memory of {MOST_SHARED}"
        for what, asked, there in (
            ("registers", self.blocks * self.block_registers, REGISTERS),
            ("threads", self.blocks * self.threads, capability["threads"]),
            ("bytes of shared memory", self.blocks * self.shared, capability["shared"] * 1024),
        ):
            if asked > there:
                yield f"{asked} {what} of {there} for {self.blocks} blocks of {self.threads} threads"


@cache
def capabilities() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads(GPUS.read_text("utf-8"))["capability"])


def launch_bounds(ptx: str) -> dict[str, tuple[int, int]]:
    """Return for each kernel the most threads of a block, and the fewest blocks of a multiprocessor."""
    found = {name: dict(BOUNDS.findall(directives)) for name, directives in ENTRY.findall(ptx)}
    return {name: (int(own.get("maxntid", MOST_THREADS)), int(own.get("minnctapersm", 1))) for name, own in found.items()}


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == SIZED:
            yield attribute, data[at : at + size]
            at += size


def kernels(source: str, architecture: str, cubin: bytes, ptx: str) -> Iterator[Kernel]:
    """The kernels of one cubin, which was assembled from this PTX."""
    elf = ELFFile(io.BytesIO(cubin))
    sections: dict[str, Any] = {section.name: section for section in elf.iter_sections()}
    symbols = [symbol.name for symbol in sections[".symtab"].iter_symbols()]
    known: dict[int, dict[str, int]] = {FRAME_SIZE: {}, REGCOUNT: {}}
    for attribute, value in _attributes(sections[".nv.info"].data()):
        if attribute in known:
            symbol, number = struct.unpack("<II", value)
            known[attribute][symbols[symbol]] = number
    for name, (threads, blocks) in launch_bounds(ptx).items():
        shared = sections.get(f".nv.shared.{name}")
        yield Kernel(
            source,
            architecture,
            name,
            registers=known[REGCOUNT][name],
            threads=threads,
            shared=shared["sh_size"] if shared else 0,
            frame=known[FRAME_SIZE][name],
            blocks=blocks,
        )


def all_kernels() -> list[Kernel]:
    """Those of the working tree."""
    kept = store.chosen(Path("build/device"))
    found: list[Kernel] = []
    for source in plan.sources(["declared"]):
        for architecture in source.targets.sass:
            cubin, ptx = kept.get(source.sass_key(architecture)), kept.get(source.ptx_key(source.fronts[architecture]))
            if cubin is None or ptx is None:
                missing = f"the store {kept.folder} has no SASS of {source.path.name} for sm_{architecture}"
                raise EnvironmentProblem(missing, fix="python -m ci device")
            found += kernels(source.name, architecture, cubin, ptx.decode())
    return found


def violations(found: Iterable[Kernel]) -> list[str]:
    return [
        f"{each.source}, {each.name} for sm_{each.architecture} on {capability['number']} ({capability['gpus']}): {problem}"
        for each in found
        for capability in capabilities()
        if each.architecture in capability["code"]
        for problem in each.beyond(capability)
    ]


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def gpu_table() -> str:
    """The resources that each GPU takes, and those of its multiprocessors."""
    rows = [["compute capability", "GPUs", "SASS", "threads", "shared memory, KiB"]]
    for each in capabilities():
        code = ", ".join(f"`sm_{name}`" for name in each["code"])
        rows.append([each["number"], each["gpus"], code, str(each["threads"]), str(each["shared"])])
    return _markdown(rows)


def kernel_table(found: Sequence[Kernel]) -> str:
    """A row for each source: the most registers that a kernel has, and how many have a stack frame, of so many bytes at most."""
    architectures = sorted({each.architecture for each in found}, key=architecture_order)
    rows = [["source", "threads", "blocks", *(f"`sm_{each}`" for each in architectures)]]
    for source in dict.fromkeys(each.source for each in found):
        own = [each for each in found if each.source == source]
        row = [f"`{source}`", *(_range(getattr(each, what) for each in own) for what in ("threads", "blocks"))]
        for architecture in architectures:
            here = [each for each in own if each.architecture == architecture]
            framed = [each.frame for each in here if each.frame]
            frames = f"; {len(framed)} of {len(here)}: {max(framed)} B" if framed else ""
            row.append(f"{max(each.registers for each in here)}{frames}" if here else "")
        rows.append(row)
    return _markdown(rows)


def _range(values: Iterable[int]) -> str:
    known = sorted(set(values))
    return " to ".join(dict.fromkeys((str(known[0]), str(known[-1]))))


def updated(document: str, found: Sequence[Kernel]) -> str:
    """The document with both tables of these kernels."""
    if not REGION.search(document):
        raise EnvironmentProblem("the document has no place for a table", fix="<!-- results: resources -->, <!-- end of results -->")
    made = {"gpus": gpu_table(), "resources": kernel_table(found)}
    return REGION.sub(lambda region: f"{region[1]}{made[region[2]]}\n{region[3]}", document)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--update", type=Path, metavar="DOCUMENT", help="write the tables into a document, such as docs/results/gpus.md")


def run(args: argparse.Namespace) -> int:
    found = all_kernels()
    if args.update:
        text = updated(args.update.read_text("utf-8"), found)
        with whole(args.update) as part:
            part.write_text(text, "utf-8")
    else:
        print(kernel_table(found))
    if problems := violations(found):
        raise CheckFailed("\n".join(problems))
    print(f"{len(found)} kernels need no more than their GPUs have", file=sys.stderr)
    return 0
