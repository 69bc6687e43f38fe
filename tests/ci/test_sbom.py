"""The SBOM that repair writes, and the audit's check of it: on small wheels of both systems, and on the real one where there is one."""

from __future__ import annotations

import calendar
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion

from ci.audit import audit_wheel, providers
from ci.audit.checks.sbom import _shown
from ci.audit.sbom.document import render
from ci.errors import CheckFailed, EnvironmentProblem
from ci.matrix import System, load
from ci.repair import repair, sbom
from ci.repair.sbom import archive
from ci.toolkit import lock, roots
from ci.wheelfile.wheel import MANIFEST, SBOM
from ci.wheelfile.wheel import read as read_wheel

from .audit_support import BUILD, DIST_INFO, NAMES, PROJECT, VERSION, WINDOWS_BUILD, Files, World, member, with_sbom, write_wheel
from .damage_support import later

MATRIX = load()
MEMBER = f"{DIST_INFO}/sboms/{SBOM}"
PLATFORMS: dict[System, str] = {"linux": "linux-x86_64", "windows": "win-amd64"}
ROOTS = [*dict.fromkeys(root for cuda in MATRIX.cuda.values() for root in cuda.roots), MATRIX.device.root]


@pytest.fixture(scope="module", params=["linux", "windows"])
def system(request: pytest.FixtureRequest) -> System:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def wheel(tmp_path: Path, files: Files, system: System) -> Path:
    return with_sbom(write_wheel(tmp_path / NAMES[system], files))


def read_sbom(path: Path) -> dict[str, Any]:
    wheel = read_wheel(path)
    return json.loads(wheel.members[wheel.sbom])  # type: ignore[no-any-return]


@cache
def validator(specification: str) -> Any:
    """Imported when it is needed, as that takes seconds."""
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.from_version(specification))


def validated(path: Path) -> dict[str, Any]:
    """The SBOM of a wheel, valid by the strict schema of its own version, with references that lead somewhere."""
    document = read_sbom(path)
    mistake = validator(document["specVersion"]).validate_str(json.dumps(document))
    assert mistake is None, mistake
    known = {component["bom-ref"] for component in [*document["components"], document["metadata"]["component"]]}
    for entry in document["dependencies"]:
        assert {entry["ref"], *entry.get("dependsOn", [])} <= known
    return document


def named(components: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Components by their name; those that only stand for a requirement are left out."""
    return {each["name"]: each for each in components if not each.get("isExternal")}


def values(component: dict[str, Any], name: str) -> list[str]:
    return [each["value"] for each in component.get("properties", []) if each["name"] == f"mlx-cuda:{name}"]


def sha256(component: dict[str, Any]) -> str:
    (digest,) = component["hashes"]
    assert digest["alg"] == "SHA-256"
    return str(digest["content"])


# ------------------------------------------------------------------------------------------------------------ what it says


def test_repair_writes_it(tmp_path: Path, files: Files, system: System, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    built = write_wheel(tmp_path / NAMES[system], files)
    repaired = repair(built, tmp_path / "one")
    assert [str(each) for each in audit_wheel(repaired, checks=("sbom", "record"))] == []
    (used,) = (each for each in validated(repaired)["formulation"][0]["components"] if each.get("description") == "repair")
    name = {"linux": "auditwheel", "windows": "delvewheel"}[system]
    assert (used["name"], used["version"]) == (name, installed_version(name))


def test_the_wheel_itself(wheel: Path) -> None:
    document = validated(wheel)
    about = document["metadata"]["component"]
    assert (about["name"], about["version"]) == ("mlx-cuda", VERSION)
    assert about["purl"] == f"pkg:pypi/mlx-cuda@{VERSION}?file_name={wheel.name}"
    assert about["licenses"] == [{"expression": PROJECT["license"]}]
    assert document["metadata"]["timestamp"] == "2026-01-02T03:04:06+00:00"  # of the wheel's newest file
    assert document["specVersion"] == "1.7"


def test_native_modules(wheel: Path, world: World) -> None:
    components = named(validated(wheel)["components"])
    for cuda in MATRIX.cuda.values():
        name = member(world, cuda)
        module = components[name]
        assert module["type"] == "file"
        assert sha256(module) == hashlib.sha256(read_wheel(wheel).members[name]).hexdigest()
        assert MATRIX.driver[world.system] in values(module, "needed")


def test_device_code(wheel: Path, system: System) -> None:
    """One file for all of it, which has the digests of the others; it depends on what is locked of its compilers."""
    document, known = validated(wheel), read_wheel(wheel)
    code = named(document["components"])[MANIFEST]
    assert code["type"] == "file"
    assert sha256(code) == known.device_digest
    assert sorted(values(code, "fatbin")) == sorted(known.fatbins)
    assert sorted(values(code, "sass")) == sorted(f"sm_{each}" for each in MATRIX.device.sass)
    assert sorted(values(code, "ptx")) == sorted(f"compute_{each}" for each in MATRIX.device.ptx)
    edges = {entry["ref"]: set(entry.get("dependsOn", [])) for entry in document["dependencies"]}
    pins = {each["bom-ref"]: each for each in document["components"] if values(each, "root")}
    locked = lock.wheels_for(roots.find(MATRIX.device.root), MATRIX.platform(PLATFORMS[system]))
    assert {sha256(pins[reference]) for reference in edges[f"file:{MANIFEST}"]} == {pin.sha256 for pin in locked}
    assert f"file:{MANIFEST}" in edges[document["metadata"]["component"]["bom-ref"]]


def test_a_pin_of_two_roots_names_both(wheel: Path) -> None:
    runtime = named(validated(wheel)["components"])["nvidia-cuda-runtime-cu12"]
    assert sorted(values(runtime, "root")) == ["cuda-12.8", "device"]


def test_pins_are_the_locks(wheel: Path, system: System) -> None:
    document = validated(wheel)
    found = {(f"{each['name']}=={each['version']}", sha256(each)) for each in document["components"] if values(each, "root")}
    platform = MATRIX.platform(PLATFORMS[system])
    assert found == {(pin.requirement, pin.sha256) for root in ROOTS for pin in lock.wheels_for(roots.find(root), platform)}


def test_a_module_depends_on_what_is_compiled_into_it(wheel: Path, world: World) -> None:
    document = validated(wheel)
    edges = {entry["ref"]: set(entry.get("dependsOn", [])) for entry in document["dependencies"]}
    names = {each["bom-ref"]: each["name"] for each in document["components"]}
    found = {names[reference] for reference in edges[f"file:{member(world, MATRIX.cuda['13.0'])}"]}
    twelve = {
        "7zip", "mlx-cuda-12", "nanobind", "nvidia-cublas-cu12", "nvidia-cuda-cccl-cu12", "nvidia-cuda-nvcc-cu12",
        "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend",
    }  # fmt: skip
    # What both modules share is compiled with the headers of the first.
    assert found == twelve | {
        "mlx-cuda-13", "nvidia-cublas", "nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cudnn-cu13",
    }  # fmt: skip
    assert {names[reference] for reference in edges[f"file:{member(world, MATRIX.cuda['12.8'])}"]} == twelve
    assert {f"file:{member(world, cuda)}" for cuda in MATRIX.cuda.values()} <= edges[document["metadata"]["component"]["bom-ref"]]


def test_requirements(wheel: Path) -> None:
    stated = {values(each, "requirement")[0]: each for each in validated(wheel)["components"] if each.get("isExternal")}
    assert stated[f"mlx=={MATRIX.mlx}"]["scope"] == "required"
    assert stated[f"mlx=={MATRIX.mlx}"]["purl"] == f"pkg:pypi/mlx@{MATRIX.mlx}"
    assert stated["nvidia-cudnn-cu13<10,>=9.19"]["scope"] == "optional"
    assert values(stated["nvidia-cudnn-cu13<10,>=9.19"], "extra") == ["cu13"]
    assert "version" not in stated["nvidia-cudnn-cu13<10,>=9.19"]
    assert {*MATRIX.cuda["12.8"].requires} >= {name for name, each in stated.items() if values(each, "extra") == ["cu12"] and "==" in name}


def test_what_made_it(wheel: Path, system: System) -> None:
    (formula,) = validated(wheel)["formulation"]
    tools = named(formula["components"])
    compiler = (BUILD if system == "linux" else WINDOWS_BUILD)["compiler"]
    assert tools[compiler["id"]]["version"] == compiler["version"]
    assert tools["CMake"]["version"] == "4.4.4"
    assert tools["scikit-build-core"]["description"] == "build backend"  # from the WHEEL file
    for name in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-nvfatbin-cu12"):
        (pin,) = (each for each in roots.find(MATRIX.device.root).packages if each.startswith(f"{name}=="))
        assert tools[name]["version"] == pin.split("==")[1]
        assert tools[name]["purl"] == f"pkg:pypi/{name}@{tools[name]['version']}"  # no file: any machine may have made device code
    assert "nvidia-cuda-cccl-cu12" not in tools


def test_a_wheel_that_tells_nothing_of_its_build(tmp_path: Path, files: Files, system: System) -> None:
    silent = {name: data for name, data in files.items() if name != MANIFEST and not name.endswith("_build.json")}
    document = validated(with_sbom(write_wheel(tmp_path / NAMES[system], silent)))
    assert not {"CMake", "nvidia-cuda-nvrtc-cu12"} & named(document["formulation"][0]["components"]).keys()
    assert MANIFEST not in named(document["components"])
    assert "nvidia-cuda-nvrtc-cu12" not in named(document["components"])


@pytest.mark.parametrize("facts", [b"{", b"[1]", b'{"cmake": "4"}', b'{"nanobind": "\\ud800"}'])
def test_facts_of_no_build(tmp_path: Path, files: Files, system: System, facts: bytes) -> None:
    path = write_wheel(tmp_path / NAMES[system], {**files, "mlx_cuda/_build.json": facts})
    before = path.read_bytes()
    with pytest.raises(CheckFailed, match=f"{path.name}: its contents do not make an SBOM: "):
        sbom.embed(path)
    assert path.read_bytes() == before


def test_what_repair_copied_in(tmp_path: Path, files: Files, system: System, world: World) -> None:
    suffix = "dll" if system == "windows" else "so"
    friend = world.library(world.folder / "made" / f"friend-0123abcd.{suffix}", "int f(void) { return 1; }").read_bytes()
    inside = {**files, f"mlx_cuda.libs/friend-0123abcd.{suffix}": friend, f"{DIST_INFO}/sboms/auditwheel.cdx.json": b"{}"}
    path = with_sbom(write_wheel(tmp_path / NAMES[system], inside))
    component = named(validated(path)["components"])[f"mlx_cuda.libs/friend-0123abcd.{suffix}"]
    assert sha256(component) == hashlib.sha256(friend).hexdigest()
    assert read_wheel(path).members[f"{DIST_INFO}/sboms/auditwheel.cdx.json"] == b"{}"


# ------------------------------------------------------------------------------------------------------------ how it is written


def test_same_wheel_same_bytes(tmp_path: Path, files: Files, system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    first = with_sbom(write_wheel(tmp_path / "one" / NAMES[system], files))
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    before = os.umask(0o077)
    try:
        second = with_sbom(write_wheel(tmp_path / "two" / NAMES[system], files))
    finally:
        os.umask(before)
        monkeypatch.undo()
        time.tzset()
    assert first.read_bytes() == second.read_bytes()


def test_writing_it_again_changes_nothing(wheel: Path) -> None:
    before = wheel.read_bytes()
    sbom.embed(wheel)
    assert wheel.read_bytes() == before


def test_the_serial_number_follows_the_contents(wheel: Path) -> None:
    before = read_sbom(wheel)["serialNumber"]
    sbom.embed(wheel, epoch=1_700_000_000)
    assert read_sbom(wheel)["serialNumber"] != before
    assert read_sbom(wheel)["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"


def test_the_other_members_stay_as_they_are(tmp_path: Path, files: Files, system: System) -> None:
    path = write_wheel(tmp_path / NAMES[system], files)
    with zipfile.ZipFile(path) as archive_:
        before = [(entry.filename, entry.date_time, entry.external_attr, archive_.read(entry)) for entry in archive_.infolist()]
    sbom.embed(path)
    with zipfile.ZipFile(path) as archive_:
        after = [(entry.filename, entry.date_time, entry.external_attr, archive_.read(entry)) for entry in archive_.infolist()]
        assert archive_.testzip() is None
    assert after[:-2] == before[:-1]
    assert [entry[0] for entry in after[-2:]] == [MEMBER, f"{DIST_INFO}/RECORD"]
    assert [each.check for each in audit_wheel(path, checks=("record",))] == []


def test_a_wrong_record_stays_wrong(tmp_path: Path, files: Files, system: System) -> None:
    """What was spoilt before is not made to look right."""
    path = write_wheel(tmp_path / NAMES[system], {**files, f"{DIST_INFO}/RECORD": b"mlx_cuda/__init__.py,sha256=x,0\n"})
    assert "mlx_cuda/__init__.py" in {each.member for each in audit_wheel(with_sbom(path), checks=("record",))}


def test_a_failure_leaves_the_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = wheel.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "_text", full)
    with pytest.raises(EnvironmentProblem, match="No space left"):
        sbom.embed(wheel)
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]
    assert wheel.read_bytes() == before


# ------------------------------------------------------------------------------------------------------------ the audit's check


@later
def changed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(data)
    change(document)
    return json.dumps(document).encode()


@later
def without(document: dict[str, Any], name: str) -> None:
    kept = [each for each in document["components"] if each["name"] != name]
    assert len(kept) < len(document["components"])
    document["components"] = kept


def other_hash(document: dict[str, Any]) -> None:
    named(document["components"])["nvidia-cuda-cccl"]["hashes"][0]["content"] = "0" * 64


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: b"{", "is not JSON (Expecting property name"),
        (lambda _: b"[]", "has [] in the document, expected {"),
        (lambda data: data + b"\n", "is written otherwise, expected the bytes that python -m ci repair writes"),
        (changed(lambda document: document.pop("specVersion")), 'has null in /specVersion, expected "1.7"'),
        (changed(lambda document: document.update(bomFormat="SPDX")), 'has "SPDX" in /bomFormat, expected "CycloneDX"'),
        (
            changed(lambda document: document["metadata"]["component"].update(version="9")),
            f'has "9" in /metadata/component/version, expected "{VERSION}"',
        ),
        (changed(lambda document: document.update(bomFormat="x" * 999)), f'has {chr(34)}{"x" * 159} in /bomFormat, expected "CycloneDX"'),
        (changed(without("nvidia-cudnn-frontend")), "lacks in /components nvidia-cudnn-frontend ("),
        (changed(without("nvidia-cuda-nvrtc-cu12")), "lacks in /components nvidia-cuda-nvrtc-cu12 ("),
        (changed(other_hash), "lacks in /components nvidia-cuda-cccl ("),
        (changed(lambda document: document["components"].reverse()), "has the parts of /components in another order"),
        (changed(lambda document: document["components"].append(document["components"][0])), "has parts of /components more than once"),
    ],
)
def test_a_wrong_one(wheel: Path, tmp_path: Path, system: System, spoil: Callable[[bytes], bytes], message: str) -> None:
    members = dict(read_wheel(wheel).members)
    members[MEMBER] = spoil(members[MEMBER])
    found = audit_wheel(write_wheel(tmp_path / "spoilt" / NAMES[system], members), checks=("sbom",))
    assert {violation.member for violation in found} == {MEMBER}
    assert [violation for violation in found if violation.message.startswith(message)], found
    assert all(len(violation.message) <= 500 for violation in found)


@pytest.mark.parametrize(("later", "wrong"), [(-2, True), (-1, True), (0, False), (1, False), (2, True)])
def test_the_time_that_it_tells(tmp_path: Path, files: Files, system: System, later: int, wrong: bool) -> None:
    """Times in a zip are even; the document's may be the second after."""
    path = with_sbom(write_wheel(tmp_path / NAMES[system], files))
    epoch = calendar.timegm(read_wheel(path).entries[MEMBER].date_time) + later
    members = {**read_wheel(path).members, MEMBER: render(read_wheel(path), epoch=epoch).encode()}
    found = audit_wheel(write_wheel(tmp_path / "spoilt" / NAMES[system], members), checks=("sbom",))
    assert ["/metadata/timestamp" in each.message for each in found] == [True] * wrong


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"name": "a", "b": 1}, 'a ({"name": "a", "b": 1})'),
        ({"ref": "r", "name": "n"}, 'n r ({"ref": "r", "name": "n"})'),
        ({"alg": "SHA-256", "content": "12"}, '12 ({"alg": "SHA-256", "content": "12"})'),
        ({"name": ""}, '{"name": ""}'),
        (["x"], '["x"]'),
        ("x" * 200, '"' + "x" * 159),
        ({"name": "a", "b": "x" * 200}, 'a ({"name": "a", "b": "' + "x" * 140 + ")"),
    ],
)
def test_what_is_shown_of_a_part(value: object, shown: str) -> None:
    assert _shown(value) == shown


def test_a_module_that_was_changed_afterwards(wheel: Path, tmp_path: Path, system: System, world: World) -> None:
    name = member(world, MATRIX.cuda["12.8"])
    members = {**read_wheel(wheel).members, name: read_wheel(wheel).members[name] + b"\0"}
    found = audit_wheel(write_wheel(tmp_path / "spoilt" / NAMES[system], members), checks=("sbom",))
    assert [each.message.partition(" (")[0] for each in found] == [f"{verb} in /components {name}" for verb in ("has", "lacks")]


def test_device_code_that_was_changed_afterwards(wheel: Path, tmp_path: Path, system: System) -> None:
    members = {**read_wheel(wheel).members, MANIFEST: read_wheel(wheel).members[MANIFEST] + b" "}
    found = audit_wheel(write_wheel(tmp_path / "spoilt" / NAMES[system], members), checks=("sbom",))
    assert [each.message.partition(" (")[0] for each in found] == [f"{verb} in /components {MANIFEST}" for verb in ("has", "lacks")]


def test_none_at_all(tmp_path: Path, files: Files, system: System) -> None:
    (violation,) = audit_wheel(write_wheel(tmp_path / NAMES[system], files), checks=("sbom",))
    assert violation.message == "is missing, expected the SBOM that python -m ci repair writes"


# ------------------------------------------------------------------------------------------------------------ the real wheel


def test_the_real_wheel(tested_wheel: Path) -> None:
    assert [str(each) for each in audit_wheel(tested_wheel, checks=("sbom", "metadata", "record"))] == []
    document = validated(tested_wheel)
    build = json.loads(read_wheel(tested_wheel).members["mlx_cuda/_build.json"])
    assert build.keys() == BUILD.keys()
    tools = [(each["name"], each["version"]) for each in document["formulation"][0]["components"]]
    assert (build["compiler"]["id"], build["compiler"]["version"]) in tools
    assert {package.split("==")[0] for package in roots.find(MATRIX.device.root).packages if "nvrtc" in package} <= {
        name for name, _ in tools
    }
