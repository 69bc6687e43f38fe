"""The checks, each a small function ``(wheel, policy) -> (member, what is wrong)…`` under an id of its own. docs/audit.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..policy import Policy
from ..wheel import Wheel
from . import binaries, contents, device, libraries, metadata, sbom

Finding = tuple[str, str]  # the member it is about ("" for the wheel as a whole), and what is wrong and what was expected
Check = Callable[[Wheel, Policy], Iterable[Finding]]
Comparison = Callable[[Sequence[Wheel]], Iterable[tuple[Wheel, str, str]]]

CHECKS: Mapping[str, Check] = {
    "modules": contents.modules,
    "nvidia-inside": contents.nvidia_inside,
    "driver-inside": contents.driver_inside,
    "record": contents.record,
    "size": contents.size,
    "device": device.folder,
    "device-digest": device.known,
    "tags": metadata.tags,
    "metadata": metadata.complete,
    "requirements": metadata.requirements,
    "licence": metadata.licences,
    "sbom": sbom.bill,
    "platform-tag": binaries.platform_tag,
    "machine": binaries.machine,
    "abi3": binaries.abi3,
    "architectures": binaries.architectures,
    "stripped": binaries.stripped,
    "build-path": binaries.build_path,
    "executable-stack": binaries.executable_stack,
    "needed": libraries.needed,
    "provider": libraries.provider,
    "rpath": libraries.rpath,
    "dll-directories": libraries.dll_directories,
    "unversioned-libc": libraries.unversioned_libc,
}

# Checks of several wheels of one release against each other.
SAME_METADATA = "same-metadata"
SAME_DEVICE = "same-device"
ACROSS: Mapping[str, Comparison] = {SAME_METADATA: metadata.same, SAME_DEVICE: device.same}
