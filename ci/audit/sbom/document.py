"""The SBOM's contents, built with CycloneDX's own library."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from importlib.metadata import version as installed_version
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.model.lifecycle import LifecyclePhase, PredefinedLifecycle
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ...matrix import Extra, Matrix, Platform, load
from ...toolkit import lock, roots
from ...wheelfile.facts import DeviceFacts, facts
from ...wheelfile.wheel import MANIFEST, Wheel, extra_of
from ..policy import platform_of
from . import sources

SPECIFICATION = SchemaVersion.V1_7
PROPERTIES = f"{load().name}:"  # the namespace of our own properties


def render(wheel: Wheel, *, epoch: int, matrix: Matrix | None = None) -> str:
    """The SBOM as JSON. The wheel, the locks and the tools of this environment decide every byte of it."""
    matrix = matrix or load()
    platform = platform_of(wheel, matrix)
    build = json.loads(wheel.members.get(f"{matrix.module}/_build.json", b"{}"))
    built = [each for each in matrix.extras if _module_of(each, wheel, matrix)]

    known = facts(wheel)
    files = {module.member: _file(wheel, module.member, needed=module.needed) for module in known.modules}
    device = list(_device(wheel, known.device))
    pins = list(_pins([*(root for each in built for root in each.roots), *([matrix.device.root] if device else [])], platform))
    # The header library that comes from the build requirements, not from a lock.
    nanobind = [_package("nanobind", build["nanobind"])] if build.get("nanobind") else []
    third_party = [_third_party(source) for source in sources.load() if source.purl] if build else []
    root, requirements = _root(wheel), list(_requirements(wheel))

    bom = Bom(
        metadata=BomMetaData(
            component=root,
            timestamp=datetime.fromtimestamp(epoch, timezone.utc),
            lifecycles=[PredefinedLifecycle(LifecyclePhase.BUILD)],
            tools=ToolRepository(components=[_installed("cyclonedx-python-lib")]),
        ),
        components=[component for component, _ in pins],
        serial_number=uuid.UUID(int=0),  # see below
    )
    bom.components.update([*files.values(), *device, *nanobind, *third_party, *requirements])
    bom.register_dependency(root, [*files.values(), *device, *requirements])
    for each in built:  # what the modules share is compiled with the headers of the first
        compiled_in = [pin for pin, names in pins if names & {*each.roots, *built[0].roots} and pin.scope == ComponentScope.REQUIRED]
        bom.register_dependency(files[_module_of(each, wheel, matrix)], [*compiled_in, *nanobind, *third_party])
    for made in device:
        bom.register_dependency(made, [pin for pin, names in pins if matrix.device.root in names])

    document = _output(bom)
    tools = _output(Bom(components=_tools(wheel, build)))["components"]
    # The library does not write this part of the specification: how the wheel was made.
    document["formulation"] = [{"bom-ref": "formulation", "components": tools}]
    document["serialNumber"] = _serial_number(document)
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _module_of(extra: Extra, wheel: Wheel, matrix: Matrix) -> str:
    """The native module of an extra in this wheel, "" for none."""
    return next((member for member in wheel.binaries if member.startswith(f"{matrix.module}/{extra.module}.")), "")


def _output(bom: Bom) -> dict[str, Any]:
    output: dict[str, Any] = json.loads(make_outputter(bom, OutputFormat.JSON, SPECIFICATION).output_as_string())
    return output


def _serial_number(document: Mapping[str, Any]) -> str:
    """A number that the contents decide: what is built twice is the same document."""
    return uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True)).urn


def _properties(**properties: Iterable[str]) -> list[Property]:
    return [Property(name=f"{PROPERTIES}{name}", value=value) for name, values in properties.items() for value in values]


def _sha256(digest: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]


def _purl(name: str, version: str | None = None, file: str | None = None) -> PackageURL:
    return PackageURL("pypi", None, str(canonicalize_name(name)), version, {"file_name": file} if file else None)


def _root(wheel: Wheel) -> Component:
    purl = _purl(wheel.project, str(wheel.version), wheel.path.name)
    expression = wheel.metadata.get("License-Expression")
    return Component(
        name=str(wheel.project),
        version=str(wheel.version),
        purl=purl,
        bom_ref=str(purl),
        description=wheel.metadata.get("Summary"),
        licenses=[LicenseExpression(expression)] if expression else None,
    )


def _file(wheel: Wheel, member: str, **properties: Iterable[str]) -> Component:
    """A binary inside the wheel: a native module, or what repair copied in; or the device code."""
    return Component(
        type=ComponentType.FILE,
        name=member,
        bom_ref=f"file:{member}",
        scope=ComponentScope.REQUIRED,
        hashes=_sha256(hashlib.sha256(wheel.members[member]).hexdigest()),
        properties=_properties(**properties),
    )


def _device(wheel: Wheel, code: DeviceFacts) -> Iterator[Component]:
    """The device code, as its manifest: this has the SHA-256 of each fatbin."""
    if code.digest:
        sass, ptx = (f"sm_{each}" for each in code.sass), (f"compute_{each}" for each in code.ptx)
        yield _file(wheel, MANIFEST, fatbin=code.fatbins, sass=sass, ptx=ptx)


def _pins(names: Iterable[str], platform: Platform) -> Iterator[tuple[Component, set[str]]]:
    """The locked wheels of these roots, each with the roots that it is in."""
    found: dict[lock.Wheel, set[str]] = {}
    for name in names:
        for pin in lock.wheels_for(roots.find(name), platform):
            found.setdefault(pin, set()).add(name)
    for pin, those in found.items():
        package, version = pin.requirement.split("==")
        yield _package(package, version, pin.file, pin.sha256, size=[str(pin.size)], root=sorted(those)), those


def _package(name: str, version: str, file: str | None = None, digest: str | None = None, **properties: Iterable[str]) -> Component:
    """A package that goes into the build."""
    source, purl = sources.of(name), _purl(name, version, file)
    return Component(
        name=name,
        version=version,
        purl=purl,
        bom_ref=str(purl),
        description=source.title,
        scope=ComponentScope.REQUIRED if "headers" in source.use else ComponentScope.EXCLUDED,
        hashes=_sha256(digest) if digest else None,
        licenses=[LicenseExpression(source.license)],
        properties=_properties(use=sorted(source.use), **properties),
    )


def _third_party(source: sources.Source) -> Component:
    """The component of files in third_party/."""
    purl = PackageURL.from_string(source.purl)
    return Component(
        name=purl.name,
        version=purl.version,
        purl=purl,
        bom_ref=source.purl,
        description=source.title,
        scope=ComponentScope.REQUIRED,
        licenses=[LicenseExpression(source.license)],
        properties=_properties(use=sorted(source.use)),
    )


def _requirements(wheel: Wheel) -> Iterator[Component]:
    """Packages installed next to the wheel: any version that the requirement admits."""
    for line in wheel.metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        extra = extra_of(requirement) or ""
        exact = [each.version for each in requirement.specifier if each.operator == "=="]
        version = exact[0] if len(requirement.specifier) == 1 and exact else None
        stated = f"{requirement.name}{requirement.specifier}"
        yield Component(
            name=requirement.name,
            version=version,
            purl=_purl(requirement.name, version),
            bom_ref=f"requirement:{f'[{extra}]' if extra else ''}{stated}",
            scope=ComponentScope.OPTIONAL if extra else ComponentScope.REQUIRED,
            is_external=True,
            properties=_properties(requirement=[stated], extra=[extra] if extra else []),
        )


def _tools(wheel: Wheel, build: Mapping[str, Any]) -> Iterator[Component]:
    """The tools that made the wheel: the compilers, the build tools, and this stage itself."""
    if build:
        yield _tool(build["compiler"]["id"], build["compiler"]["version"], "C++ compiler")
        yield _tool("CMake", build["cmake"], f"generator: {build['generator']}")
    # The compilers of device code may have run on another machine, for all platforms: their versions are known, not whose wheels they were.
    for requirement in json.loads(wheel.members.get(MANIFEST, b"{}")).get("packages", []):
        package, version = requirement.split("==")
        if "tool" in sources.of(package).use:
            yield _tool(package, version, sources.of(package).title, _purl(package, version))
    for line in wheel.information("WHEEL").splitlines():
        name, _, generator = line.partition(": ")
        if name == "Generator" and generator:
            tool, _, version = generator.partition(" ")
            yield _tool(tool, version or None, "build backend")
    yield _installed("delvewheel" if wheel.system == "windows" else "auditwheel", "repair")


def _tool(name: str, version: str | None, description: str | None = None, purl: PackageURL | None = None) -> Component:
    return Component(
        type=ComponentType.APPLICATION,
        name=name,
        version=version,
        description=description,
        purl=purl,
        bom_ref=f"tool:{name}",
    )


def _installed(name: str, description: str | None = None) -> Component:
    """A tool of this environment."""
    version = installed_version(name)
    return _tool(name, version, description, _purl(name, version))
