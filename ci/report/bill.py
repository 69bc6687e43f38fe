"""The bill of materials that repair put into the wheel (CycloneDX JSON), as the few columns that a reader wants."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contents import Contents


@dataclass(frozen=True)
class Component:
    name: str
    version: str
    kind: str
    licence: str
    hashed: bool  # pinned by a hash


@dataclass(frozen=True)
class Bill:
    member: str
    format: str
    components: tuple[Component, ...]
    problem: str = ""  # why it could not be read


def bills(contents: Contents) -> tuple[Bill, ...]:
    return tuple(_bill(member, data) for member, data in contents.sboms.items())


def _bill(member: str, data: bytes) -> Bill:
    try:
        document = json.loads(data)
    except ValueError as error:
        return Bill(member, "", (), f"is not JSON: {error}")
    if not isinstance(document, dict):
        return Bill(member, "", (), "is not a CycloneDX document")
    name = " ".join(_text(document, key) for key in ("bomFormat", "specVersion"))
    found = {_component(each) for each in _objects(document, "components")}
    components = sorted(found, key=lambda each: (each.name.lower(), each.version, each.kind, each.licence, each.hashed))
    return Bill(member, name.strip(), tuple(components))


def _component(table: dict[str, Any]) -> Component:
    licences = [
        _text(each, "expression") or _text(inner, "id") or _text(inner, "name")
        for each in _objects(table, "licenses")
        for inner in [each["license"] if isinstance(each.get("license"), dict) else {}]
    ]
    referenced = any(_objects(each, "hashes") for each in _objects(table, "externalReferences"))
    return Component(
        name=_text(table, "name"),
        version=_text(table, "version"),
        kind=_text(table, "type"),
        licence=", ".join(filter(None, licences)),
        hashed=bool(_objects(table, "hashes")) or referenced,
    )


def _objects(table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects of a list; what a stranger's document has in their place is left out."""
    value = table.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(table: dict[str, Any], key: str) -> str:
    value = table.get(key)
    return value if isinstance(value, str) else ""
