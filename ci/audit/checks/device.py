"""Checks of the device code: the folder of fatbins with its manifest, and what the native modules know of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from ...device import manifest, packed
from ...matrix import Targets, newest_first
from ...toolkit import roots
from ...wheelfile.binary import BinaryError, fatbin
from ...wheelfile.wheel import DEVICE, MANIFEST, Wheel
from ..policy import Policy
from .registry import Differences, Findings, across, check


@check("compile it again from this checkout: python -m ci device, then python -m ci wheel")
def device(wheel: Wheel, policy: Policy) -> Findings:
    """A fatbin for each source with code for what was asked, with exactly that code, as the manifest says; and no other file."""
    known = {MANIFEST, *(f"{DEVICE}{source}{packed.SUFFIX}" for source in policy.device)} if policy.device_root else set()
    for member in sorted(name for name in wheel.members if name.startswith(DEVICE) and name not in known):
        yield member, "is unexpected, expected the manifest and a fatbin for each source of device code"
    if not policy.device_root:
        return
    told, problem = _manifest(wheel)
    if told is None:
        yield MANIFEST, problem
    else:
        yield from ((MANIFEST, wrong) for wrong in _wrong(told, policy))
        if told.text.encode() != wheel.members[MANIFEST]:
            yield MANIFEST, "is not written as python -m ci device does, expected the same bytes: no other keys, whole numbers"
    for source, targets in policy.device.items():
        member = f"{DEVICE}{source}{packed.SUFFIX}"
        data = wheel.members.get(member)
        if data is None:
            yield member, "is missing, expected the device code of this source"
            continue
        if told is not None and source in told.fatbins:
            yield from ((member, wrong) for wrong in _unlike_manifest(data, told.fatbins[source]))
        try:
            data = packed.unpack(data)
        except ValueError as error:
            yield member, f"is not one packed fatbin: it has {error}"
            continue
        try:
            found = fatbin.only(data)
        except BinaryError as error:
            yield member, f"is not one whole fatbin: {error}, expected what nvFatbin writes"
            continue
        yield from ((member, f"has {wrong}") for wrong in fatbin.unlike(found, targets))
        yield from ((member, f"has {wrong}") for wrong in _order(found))
        for entry in (each for each in found.entries if each.kind in {"sass", "ptx"}):
            if wrong := fatbin.misplaced(data, entry, f"{source}.cu"):
                yield member, f"has in its {entry.kind.upper()} for {entry.architecture} {wrong}"


def _order(found: fatbin.Fatbin) -> Iterator[str]:
    """Yield what is not where a native module looks for it: it takes the first code that a GPU runs."""
    if (kinds := [each.kind for each in found.entries]) != sorted(kinds, reverse=True):
        yield "PTX before SASS, expected it last"
    for kind in ("sass", "ptx"):
        if (order := [each.architecture for each in found.entries if each.kind == kind]) != newest_first(order):
            yield f"{kind.upper()} for {', '.join(order)} in this order, expected the newest first"


def _manifest(wheel: Wheel) -> tuple[manifest.Manifest | None, str]:
    """The manifest, or what is wrong with it."""
    if MANIFEST not in wheel.members:
        return None, "is missing, expected the manifest of the device code"
    try:
        return manifest.parse(wheel.members[MANIFEST].decode(errors="replace")), ""
    except ValueError as error:
        return None, f"is {error}, expected one that python -m ci device writes"
    except (OverflowError, RecursionError) as error:  # of JSON's infinity, and of a thousand brackets
        return None, f"is not a manifest of device code: {error}, expected one that python -m ci device writes"


def _wrong(told: manifest.Manifest, policy: Policy) -> Iterator[str]:
    """Yield the statements of the manifest that the policy contradicts."""
    expected = policy.device
    yield from (f"lists {name}, expected sources of device code only" for name in sorted(told.fatbins.keys() - expected))
    yield from (f"does not list {name}, expected every source of device code" for name in sorted(expected.keys() - told.fatbins))
    for name, targets in expected.items():
        if (listed := told.fatbins.get(name)) and Targets(listed.sass, listed.ptx) != targets:
            yield f"says of {name} {_spell(Targets(listed.sass, listed.ptx))}, expected {_spell(targets)}"
    locked = roots.find(policy.device_root).packages
    if told.inputs != policy.device_inputs:
        inputs = [each[:16] for each in (told.inputs, policy.device_inputs)]
        yield f"is made of the inputs {inputs[0]}, expected {inputs[1]}: other sources, compilers or GPUs than this checkout's"
    if told.packages != locked:
        yield f"names the compilers {', '.join(map(str, told.packages)) or 'none'}, expected {', '.join(locked)}"


def _unlike_manifest(data: bytes, listed: manifest.Fatbin) -> Iterator[str]:
    if len(data) != listed.size:
        yield f"is {len(data)} bytes, expected the manifest's {listed.size}"
    if (digest := hashlib.sha256(data).hexdigest()) != listed.sha256:
        yield f"has the SHA-256 {digest}, expected the manifest's {listed.sha256}"


def _spell(targets: Targets) -> str:
    return " ".join([*(f"sm_{each}" for each in targets.sass), *(f"compute_{each}" for each in targets.ptx)]) or "nothing"


@check("build the native modules and the device code in one build: python -m ci wheel")
def device_digest(wheel: Wheel, policy: Policy) -> Findings:
    """Each native module was built with this very device code: at run time it takes no other."""
    if not wheel.device_digest:  # a missing manifest is for the check above to tell
        return
    for member in wheel.binaries:
        if policy.module(member) and wheel.device_digest.encode() not in wheel.members[member]:
            yield member, f"is of other device code, expected the manifest's SHA-256 in it, {wheel.device_digest}"


@across("compile device code once and give it to every build: MLX_CUDA_DEVICE_CODE")
def same_device(wheels: Sequence[Wheel]) -> Differences:
    """Wheels of one release hold the same device code: it is made once."""
    first, *others = wheels
    for other in others:
        if other.device_digest != first.device_digest:
            digests = [wheel.device_digest or "nothing" for wheel in (other, first)]
            yield other, MANIFEST, f"is {digests[0]}, expected the same as in {first.path.name}, {digests[1]}"
