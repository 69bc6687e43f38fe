"""The check of the wheel's bill of materials: it is made again, of the wheel, the locks and the tools of this environment."""

from __future__ import annotations

import calendar
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ...wheelfile.wheel import Wheel
from ..policy import Policy
from .registry import Findings, check


@check("repair it again with the locked tools (requirements/factory.txt): python -m ci repair writes the SBOM")
def sbom(wheel: Wheel, _: Policy) -> Findings:
    """The SBOM is exactly what `python -m ci repair` writes for this wheel, with the time of its file."""
    from ..sbom.document import render

    member = wheel.sbom
    if member not in wheel.members:
        yield member, "is missing, expected the SBOM that python -m ci repair writes"
        return
    data = wheel.members[member]
    try:
        expected = render(wheel, epoch=_time(wheel, data))
    except Exception as error:  # of the manifest, _build.json or METADATA, whose own checks say what is wrong with them
        yield member, f"cannot be made again ({type(error).__name__}: {error}), expected files that can be read"
        return
    if data == expected.encode():
        return
    try:
        found = list(_differences(json.loads(data), json.loads(expected)))
    except (ValueError, RecursionError) as error:
        yield member, f"is not JSON ({error}), expected the SBOM that python -m ci repair writes"
        return
    yield from ((member, wrong) for wrong in found or ["is written otherwise, expected the bytes that python -m ci repair writes"])


def _time(wheel: Wheel, data: bytes) -> int:
    """The time that the document says, where it is that of its entry, whose seconds are even."""
    entry = calendar.timegm(wheel.entries[wheel.sbom].date_time)
    try:
        told = int(datetime.fromisoformat(json.loads(data)["metadata"]["timestamp"]).timestamp())
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return entry
    return told if told - entry in {0, 1} else entry


def _differences(found: Any, expected: Any, place: str = "") -> Iterator[str]:
    if found == expected or place == "/serialNumber":  # which follows from the rest
        return
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _differences(found.get(key), expected.get(key), f"{place}/{key}")
    elif isinstance(found, list) and isinstance(expected, list):
        yield from (f"has in {place} {_shown(each)}, expected nothing of the kind" for each in found if each not in expected)
        yield from (f"lacks in {place} {_shown(each)}, expected it" for each in expected if each not in found)
        if len(found) > len(expected) and all(each in expected for each in found):
            yield f"has parts of {place} more than once, expected each once"
        if len(found) == len(expected) and all(each in expected for each in found):
            yield f"has the parts of {place} in another order, expected that of python -m ci repair"
    else:
        yield f"has {_shown(found)} in {place or 'the document'}, expected {_shown(expected)}"


def _shown(value: Any) -> str:
    name = [f"{value[key]}" for key in ("name", "ref", "content") if value.get(key)] if isinstance(value, dict) else []
    return f"{' '.join(name)} ({json.dumps(value)[:160]})" if name else json.dumps(value)[:160]
