"""Files of results: JSON Lines. The first line says of what kind the results are, and where they come from; each other one is a case.

Numbers have four significant digits. What follows from other numbers of the file is not in it: who reads them computes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 4


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def write(path: Path, results: Mapping[str, Any]) -> None:
    """``results`` have a ``kind`` and ``cases``. The file is replaced as a whole: a program that is killed leaves what was there."""
    head = {name: value for name, value in results.items() if name != "cases"}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(f"{json.dumps(rounded(each), separators=(',', ':'))}\n" for each in (head, *results["cases"])), "utf-8")
    temporary.replace(path)


def read(path: Path, kind: str = "", failure: type[Exception] = ValueError) -> dict[str, Any]:
    """What was written; where it is of another kind, or not such a file, a ``failure``."""
    try:
        head, *cases = map(json.loads, path.read_text("utf-8").splitlines())
        found = head["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise failure(f"{path} is no file of results: the first line says their kind, and each is JSON\n  fix: measure again") from error
    if kind and found != kind:
        raise failure(f"{path} has results of the kind {found}, not {kind}\n  fix: give another file")
    return {**head, "cases": cases}
