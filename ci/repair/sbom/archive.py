"""Put a file into a finished wheel: the other members, and their lines in RECORD, stay unchanged.

Not ``wheel.wheelfile``, which rewrites every line of RECORD and so would hide a wrong one from the audit.
"""

from __future__ import annotations

import calendar
import csv
import io
import os
import stat
import time
import zipfile
from pathlib import Path

from ...files import record_digest, whole


def source_date_epoch(path: Path) -> str:
    """The time that repaired files bear: SOURCE_DATE_EPOCH, or else the newest one in the wheel, which alone decides the outcome then."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return os.environ["SOURCE_DATE_EPOCH"]
    with zipfile.ZipFile(path) as archive:
        return str(calendar.timegm(max(entry.date_time for entry in archive.infolist())))


def insert(wheel: Path, member: str, data: bytes, *, dist_info: str, epoch: int) -> None:
    """Add a member, or replace it, all or nothing. Nothing but the arguments decides the bytes."""
    record = f"{dist_info}/RECORD"
    with whole(wheel) as part, zipfile.ZipFile(wheel) as old, zipfile.ZipFile(part, "w") as new:
        for entry in old.infolist():
            if entry.filename not in {member, record}:
                new.writestr(entry, old.read(entry))
        lines = [line for line in csv.reader(old.read(record).decode().splitlines()) if line and line[0] not in {member, record}]
        new.writestr(_entry(member, epoch), data)
        new.writestr(_entry(record, epoch), _text([*lines, [member, record_digest(data), str(len(data))], [record, "", ""]]))


def _entry(member: str, epoch: int) -> zipfile.ZipInfo:
    year, month, day, hour, minute, second = time.gmtime(epoch)[:6]
    entry = zipfile.ZipInfo(member, max((year, month, day, hour, minute, second), (1980, 1, 1, 0, 0, 0)))  # the oldest that zip knows
    entry.create_system = 3  # as on Unix, wherever this runs
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _text(lines: list[list[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()
