"""A stub of the driver's library, ``libcuda.so.1``, to link against where there is no driver.

It is written directly as a minimal ELF shared object, so that any machine makes the stub of any platform, without a compiler.
Every function returns CUDA_ERROR_STUB_LIBRARY: a program that runs with the stub reports that the driver is missing.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

ERROR = 34  # CUDA_ERROR_STUB_LIBRARY: "the CUDA driver that the application has loaded is a stub library"

# e_machine, and the instructions of `return ERROR`.
_MACHINES = {
    "x86_64": (62, bytes([0xB8, ERROR, 0, 0, 0, 0xC3])),  # mov eax, 34; ret
    "aarch64": (183, struct.pack("<II", 0x52800000 | ERROR << 5, 0xD65F03C0)),  # mov w0, #34; ret
}

_PAGE = 0x10000  # the largest page size of either machine


def driver_functions(header: Path) -> list[str]:
    """The functions that ``cuda.h`` declares, under all names: ``cuMemAlloc``, ``cuMemAlloc_v2``, per-thread-stream ``_ptsz``."""
    text = header.read_text("utf-8", "replace")
    names = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
    for plain, target in re.findall(r"^\s*#\s*define\s+(cu[A-Z]\w*)\s+(\S.*?)\s*$", text, re.MULTILINE):
        if match := re.fullmatch(r"__CUDA_API_(PTDS|PTSZ)\((\w+)\)", target):
            names |= {plain, match[2], f"{match[2]}_{match[1].lower()}"}
        elif re.fullmatch(r"cu[A-Z]\w*", target):
            names |= {plain, target}
    return sorted(names)


def write(folder: Path, machine: str, soname: str, functions: list[str]) -> None:
    """Write the stub into ``folder``, under its soname and under the name that the linker looks for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (soname, soname.partition(".so")[0] + ".so"):
        (folder / name).write_bytes(shared_object(machine, soname, functions))


@dataclass
class _Section:
    name: str
    type: int
    flags: int
    data: bytes
    link: int = 0
    info: int = 0
    align: int = 8
    entry: int = 0
    offset: int = 0


def _elf_hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value & 0xFFFFFFFF


def shared_object(machine: str, soname: str, functions: list[str]) -> bytes:
    """A shared object that exports ``functions``, all of which are the same few instructions."""
    e_machine, code = _MACHINES[machine]
    strings = bytearray(b"\0")
    offsets = []
    for name in [*functions, soname]:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"

    count = len(functions) + 1  # the first symbol is the empty one
    buckets = [0] * max(1, count // 4)
    chains = [0] * count
    for index, name in enumerate(functions, start=1):
        bucket = _elf_hash(name) % len(buckets)
        chains[index], buckets[bucket] = buckets[bucket], index

    # The order is that of the file. Addresses equal offsets, except in the writable segment, which starts a page later.
    symbols = _Section(".dynsym", 11, 2, b"\0" * 24 * count, link=3, info=1, entry=24)
    sections = [
        _Section(".hash", 5, 2, struct.pack(f"<{2 + len(buckets) + count}I", len(buckets), count, *buckets, *chains), link=2, entry=4),
        symbols,
        _Section(".dynstr", 3, 2, bytes(strings), align=1),
        text := _Section(".text", 1, 6, code, align=16),
        dynamic := _Section(".dynamic", 6, 3, b"\0" * 16 * 7, link=3, entry=16),
        names := _Section(".shstrtab", 3, 0, b"", align=1),
    ]
    names.data = b"\0" + b"".join(section.name.encode() + b"\0" for section in sections)

    position = 64 + 56 * 4  # the file's header and four program headers
    for section in sections:
        position += -position % section.align
        section.offset = position
        position += len(section.data)
    section_headers = position + -position % 8

    symbols.data = b"\0" * 24 + b"".join(
        struct.pack("<IBBHQQ", offset, 0x12, 0, sections.index(text) + 1, text.offset, len(code)) for offset in offsets[:-1]
    )
    hash_table, string_table = sections[0], sections[2]
    tags = [(14, offsets[-1]), (4, hash_table.offset), (5, string_table.offset), (6, symbols.offset), (10, len(strings)), (11, 24)]
    dynamic.data = b"".join(struct.pack("<QQ", *tag) for tag in tags) + b"\0" * 16

    # Load what is read and run, then what is written (the loader relocates .dynamic in place); name .dynamic; no executable stack.
    segments = [
        struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, dynamic.offset, dynamic.offset, _PAGE),
        struct.pack("<IIQQQQQQ", 1, 6, dynamic.offset, *[dynamic.offset + _PAGE] * 2, *[len(dynamic.data)] * 2, _PAGE),
        struct.pack("<IIQQQQQQ", 2, 6, dynamic.offset, *[dynamic.offset + _PAGE] * 2, *[len(dynamic.data)] * 2, 8),
        struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16),
    ]
    image = bytearray(b"\x7fELF\2\1\1" + b"\0" * 9)
    image += struct.pack(
        "<HHIQQQIHHHHHH", 3, e_machine, 1, 0, 64, section_headers, 0, 64, 56, len(segments), 64, len(sections) + 1, len(sections)
    )
    image += b"".join(segments)
    for section in sections:
        image += b"\0" * (section.offset - len(image)) + section.data
    image += b"\0" * (section_headers - len(image) + 64)
    for section in sections:
        address = section.offset + _PAGE * (section is dynamic) if section.flags else 0
        name_offset = names.data.index(section.name.encode() + b"\0")
        image += struct.pack(
            "<IIQQQQIIQQ", name_offset, section.type, section.flags, address, section.offset, len(section.data),
            section.link, section.info, section.align, section.entry,
        )  # fmt: skip
    return bytes(image)
