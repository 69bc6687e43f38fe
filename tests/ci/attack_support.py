"""What is done to a good wheel, and what the audit must say of it. ``python -m tests.ci.attack_support`` writes the
table of docs/factory/audit.md.

RECORD and SBOM are made right after each change, so that the audit finds the fault itself and not its traces.
"""

from __future__ import annotations

import io
import json
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ci.files import record_digest
from ci.matrix import REPOSITORY, System
from ci.wheelfile.wheel import DEVICE, MANIFEST, SBOM

from .audit_support import CU12, CU13, DIST_INFO, METADATA, SUFFIXES, VERSION, WHEEL, Files, fatbin, replaced
from .damage_support import later

Entries = list[tuple[zipfile.ZipInfo, bytes]]
NN, INIT, VERSION_FILE = "mlx_cuda/nn.py", "mlx_cuda/__init__.py", "mlx_cuda/_version.py"
BOM = f"{DIST_INFO}/sboms/{SBOM}"
OTHER = f"{VERSION}9"
PACKAGE = f"mlx-cuda=={VERSION}\0".encode()
ANY: tuple[System, ...] = ("linux", "windows")


@dataclass(frozen=True)
class Fault:
    what: str
    found: str  # the checks that tell of it, or what the archive's judge says, or "unreadable"
    files: Callable[[Files], object] | None = None  # before the SBOM is made
    entries: Callable[[Entries], object] | None = None  # after it, before RECORD
    record: Callable[[list[str]], list[str]] = list
    data: Callable[[bytes], bytes] = bytes  # of the finished archive
    name: Callable[[str], str] = str  # of the file
    systems: tuple[System, ...] = ANY


def module(files: Files, cuda: Any = CU13) -> str:
    return next(name for name in files if name.startswith(f"mlx_cuda/{cuda.module}."))


def plain(files: Files) -> bytes:
    """A library that needs nothing; on Windows a module with a byte more. `loader` tells of either."""
    ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header = struct.pack("<2HI3QI6H", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    stack = struct.pack("<2I6Q", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)
    return ident + header + stack if module(files).endswith(".so") else files[module(files)] + b"behind"


def added(name: str, data: bytes = b"import os\n") -> Callable[[Files], None]:
    return lambda files: files.update({name: data})


def without(name: str) -> Callable[[Files], bytes]:
    return lambda files: files.pop(name)


def in_module(change: Callable[[bytes], bytes]) -> Callable[[Files], None]:
    return lambda files: files.update({module(files): change(files[module(files)])})


@later
def renamed_folder(files: Files, new: str) -> None:
    for name in [name for name in files if name.startswith(f"{DIST_INFO}/")]:
        files[name.replace(DIST_INFO, new)] = files.pop(name)


def info(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo("x", (2026, 1, 2, 3, 4, 6))
    entry.filename, entry.external_attr, entry.compress_type, entry.create_system = name, mode << 16, zipfile.ZIP_DEFLATED, 3
    return entry


@later
def entry(entries: Entries, /, name: str, mode: int = stat.S_IFREG | 0o644, data: bytes = b"import os\n", **fields: Any) -> None:
    """One entry more."""
    made = info(name, mode)
    for field, value in fields.items():
        setattr(made, field, value)
    entries.insert(0, (made, data))


@later
def changed(entries: Entries, /, name: str, **fields: Any) -> None:
    """Other fields of an entry that is there."""
    (found,) = (each for each, _ in entries if each.filename == name)
    for field, value in fields.items():
        setattr(found, field, value)


@later
def in_sbom(entries: Entries, change: Callable[[bytes], bytes | None]) -> None:
    """Another SBOM, or none."""
    ((place, (made, data)),) = ((number, each) for number, each in enumerate(entries) if each[0].filename == BOM)
    new = change(data)
    entries[place : place + 1] = [] if new is None else [(made, new)]


@later
def in_entry(entries: Entries, part: str, change: Callable[[bytes], bytes]) -> None:
    """Other data of the one whose name has this part."""
    ((place, (made, data)),) = ((number, each) for number, each in enumerate(entries) if part in each[0].filename)
    entries[place] = made, change(data)


def other_version(data: bytes) -> bytes:
    document = json.loads(data)
    document["metadata"]["component"]["version"] = OTHER
    return json.dumps(document).encode()


def other_digest(data: bytes) -> bytes:
    document = json.loads(data)
    for component in document["components"]:
        if component["name"].startswith("mlx_cuda/_cu13."):
            component["hashes"][0]["content"] = "0" * 64
    return json.dumps(document).encode()


# ------------------------------------------------------------------------------------------------------------ bytes of the archive

# Where the fields are that a local header repeats, in the directory; 2 less before the data.
FLAGS, METHOD, DATE, CRC, STORED, SIZE, EXTRA, COMMENT, DISK, OFFSET = 8, 10, 14, 16, 20, 24, 30, 32, 34, 42


def central(data: bytes, name: str = NN) -> int:
    return data.rindex(name.encode()) - 46


def local(data: bytes, name: str = NN) -> int:
    return data.index(name.encode()) - 30


def put(data: bytes, place: int, layout: str, *values: int) -> bytes:
    return data[:place] + struct.pack(layout, *values) + data[place + struct.calcsize(layout) :]


@later
def field(data: bytes, place: int, layout: str, value: int, *, before: bool = True, name: str = NN) -> bytes:
    """A field of an entry, in the directory and, where that is to agree, before the data too."""
    data = put(data, central(data, name) + place, layout, value)
    return put(data, local(data, name) + place - 2, layout, value) if before else data


def end(place: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    """A field of the record at the end."""
    return lambda data: put(data, len(data) - 22 + place, layout, value)


def inserted(data: bytes, place: int, new: bytes, *, grows: int = 0) -> bytes:
    """Bytes before the directory, or (`grows`) in it, and every number that says where something lies."""
    start = struct.unpack_from("<I", data, len(data) - 6)[0]
    size = struct.unpack_from("<I", data, len(data) - 10)[0]
    position = start
    while data[position : position + 4] == b"PK\1\2":
        (offset,) = struct.unpack_from("<I", data, position + OFFSET)
        if not grows and offset >= place:
            data = put(data, position + OFFSET, "<I", offset + len(new))
        position += 46 + sum(struct.unpack_from("<3H", data, position + 28))
    data = put(data, len(data) - 10, "<2I", size + (len(new) if grows else 0), start + (0 if grows else len(new)))
    return data[:place] + new + data[place:]


def start(data: bytes) -> int:
    return int(struct.unpack_from("<I", data, len(data) - 6)[0])


def hidden(name: str = "evil.py", contents: bytes = b"import os\n") -> bytes:
    """An entry with its header and data, which a reader of headers finds."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info(name), contents)
    return buffer.getvalue()[: start(buffer.getvalue())]


@later
def with_extra(data: bytes, new: bytes) -> bytes:
    """An extra field in the directory's header."""
    place = central(data)
    return inserted(put(data, place + EXTRA, "<H", len(new)), place + 46 + len(NN), new, grows=1)


def with_comment(data: bytes) -> bytes:
    place = central(data)
    return inserted(put(data, place + COMMENT, "<H", 4), place + 46 + len(NN), b"evil", grows=1)


def behind_the_stream(data: bytes) -> bytes:
    """Bytes that belong to an entry and that its compressed data ends before."""
    size = struct.unpack_from("<I", data, central(data) + STORED)[0]
    data = inserted(data, local(data) + 30 + len(NN) + size, b"evil")
    return field(STORED, "<I", size + 4)(data)


def same_place(data: bytes) -> bytes:
    offset = struct.unpack_from("<I", data, central(data, INIT) + OFFSET)[0]
    return put(data, central(data) + OFFSET, "<I", offset)


def nul(data: bytes) -> bytes:
    return data.replace(b"mlx_cuda/evilXpy", b"mlx_cuda/evil\0py")


UNICODE_PATH = struct.pack("<HHBI", 0x7075, 5 + 7, 1, zlib.crc32(NN.encode())) + b"evil.py"
LARGE = struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)  # where a large archive says that its directory is

# ------------------------------------------------------------------------------------------------------------ the table

FAULTS = (
    Fault("`evil.pth` at the top", "members", added("evil.pth")),
    Fault("a script, `.data/scripts/evil`", "members", added(f"mlx_cuda-{VERSION}.data/scripts/evil")),
    Fault("a file of the package in `.data/purelib`", "members", added(f"mlx_cuda-{VERSION}.data/purelib/{NN}")),
    Fault("a second package", "members", added("evil/__init__.py")),
    Fault("a module at the top, `mlx.py`", "members", added("mlx.py")),
    Fault("bytecode in `__pycache__`", "members", added("mlx_cuda/__pycache__/nn.cpython-312.pyc")),
    Fault("bytecode beside its source", "members", added("mlx_cuda/nn.pyc")),
    Fault("a Python file that is not in the sources", "members", added("mlx_cuda/_loader/evil.py")),
    Fault("`_cu12.py` beside the native module", "members", added("mlx_cuda/_cu12.py")),
    Fault("Python in the folder of copied libraries", "members", added("mlx_cuda.libs/evil.py")),
    Fault("`entry_points.txt`", "members", added(f"{DIST_INFO}/entry_points.txt", b"[console_scripts]\npip = mlx_cuda:evil\n")),
    Fault("`RECORD.jws`", "members", added(f"{DIST_INFO}/RECORD.jws", b"{}")),
    Fault("`direct_url.json`", "members", added(f"{DIST_INFO}/direct_url.json", b"{}")),
    Fault("a license that is not declared", "members", added(f"{DIST_INFO}/licenses/licenses/evil.txt")),
    Fault("a second SBOM", "members", added(f"{DIST_INFO}/sboms/evil.cdx.json", b"{}")),
    Fault("Python in the folder of device code", "device", added(f"{DEVICE}evil.py")),
    Fault("a Python file is missing", "sources", without("mlx_cuda/_doctor.py")),
    Fault("`py.typed` is missing", "sources", without("mlx_cuda/py.typed")),
    Fault("an extra line in a Python file", "sources", lambda files: files.update({NN: files[NN] + b"import os\n"})),
    Fault("CRLF line endings in a Python file", "sources", lambda files: files.update({NN: files[NN].replace(b"\n", b"\r\n")})),
    Fault("another text of a license", "sources", lambda files: files.update({f"{DIST_INFO}/licenses/LICENSE": b"all yours\n"})),
    Fault("another list of libraries", "dll-directories, sources", replaced("mlx_cuda/_libraries.json", "nvidia/cudnn", "nvidia/evil")),
    Fault(
        "code beside the version in `_version.py`", "sources, versions", replaced(VERSION_FILE, f'"{VERSION}"', f'"{VERSION}"; import os')
    ),
    Fault("a version instead of an empty line in another file", "sources", replaced(NN, "\n\n\n", f'\n\n__version__ = "{VERSION}"\n')),
    Fault("`_version.py` has another version", "versions", replaced(VERSION_FILE, VERSION, OTHER)),
    Fault("`_version.py` has two versions", "versions", replaced(VERSION_FILE, "\n\n", f'\n__version__ = "{OTHER}"\n')),
    Fault("`_version.py` has no version", "versions", replaced(VERSION_FILE, f'__version__ = "{VERSION}"', "")),
    Fault("METADATA has another version", "metadata, versions", replaced(METADATA, f"\nVersion: {VERSION}", f"\nVersion: {OTHER}")),
    Fault(
        "METADATA has a non-normalized version",
        "metadata, versions",
        replaced(METADATA, f"\nVersion: {VERSION}", f"\nVersion: {VERSION}.0"),
    ),
    Fault("METADATA has two versions", "metadata, versions", replaced(METADATA, "\nName", f"\nVersion: {OTHER}\nName")),
    Fault("`.dist-info` is of another version", "versions", renamed_folder(f"mlx_cuda-{OTHER}.dist-info")),
    Fault("`.dist-info` is of another project", "versions", renamed_folder(f"evil-{VERSION}.dist-info")),
    Fault("the file name has another version", "metadata, versions", lambda _: None, name=lambda name: name.replace(VERSION, OTHER)),
    Fault("the file name is of another MLX", "metadata, versions", lambda _: None, name=lambda name: name.replace(VERSION, "0.99.0.1")),
    Fault("the file name has a build number", "versions", lambda _: None, name=lambda name: name.replace("-cp310", "-1-cp310")),
    Fault("WHEEL has a build number", "tags", replaced(WHEEL, "Tag", "Build: 1\nTag")),
    Fault("WHEEL has an unknown tag", "tags", replaced(WHEEL, "Tag: cp310-abi3-", "Tag: cp310_abi3_")),
    Fault("WHEEL has the tag of another Python", "tags", replaced(WHEEL, "Tag: cp310", "Tag: cp39")),
    Fault("WHEEL sends the files to purelib", "tags", replaced(WHEEL, "Purelib: false", "Purelib: true")),
    Fault("METADATA of another project", "metadata", replaced(METADATA, "Name: mlx-cuda", "Name: evil")),
    Fault("METADATA allows older Pythons", "metadata", replaced(METADATA, "Python: >=3.10", "Python: >=3.9")),
    Fault("an extra requirement", "metadata", replaced(METADATA, "Requires-Dist: mlx==", "Requires-Dist: evil\nRequires-Dist: mlx==")),
    Fault("a requirement with a URL", "metadata", replaced(METADATA, "Requires-Dist: mlx==", "Requires-Dist: mlx @ https://evil/")),
    Fault("a requirement with an extra", "metadata", replaced(METADATA, "Requires-Dist: mlx==", "Requires-Dist: mlx[evil]==")),
    Fault("an extra of another name", "metadata", replaced(METADATA, "Provides-Extra: cpu", "Provides-Extra: gpu")),
    Fault("METADATA names a license file that is not there", "metadata", replaced(METADATA, "File: LICENSE", "File: EVIL")),
    Fault("an SBOM of another version", "sbom", entries=in_sbom(other_version)),
    Fault("an SBOM with a wrong digest of a module", "sbom", entries=in_sbom(other_digest)),
    Fault("no SBOM", "sbom", entries=in_sbom(lambda _: None)),
    Fault("an SBOM of 100,000 brackets", "sbom", entries=in_sbom(lambda _: b"[" * 100_000)),
    Fault("RECORD lacks a file", "record", record=lambda lines: lines[1:]),
    Fault("RECORD lists a file that is not there", "record", record=lambda lines: [*lines, "/etc/passwd,,"]),
    Fault("RECORD lists a file twice", "record", record=lambda lines: [lines[0], *lines]),
    Fault("RECORD has a wrong digest", "record", record=lambda lines: [lines[0].replace("sha256=", "sha256=x"), *lines[1:]]),
    Fault("RECORD has an MD5 digest", "record", record=lambda lines: [lines[0].replace("sha256=", "md5="), *lines[1:]]),
    Fault("RECORD has a wrong size", "record", record=lambda lines: [f"{lines[0]}0", *lines[1:]]),
    Fault("RECORD does not list itself", "record", record=lambda lines: lines[:-1]),
    Fault("RECORD has an unclosed quote", "record", record=lambda lines: [*lines, '"mlx_cuda']),
    Fault(
        "a native module under a folder of its name",
        "loader, modules",
        lambda files: files.update({f"{module(files)}.d/x{SUFFIXES['linux']}": plain(files)}),
    ),
    Fault("a native module under two names", "loader, modules", lambda files: files.update({"mlx_cuda/_cu14.so": plain(files)})),
    Fault(
        "a library in a folder below the copied ones", "loader, modules", lambda files: files.update({"mlx_cuda.libs/a/b.so": plain(files)})
    ),
    Fault("no module of CUDA 12", "modules", lambda files: files.pop(module(files, CU12))),
    Fault(
        "a library of NVIDIA's by its name",
        "loader, modules, nvidia-inside",
        lambda files: files.update({"mlx_cuda.libs/cudnn.dll": plain(files)}),
        systems=("windows",),
    ),
    Fault(
        "the driver's library by its name",
        "driver-inside, loader, modules",
        lambda files: files.update({"mlx_cuda.libs/libcuda-1.so.1": plain(files)}),
        systems=("linux",),
    ),
    Fault("a truncated module", "loader, sbom", entries=in_entry("/_cu13.", lambda data: data[:200])),
    Fault("WHEEL is not UTF-8", "sbom, tags", entries=in_entry("/WHEEL", lambda data: data.replace(b"Tag", b"\xff"))),
    Fault("a module with a build path", "build-path, loader", in_module(lambda data: data + b"/home/runner/work/mlx-cuda/x.cpp\0")),
    Fault("a module with device code in it", "architectures, loader", in_module(lambda data: data + fatbin([80], []))),
    Fault("a native module of another version", "versions", in_module(lambda data: data.replace(PACKAGE, PACKAGE[:-2] + b"9\0"))),
    Fault("a native module without a version", "versions", in_module(lambda data: data.replace(PACKAGE, bytes(len(PACKAGE))))),
    Fault("a module of other device code", "device, device-digest", lambda files: files.update({MANIFEST: files[MANIFEST] + b"\n"})),
    Fault(
        "a fatbin with a changed byte",
        "device",
        lambda files: files.update({f"{DEVICE}decode.fatbin.lzma": files[f"{DEVICE}decode.fatbin.lzma"][:-1] + b"x"}),
    ),
    Fault("a fatbin is missing", "device", without(f"{DEVICE}decode.fatbin.lzma")),
    Fault(
        "a manifest of infinite sizes",
        "device, device-digest",
        lambda files: files.update({MANIFEST: files[MANIFEST].replace(b'"size": ', b'"size": Infinity, "old": ')}),
    ),
    Fault("`../evil.py`", "leaves the folder", entries=entry("../evil.py")),
    Fault("`mlx_cuda/../../evil.py`", "leaves the folder", entries=entry("mlx_cuda/../../evil.py")),
    Fault("`/etc/evil`", "has an absolute path", entries=entry("/etc/evil")),
    Fault("`C:/evil.py`", "has a backslash or a drive letter in its name", entries=entry("C:/evil.py")),
    Fault("`mlx_cuda\\evil.py`", "has a backslash or a drive letter in its name", entries=entry("mlx_cuda\\evil.py")),
    Fault("an NTFS stream, `nn.py:evil`", "has a backslash or a drive letter in its name", entries=entry(f"{NN}:evil")),
    Fault("a name with a NUL", "has a name that is not printable ASCII", entries=entry("mlx_cuda/evilXpy"), data=nul),
    Fault("a name with a terminal escape sequence", "has a name that is not printable ASCII", entries=entry("mlx_cuda/\x1b[2J.py")),
    Fault("a name with a right-to-left mark", "has a name that is not printable ASCII", entries=entry("mlx_cuda/\u202eyp.py")),
    Fault("a name that is not NFC-normalized", "has a name that is not printable ASCII", entries=entry("mlx_cuda/e\u0301.py")),
    Fault("a name of full-width letters", "has a name that is not printable ASCII", entries=entry("mlx_cuda/\uff4e\uff4e.py")),
    Fault("`mlx_cuda//nn.py`", "has an empty part in its name", entries=entry("mlx_cuda//nn.py")),
    Fault("`mlx_cuda/./nn.py`", "has an empty part in its name", entries=entry("mlx_cuda/./nn.py")),
    Fault("`mlx_cuda/nn.py.`", "has a name that Windows changes or forbids", entries=entry(f"{NN}.")),
    Fault("`mlx_cuda/nn.py` and a space", "has a name that Windows changes or forbids", entries=entry(f"{NN} ")),
    Fault("`mlx_cuda/n?.py`", "has a name that Windows changes or forbids", entries=entry("mlx_cuda/n?.py")),
    Fault("`mlx_cuda/con.py`", "has a name that Windows reserves for a device", entries=entry("mlx_cuda/con.py")),
    Fault("a name of 300 characters", "has a name of 300 characters", entries=entry("x" * 300)),
    Fault("`mlx_cuda/NN.py` beside `nn.py`", "in case only", entries=entry("mlx_cuda/NN.py")),
    Fault("a folder `MLX_CUDA`", "in case only", entries=entry("MLX_CUDA/evil.py")),
    Fault("a file twice", "is in it more than once", entries=entry(NN)),
    Fault("a file and a folder of one name", "is in it more than once", entries=entry(f"{NN}/", stat.S_IFDIR | 0o755, b"")),
    Fault("a file below a file", "is below a file", entries=entry(f"{NN}/evil.py")),
    Fault("an empty folder", "is an empty folder", entries=entry("evil/", stat.S_IFDIR | 0o755, b"")),
    Fault("a folder that is a file", "is a file and a folder", entries=changed(NN, external_attr=0o100644 << 16 | 0x10)),
    Fault("a folder with data", "is a file and a folder", entries=entry("mlx_cuda/", stat.S_IFDIR | 0o755)),
    Fault("a symbolic link", "is a symbolic link", entries=changed(NN, external_attr=(stat.S_IFLNK | 0o777) << 16)),
    Fault("a named pipe", "is no ordinary file", entries=changed(NN, external_attr=(stat.S_IFIFO | 0o644) << 16)),
    Fault("a device", "is no ordinary file", entries=changed(NN, external_attr=(stat.S_IFCHR | 0o644) << 16)),
    Fault("setuid", "has the mode 4755", entries=changed(NN, external_attr=0o104755 << 16)),
    Fault("setgid, as if made on Windows", "has the mode 2755", entries=changed(NN, external_attr=0o102755 << 16, create_system=0)),
    Fault("sticky", "has the mode 1644", entries=changed(NN, external_attr=0o101644 << 16)),
    Fault("writable by all", "has the mode 0666", entries=changed(NN, external_attr=0o100666 << 16)),
    Fault("readable by nobody", "has the mode 0000", entries=changed(NN, external_attr=0o100000 << 16)),
    Fault("compressed by LZMA", "is neither stored nor deflated", entries=changed(NN, compress_type=zipfile.ZIP_LZMA)),
    Fault("compressed by bzip2", "is neither stored nor deflated", entries=changed(NN, compress_type=zipfile.ZIP_BZIP2)),
    Fault("marked as encrypted", "is encrypted", data=field(FLAGS, "<H", 0x1)),
    Fault("a data descriptor", "has the flags 0x8", data=field(FLAGS, "<H", 0x8)),
    Fault("an invalid timestamp (month 0)", "has an invalid timestamp", data=field(DATE, "<H", 0)),
    Fault("a zip bomb, by its ratio", "times its size, expected at most 50", entries=entry("mlx_cuda/evil", data=bytes(2**28))),
    Fault("a zip bomb, by its declared size", "MiB, expected at most 512", data=field(SIZE, "<I", 2**30)),
    Fault("a zip bomb that declares a smaller size", "has more or less data than is declared", data=field(SIZE, "<I", 1)),
    Fault(
        "10,000 folders",
        "entries, expected at most 10000",
        entries=lambda entries: [entry(f"x/{number}", data=b"")(entries) for number in range(10_000)],
    ),
    Fault(
        "another name in the local header",
        "differs from its local header",
        data=lambda data: put(data, local(data) + 30, "<I", 0x6C697665),
    ),
    Fault(
        "another size in the local header", "differs from its local header", data=lambda data: put(data, local(data) + SIZE - 2, "<I", 0)
    ),
    Fault("another CRC in the local header", "differs from its local header", data=lambda data: put(data, local(data) + CRC - 2, "<I", 0)),
    Fault("two entries at the same offset", "overlaps another", data=same_place),
    Fault("an entry that the central directory does not list", "overlaps another", data=lambda data: inserted(data, local(data), hidden())),
    Fault(
        "such an entry after the last one", "between its entries and its directory", data=lambda data: inserted(data, start(data), hidden())
    ),
    Fault("data before the archive", "before the archive or around its directory", data=lambda data: b"#!/bin/sh\n" + data),
    Fault("data before the archive, with corrected offsets", "overlaps another", data=lambda data: inserted(data, 0, b"#!/bin/sh\n")),
    Fault("data after the archive", "with data after the archive", data=lambda data: data + b"evil"),
    Fault("a comment of the archive", "ends with a comment", data=lambda data: end(20, "<H", 4)(data) + b"evil"),
    Fault("a second archive after the first", "before the archive or around its directory", data=lambda data: data + data),
    Fault(
        "a second archive in the comment of the first",
        "ends with a comment",
        data=lambda data: end(20, "<H", 100)(data) + b"PK\5\6".ljust(100, b"\0"),
    ),
    Fault("a comment of an entry", "extra field that", data=with_comment),
    Fault("an extra field with another name", "extra field that", data=with_extra(UNICODE_PATH)),
    Fault("an extra field with other sizes", "extra field that", data=with_extra(struct.pack("<HHQ", 1, 8, 1))),
    Fault(
        "a ZIP64 directory",
        "is not a readable wheel",
        data=lambda data: inserted(data, len(data) - 22, LARGE, grows=1),
    ),
    Fault("a multi-disk archive", "is a multi-disk archive", data=end(4, "<H", 1)),
    Fault("a wrong count of entries", "is a multi-disk archive", data=end(8, "<H", 3)),
    Fault("data after an entry's compressed data", "has more or less data than is declared", data=behind_the_stream),
    Fault("a wrong CRC", "unreadable", data=field(CRC, "<I", 0)),
    Fault("a truncated file", "unreadable", data=lambda data: data[:-30]),
    Fault("an HTML page instead of a wheel", "unreadable", data=lambda _: b"<html>Sign in</html>"),
)


def record_of(entries: Entries, folder: str) -> list[str]:
    return [*(f"{each.filename},{record_digest(data)},{len(data)}" for each, data in entries if not each.is_dir()), f"{folder}/RECORD,,"]


def packed(entries: Iterable[tuple[zipfile.ZipInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for each, data in entries:
            archive.writestr(each, data)
    return buffer.getvalue()


def table() -> Iterator[str]:
    """The lines of docs/factory/audit.md."""
    yield "| change of a good wheel | found by |"
    yield "|---|---|"
    for found, faults in groupby(FAULTS, key=lambda fault: fault.found):
        checks = f"refused: … {found}" if " " in found.replace(", ", "") else ", ".join(f"`{each}`" for each in found.split(", "))
        checks = "refused: not a readable wheel (exit code 2)" if found == "unreadable" else checks
        yield f"| {'; '.join(fault.what for fault in faults)} | {checks} |"


DOCUMENT = REPOSITORY / "docs" / "factory" / "audit.md"
BEGIN, FINISH = "<!-- faults -->\n", "<!-- /faults -->\n"


def document(text: str) -> str:
    """The document with the table as it is."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "".join(f"{line}\n" for line in table()) + FINISH + rest.partition(FINISH)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text("utf-8")), "utf-8", newline="\n")
