"""A zip archive, judged before a byte of it is unpacked; and a wheel's files, which any tool must find to be the same.

Some installers read a zip by the directory at its end, others header by header from its start. Where the two differ, a review of the one
sees nothing of what the other installs: indexes refuse such wheels as confusion attacks, and so does `read`.
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path, PurePosixPath

from ..errors import CheckFailed, EnvironmentProblem

MAX_BYTES = 512 * 2**20  # of a zip, of a wheel, and of what either holds: five times a complete release at its size budget
MAX_ENTRIES = 10_000
MAX_RATIO = 50  # of all that is unpacked to the archive, as indexes have it

# Signature, number of this part and of the directory's, entries here and in all, size and offset of the directory, length of the comment.
END = struct.Struct("<4s4H2IH")
CENTRAL = 46  # bytes of a header in the directory, without the name; those from 6 to 32 stand again before the data
COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
ENCRYPTED = 0x2041  # bits 0, 6 and 13
HARMLESS = 0x806  # how well it is compressed (bits 1 and 2), and that the name is UTF-8 (11)
MODES = {0o600, 0o644, 0o664, 0o755, 0o775}  # those of tools that make wheels; installers give others
LONGEST = 240  # characters of a name, which leaves Windows some for the folder that it is unpacked to
RESERVED = {"con", "prn", "aux", "nul", "conin$", "conout$", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}


def opened(path: Path) -> zipfile.ZipFile:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise CheckFailed(f"{path.name} has {size / 2**20:,.0f} MiB, expected at most {MAX_BYTES // 2**20}")
        path.open("rb").close()
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}", fix="check the path") from error
    try:
        return zipfile.ZipFile(path)
    except Exception as error:  # zipfile has no one class for what a damaged directory makes it raise
        raise damaged(path, error) from error


def damaged(path: Path, error: object) -> EnvironmentProblem:
    kind = "wheel" if path.suffix == ".whl" else "zip"
    return EnvironmentProblem(f"{path} is not a readable {kind}: {error}", fix="download or build it again, and look at its first bytes")


def judged(path: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files of a zip, once nothing about their number, sizes, names and kinds is wrong."""
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise CheckFailed(f"{path.name} has {len(entries)} entries, expected at most {MAX_ENTRIES}")
    declared, size = sum(entry.file_size for entry in entries), path.stat().st_size
    if declared > MAX_BYTES:
        raise CheckFailed(f"{path.name} would unpack to {declared / 2**20:,.0f} MiB, expected at most {MAX_BYTES // 2**20}")
    if declared > MAX_RATIO * size:
        raise CheckFailed(f"{path.name} would unpack to {declared / size:,.0f} times its size, expected at most {MAX_RATIO}")
    for entry, found in chain(((entry, wrong(entry)) for entry in entries), _clashes(entries)):
        if found:
            raise _refused(path, entry, found)
    return [entry for entry in entries if not entry.is_dir()]


def wrong(entry: zipfile.ZipInfo) -> str:
    """The problem of an entry by itself."""
    mode, name = entry.external_attr >> 16, entry.orig_filename  # as stored: `filename` may be changed by zipfile
    kind = stat.S_IFMT(mode)
    if found := misnamed(name):
        return found
    if entry.filename != name:
        return f"has an extra field that gives it another name, {entry.filename!r}"
    if kind not in {0, stat.S_IFDIR if entry.is_dir() else stat.S_IFREG}:
        return "is a symbolic link" if kind == stat.S_IFLNK else "is no ordinary file"
    if bool(entry.external_attr & 0x10) > entry.is_dir() or (entry.is_dir() and entry.file_size):
        return "is a file and a folder"
    if stat.S_IMODE(mode) not in MODES and (entry.create_system == 3 or mode & 0o7000):  # Windows has no modes of its own
        return f"has the mode {stat.S_IMODE(mode):04o}, expected one of {', '.join(f'{each:04o}' for each in sorted(MODES))}"
    if entry.flag_bits & ENCRYPTED:
        return "is encrypted"
    if entry.compress_type not in COMPRESSIONS:
        return "is neither stored nor deflated"
    return ""


def misnamed(name: str) -> str:
    """The problem of a name, on any system."""
    parts = name.removesuffix("/").split("/")
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in parts:
        return "leaves the folder"
    if "\\" in name or ":" in name:
        return "has a backslash or a drive letter in its name"
    if not (name.isascii() and name.isprintable()):
        return "has a name that is not printable ASCII"
    if len(name) > LONGEST:
        return f"has a name of {len(name)} characters, expected at most {LONGEST}"
    if not all(part.strip(".") for part in parts):
        return "has an empty part in its name"
    if any(part.endswith((".", " ")) or part.startswith(" ") or set(part) & set('<>"|?*') for part in parts):
        return "has a name that Windows changes or forbids"
    if any(part.split(".")[0].rstrip().lower() in RESERVED for part in parts):
        return "has a name that Windows reserves for a device"
    return ""


def _clashes(entries: Sequence[zipfile.ZipInfo]) -> Iterator[tuple[zipfile.ZipInfo, str]]:
    """Names that are one place on some system."""
    files = {entry.orig_filename for entry in entries if not entry.is_dir()}
    seen, spelt = set[str](), dict[str, str]()
    for entry in entries:
        place = PurePosixPath(entry.orig_filename)
        own, *above = map(str, (place, *place.parents[:-1]))
        if own in seen:
            yield entry, "is in it more than once"
        if files.intersection(above):
            yield entry, "is below a file"
        for each in (own, *above):
            if (other := spelt.setdefault(each.casefold(), each)) != each:
                yield entry, f"differs from {other!r} in case only"
        seen.add(own)


def read(path: Path) -> tuple[dict[str, bytes], dict[str, zipfile.ZipInfo]]:
    """The files of a wheel, in their order, and what the archive says of each entry.

    Not one is unpacked where two ways to read the archive would not find the same.
    """
    with opened(path) as archive:
        files = judged(path, archive)
        entries, data = archive.infolist(), path.read_bytes()
    headers, stored, position = _directory(path, entries, data), dict[str, bytes](), 0
    filled = {f"{above}/" for file in files for above in PurePosixPath(file.filename).parents}
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if entry.header_offset != position:
            raise _refused(path, entry, "overlaps another, or follows data that belongs to no entry")
        own = b"PK\3\4" + headers[entry.orig_filename] + entry.orig_filename.encode()
        if data[position : position + len(own)] != own:
            raise _refused(path, entry, "differs from its local header")
        if entry.flag_bits & ~HARMLESS:
            raise _refused(path, entry, f"has the flags {entry.flag_bits:#x}: it may end elsewhere than the directory says")
        if entry.is_dir() and entry.filename not in filled:
            raise _refused(path, entry, "is an empty folder")
        if not _is_time(entry):
            raise _refused(path, entry, "has an invalid timestamp")
        start = position + len(own)
        position = start + entry.compress_size
        stored[entry.orig_filename] = data[start:position]
    if position != END.unpack(data[-END.size :])[6]:
        raise CheckFailed(f"{path.name} has data between its entries and its directory")
    return (
        {entry.filename: _unpacked(path, entry, stored[entry.filename]) for entry in files},
        {entry.filename: entry for entry in entries},
    )


def _directory(path: Path, entries: Sequence[zipfile.ZipInfo], data: bytes) -> dict[str, bytes]:
    """The fields of each entry that a local header repeats, once the directory is all that is at the archive's end."""
    end = len(data) - END.size
    mark, part, first, here, count, size, start, comment = END.unpack(data[end:])
    if mark != b"PK\5\6" or comment:
        raise CheckFailed(f"{path.name} ends with a comment or with data after the archive")
    if (part, first, here, count) != (0, 0, len(entries), len(entries)) or data[end - 20 : end - 16] == b"PK\6\7":
        raise CheckFailed(f"{path.name} is a multi-disk archive or ZIP64, or has a wrong count of entries")
    if start + size != end:
        raise CheckFailed(f"{path.name} has data before the archive or around its directory")
    headers, position = dict[str, bytes](), start
    for entry in entries:
        if entry.extra or entry.comment:
            raise _refused(path, entry, "has a comment, or an extra field that may give it another name or size")
        headers[entry.orig_filename] = data[position + 6 : position + 32]
        position += CENTRAL + len(entry.orig_filename)
    return headers


def _is_time(entry: zipfile.ZipInfo) -> bool:
    try:
        return bool(datetime(*entry.date_time))
    except ValueError:
        return False


def _unpacked(path: Path, entry: zipfile.ZipInfo, stored: bytes) -> bytes:
    """The data of an entry, as much as is declared and not a byte more."""
    data, whole = stored, True
    if entry.compress_type == zipfile.ZIP_DEFLATED:
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = stream.decompress(stored, entry.file_size + 1)
        except zlib.error as error:
            raise damaged(path, f"{entry.filename}: {error}") from error
        whole = stream.eof and not stream.unused_data
    if not whole or len(data) != entry.file_size:
        raise _refused(path, entry, "has more or less data than is declared")
    if zlib.crc32(data) != entry.CRC:
        raise damaged(path, f"Bad CRC-32 for {entry.filename}")
    return data


def _refused(path: Path, entry: zipfile.ZipInfo, found: str) -> CheckFailed:
    return CheckFailed(f"{path.name}: the entry {entry.orig_filename!r} {found}; nothing was unpacked")
