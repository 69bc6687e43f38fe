"""The check of the wheel's bill of materials, against the wheel and against the locks."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from ..wheel import MANIFEST
from .registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..policy import Policy
    from ..wheel import Wheel
    from .registry import Findings


@check
def sbom(wheel: Wheel, policy: Policy) -> Findings:
    """Valid CycloneDX about this wheel: its binaries and device code by their SHA-256, and the locked wheels they were made from."""
    member = wheel.sbom
    if member not in wheel.members:
        yield member, "is missing, expected the SBOM that python -m ci repair writes"
        return
    text = wheel.members[member].decode("utf-8", "replace")
    if mistake := _invalid(text):
        yield member, f"is not valid CycloneDX: {mistake}"
        return
    document = json.loads(text)
    about = document.get("metadata", {}).get("component", {})
    if (canonicalize_name(about.get("name", "")), about.get("version")) != (wheel.project, str(wheel.version)):
        yield member, f"is about {about.get('name')} {about.get('version')}, expected {wheel.project} {wheel.version}"
    listed = {(component["name"], digest) for component in document.get("components", []) for digest in _digests(component)}
    for name in sorted({*wheel.binaries, MANIFEST} & set(wheel.members)):
        digest = hashlib.sha256(wheel.members[name]).hexdigest()
        if (name, digest) not in listed:
            yield name, f"is not in the SBOM with its SHA-256, expected {digest}"
    yield from ((member, f"lacks {pin}, which the lock has") for pin in _unlisted(policy, listed))


def _invalid(text: str) -> str | None:
    """What is wrong by the schema of the version that the document states, in one line."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    try:
        document = json.loads(text)
        mistake = JsonStrictValidator(SchemaVersion.from_version(document["specVersion"])).validate_str(text)
    except Exception as error:  # no JSON, none of this kind, of a version without a schema, nested too deep
        return f"{type(error).__name__}: {error}"
    return f"{mistake.data.json_path}: {mistake.data.message}"[:300] if mistake else None


def _digests(component: dict[str, Any]) -> Iterator[str]:
    return (each["content"] for each in component.get("hashes", []) if each["alg"] == "SHA-256")


def _unlisted(policy: Policy, listed: set[tuple[str, str]]) -> Iterator[str]:
    from ...toolkit import lock, roots

    for root in policy.roots:
        for pin in lock.wheels_for(roots.find(root), policy.platform):
            if (pin.requirement.split("==")[0], pin.sha256) not in listed:
                yield f"{pin.requirement} ({pin.file})"
