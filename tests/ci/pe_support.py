"""What the tests of DLLs share: changes of single fields of one."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import pefile

from .damage_support import later

Spoil = Callable[[bytes], bytes]


@later
def image(data: bytes, change: Callable[[Any], object]) -> bytes:
    """A change that pefile makes."""
    image = pefile.PE(data=data, fast_load=True)
    change(image)
    return bytes(image.write())


def header(**fields: int) -> Spoil:
    def change(image: Any) -> None:
        for name, value in fields.items():
            setattr(next(each for each in (image.OPTIONAL_HEADER, image.FILE_HEADER) if hasattr(each, name)), name, value)

    return image(change)


def section(number: int, **fields: int) -> Spoil:
    return image(lambda image: vars(image.sections[number]).update(fields))


def directory(name: str, address: int, size: int) -> Spoil:
    def change(image: Any) -> None:
        there = image.OPTIONAL_HEADER.DATA_DIRECTORY[pefile.DIRECTORY_ENTRY[f"IMAGE_DIRECTORY_ENTRY_{name}"]]
        there.VirtualAddress, there.Size = address, size

    return image(change)


def moved_header(data: bytes) -> bytes:
    """The header after other 1024 bytes, where the code was."""
    (old,) = struct.unpack_from("<I", data, 60)
    return data[:60] + struct.pack("<I", 1024) + data[64:1024] + data[old:1024] + data[2048 - old :]


def swapped_sections(data: bytes) -> bytes:
    image = pefile.PE(data=data, fast_load=True)
    first, second = (each.get_file_offset() for each in image.sections[:2])
    return data[:first] + data[second : second + 40] + data[first : first + 40] + data[second + 40 :]


@later
def filled_gap(data: bytes, number: int) -> bytes:
    """Bytes between those of a section that the linker made and the beginning of the next."""
    section = pefile.PE(data=data, fast_load=True).sections[number]
    place = section.PointerToRawData + section.Misc_VirtualSize
    return data[:place] + b"x" + data[place + 1 :]


def imports_of_python(data: bytes) -> tuple[int, int]:
    """Where the two tables of functions lie that are asked of python3.dll."""
    image = pefile.PE(data=data, fast_load=True)
    image.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_IMPORT"]])
    (entry,) = (each.struct for each in image.DIRECTORY_ENTRY_IMPORT if each.dll == b"python3.dll")
    return image.get_offset_from_rva(entry.OriginalFirstThunk), image.get_offset_from_rva(entry.FirstThunk)


def with_thunk(data: bytes, place: int, thunk: int) -> bytes:
    return data[:place] + struct.pack("<Q", thunk) + data[place + 8 :]


def by_ordinal(data: bytes) -> bytes:
    return with_thunk(data, imports_of_python(data)[0], 1 << 63 | 5)


def signed(data: bytes) -> bytes:
    """With an Authenticode signature's form behind it; the image's digest is in it, nobody's name is."""
    size = 8 + 32 + 8
    data = directory("SECURITY", len(data), size)(data)
    header = struct.unpack_from("<I", data, 0x3C)[0] + 24
    hashed = data[: header + 64] + data[header + 68 : header + 144] + data[header + 152 :]
    return data + struct.pack("<IHH", size, 0x200, 2) + hashlib.sha256(hashed).digest() + bytes(8)
