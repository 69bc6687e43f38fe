"""Each kind of component of the SBOM, to the last word, and the archive that it is put into."""

from __future__ import annotations

import json
import stat
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest

from ci.audit.sbom import sources
from ci.errors import CheckFailed
from ci.matrix import load
from ci.repair import sbom
from ci.repair.sbom.archive import insert, source_date_epoch
from ci.toolkit import lock, roots
from ci.wheelfile.wheel import MANIFEST, SBOM

from .audit_support import DIST_INFO, METADATA, NAMES, PROJECT, RECORD, VERSION, WHEEL, Change, Files, World, replaced, write_wheel

MATRIX = load()
MEMBER = f"{DIST_INFO}/sboms/{SBOM}"
NAME = NAMES["linux"]
PLATFORM = MATRIX.platform("linux-x86_64")


@pytest.fixture
def rendered(tmp_path: Path, files: Files) -> Callable[..., dict[str, Any]]:
    """The SBOM of the good wheel after a change."""

    def render(change: Change = lambda _: None, name: str = NAME) -> dict[str, Any]:
        changed = dict(files)
        change(changed)
        path = write_wheel(tmp_path / name, changed)
        sbom.embed(path)
        with zipfile.ZipFile(path) as archive:
            return json.loads(archive.read(MEMBER))  # type: ignore[no-any-return]

    return render


@pytest.fixture
def document(rendered: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return rendered()


def component(document: dict[str, Any], reference: str) -> dict[str, Any]:
    (found,) = (each for each in document["components"] if each["bom-ref"] == reference)
    found["properties"] = [(each["name"], each["value"]) for each in found["properties"]]
    return found  # type: ignore[no-any-return]


def tools(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (formula,) = document["formulation"]
    assert formula["bom-ref"] == "formulation"
    return {each["name"]: each for each in formula["components"]}


def pin(root: str, package: str) -> lock.Wheel:
    (found,) = (each for each in lock.wheels_for(roots.find(root), PLATFORM) if each.requirement.startswith(f"{package}=="))
    return found


# ------------------------------------------------------------------------------------------------------------ the components


def test_its_parts(document: dict[str, Any]) -> None:
    parts = {"metadata", "components", "dependencies", "formulation"}
    assert document.keys() == {"$schema", "bomFormat", "specVersion", "version", "serialNumber", *parts}
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.7", 1)


def test_the_wheel(document: dict[str, Any]) -> None:
    reference = f"pkg:pypi/mlx-cuda@{VERSION}?file_name={NAME}"
    assert document["metadata"] == {
        "component": {
            "bom-ref": reference,
            "description": "Fast matmul and attention kernels for MLX on NVIDIA GPUs",
            "licenses": [{"expression": PROJECT["license"]}],
            "name": "mlx-cuda",
            "purl": reference,
            "type": "library",
            "version": VERSION,
        },
        "lifecycles": [{"phase": "build"}],
        "timestamp": "2026-01-02T03:04:06+00:00",
        "tools": {
            "components": [
                {
                    "bom-ref": "tool:cyclonedx-python-lib",
                    "name": "cyclonedx-python-lib",
                    "purl": f"pkg:pypi/cyclonedx-python-lib@{installed_version('cyclonedx-python-lib')}",
                    "type": "application",
                    "version": installed_version("cyclonedx-python-lib"),
                }
            ]
        },
    }


def test_a_wheel_that_states_no_license(rendered: Callable[..., dict[str, Any]]) -> None:
    about = rendered(replaced(METADATA, f"License-Expression: {PROJECT['license']}\n", ""))["metadata"]["component"]
    assert "licenses" not in about


def test_a_module(document: dict[str, Any]) -> None:
    module = component(document, "file:mlx_cuda/_cu13.abi3.so")
    assert module.pop("hashes")[0]["alg"] == "SHA-256"
    libraries = ["libc.so.6", "libcublasLt.so.13", "libcuda.so.1", "libcudart.so.13", "libcudnn.so.9", "libmlx.so"]
    assert module == {
        "bom-ref": "file:mlx_cuda/_cu13.abi3.so",
        "name": "mlx_cuda/_cu13.abi3.so",
        "properties": [("mlx-cuda:needed", name) for name in libraries],
        "scope": "required",
        "type": "file",
    }


def test_a_locked_package(document: dict[str, Any]) -> None:
    locked = pin("cuda-13.0", "nvidia-cuda-cccl")
    version = locked.requirement.partition("==")[2]
    reference = f"pkg:pypi/nvidia-cuda-cccl@{version}?file_name={locked.file}"
    assert component(document, reference) == {
        "bom-ref": reference,
        "description": sources.of("nvidia-cuda-cccl").title,
        "hashes": [{"alg": "SHA-256", "content": locked.sha256}],
        "licenses": [{"expression": "Apache-2.0 WITH LLVM-exception"}],
        "name": "nvidia-cuda-cccl",
        "properties": [("mlx-cuda:root", "cuda-13.0"), ("mlx-cuda:size", str(locked.size)), ("mlx-cuda:use", "headers")],
        "purl": reference,
        "scope": "required",
        "type": "library",
        "version": version,
    }


def test_a_package_that_is_only_a_tool_is_excluded(document: dict[str, Any]) -> None:
    """Nothing of it is in the wheel; what lends headers is in it."""
    scopes = {each["name"]: each["scope"] for each in document["components"] if not each.get("isExternal")}
    assert scopes["nvidia-cuda-nvrtc-cu12"] == "excluded"
    assert scopes["nvidia-cuda-nvcc-cu12"] == "required"  # it holds crt headers too


def test_nanobind(document: dict[str, Any]) -> None:
    """It comes from the build requirements: no file of it is locked."""
    assert component(document, "pkg:pypi/nanobind@3.1.0") == {
        "bom-ref": "pkg:pypi/nanobind@3.1.0",
        "description": sources.of("nanobind").title,
        "licenses": [{"expression": "BSD-3-Clause"}],
        "name": "nanobind",
        "properties": [("mlx-cuda:use", "headers")],
        "purl": "pkg:pypi/nanobind@3.1.0",
        "scope": "required",
        "type": "library",
        "version": "3.1.0",
    }


@pytest.mark.parametrize(
    ("line", "reference", "stated"),
    [
        ("A_b.c==1.5", "requirement:A_b.c==1.5", {"purl": "pkg:pypi/a-b-c@1.5", "version": "1.5", "scope": "required"}),
        ("other>=1,==2", "requirement:other==2,>=1", {"purl": "pkg:pypi/other", "scope": "required"}),
        ("other", "requirement:other", {"purl": "pkg:pypi/other", "scope": "required"}),
        ("other!=2", "requirement:other!=2", {"purl": "pkg:pypi/other", "scope": "required"}),
        ('other==3; extra == "cu12"', "requirement:[cu12]other==3", {"purl": "pkg:pypi/other@3", "version": "3", "scope": "optional"}),
    ],
)
def test_a_requirement(rendered: Callable[..., dict[str, Any]], line: str, reference: str, stated: dict[str, str]) -> None:
    """A version is told where there is but one."""
    found = component(rendered(replaced(METADATA, "Requires-Python", f"Requires-Dist: {line}\nRequires-Python")), reference)
    extra = [("mlx-cuda:extra", "cu12")] if "extra" in line else []
    stated_by = ("mlx-cuda:requirement", reference.partition(":")[2].removeprefix("[cu12]"))
    assert found.pop("name") == line.partition(";")[0].rstrip("=<>!,.0123456789")
    assert found == {"bom-ref": reference, "isExternal": True, "properties": [*extra, stated_by], "type": "library", **stated}


def test_a_wheel_that_requires_nothing(rendered: Callable[..., dict[str, Any]]) -> None:
    def alone(files: Files) -> None:
        files[METADATA] = b"".join(line for line in files[METADATA].splitlines(True) if not line.startswith(b"Requires-Dist"))

    assert not [each for each in rendered(alone)["components"] if each.get("isExternal")]


# ------------------------------------------------------------------------------------------------------------ what made it


def test_tools(document: dict[str, Any]) -> None:
    found = tools(document)
    assert found["GNU"] == {
        "bom-ref": "tool:GNU",
        "description": "C++ compiler",
        "name": "GNU",
        "type": "application",
        "version": "12.2.0",
    }
    assert found["CMake"]["description"] == "generator: Ninja"
    version = installed_version("auditwheel")
    assert found["auditwheel"] == {
        "bom-ref": "tool:auditwheel",
        "description": "repair",
        "name": "auditwheel",
        "purl": f"pkg:pypi/auditwheel@{version}",
        "type": "application",
        "version": version,
    }
    assert found["nvidia-nvfatbin-cu12"]["description"] == sources.of("nvidia-nvfatbin-cu12").title
    assert len(found) == 7


@pytest.mark.parametrize(
    ("line", "name", "version"),
    [
        ("Generator: scikit-build-core 1.1.2", "scikit-build-core", "1.1.2"),
        ("Generator: bdist_wheel 0.37.1 (py3)", "bdist_wheel", "0.37.1 (py3)"),
        ("Generator: made: by hand", "made:", "by hand"),
    ],
)
def test_the_build_backend(rendered: Callable[..., dict[str, Any]], line: str, name: str, version: str) -> None:
    backend = tools(rendered(replaced(WHEEL, "Generator: scikit-build-core 1.1.2", line)))[name]
    assert (backend["version"], backend["description"]) == (version, "build backend")


def test_a_build_backend_without_a_version(rendered: Callable[..., dict[str, Any]]) -> None:
    assert "version" not in tools(rendered(replaced(WHEEL, "scikit-build-core 1.1.2", "test")))["test"]


def test_a_build_backend_that_does_not_tell_its_name(rendered: Callable[..., dict[str, Any]]) -> None:
    made = rendered(replaced(WHEEL, "Generator: scikit-build-core 1.1.2\n", ""))
    assert "build backend" not in {each.get("description") for each in tools(made).values()}


# ------------------------------------------------------------------------------------------------------------ the whole


def test_it_is_text_for_people_too(tmp_path: Path, files: Files) -> None:
    """One thing a line, letters as they are, a line's end at the end."""
    changed = {**files, METADATA: files[METADATA].replace(b"Summary: Fast", "Summary: Schnell für große".encode())}
    path = write_wheel(tmp_path / NAME, changed)
    sbom.embed(path)
    with zipfile.ZipFile(path) as archive:
        text = archive.read(MEMBER).decode()
    assert '\n  "component": {\n' in text
    assert "Schnell für große" in text
    assert text.endswith("}\n")


def test_the_serial_number_is_that_of_a_name(document: dict[str, Any]) -> None:
    """RFC 9562, version 5."""
    assert document["serialNumber"].startswith("urn:uuid:")
    assert document["serialNumber"].split("-")[2][0] == "5"
    rest = {**document, "serialNumber": uuid.UUID(int=0).urn}
    assert document["serialNumber"] == uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(rest, sort_keys=True)).urn


def test_device_code_alone_brings_its_compilers(rendered: Callable[..., dict[str, Any]]) -> None:
    """A root is in the SBOM when something of it is in the wheel."""

    def only_twelve(files: Files) -> None:
        del files["mlx_cuda/_cu13.abi3.so"]

    def no_code(files: Files) -> None:
        del files[MANIFEST]

    def found(document: dict[str, Any]) -> set[str]:
        return {each["value"] for one in document["components"] for each in one["properties"] if each["name"] == "mlx-cuda:root"}

    assert found(rendered(only_twelve)) == {*MATRIX.cuda["12.8"].roots, MATRIX.device.root}
    assert found(rendered(no_code)) == {root for cuda in MATRIX.cuda.values() for root in cuda.roots}


def test_the_matrix_that_is_given(tmp_path: Path, files: Files) -> None:
    """A CUDA version that it does not have gets nothing."""
    path = write_wheel(tmp_path / NAME, files)
    sbom.embed(path, matrix=replace(MATRIX, cuda={"12.8": MATRIX.cuda["12.8"]}))
    with zipfile.ZipFile(path) as archive:
        names = {each["name"] for each in json.loads(archive.read(MEMBER))["components"]}
    assert "mlx-cuda-12" in names
    assert "nvidia-cuda-cccl" not in names


def test_an_unknown_package() -> None:
    with pytest.raises(CheckFailed, match=r"ci/audit/sbom/sources\.toml has no entry for left-pad"):
        sources.of("left-pad")


# ------------------------------------------------------------------------------------------------------------ the archive


def archived(path: Path) -> dict[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: entry for entry in archive.infolist()}


def test_the_new_members(tmp_path: Path, files: Files) -> None:
    path = write_wheel(tmp_path / NAME, files)
    insert(path, MEMBER, b"data " * 100, dist_info=DIST_INFO, epoch=1_700_000_000)
    for entry in (archived(path)[name] for name in (MEMBER, RECORD)):
        assert entry.date_time == (2023, 11, 14, 22, 13, 20)
        assert entry.external_attr >> 16 == stat.S_IFREG | 0o644
        assert entry.create_system == 3
        assert entry.compress_type == zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(path) as archive:
        lines = archive.read(RECORD).decode().splitlines()
    assert lines[-2:] == [f"{MEMBER},sha256=VN79AAQxYFKXG7-WdXMPo8e7n0UA68LaqkGGyxM2Teo,500", f"{RECORD},,"]
    assert len(lines) == len(files) + 2


def test_a_member_is_replaced(tmp_path: Path, files: Files) -> None:
    path = write_wheel(tmp_path / NAME, files)
    for data in (b"one", b"two"):
        insert(path, MEMBER, data, dist_info=DIST_INFO, epoch=0)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist().count(MEMBER) == 1
        assert archive.read(MEMBER) == b"two"
        assert archive.read(RECORD).decode().count(MEMBER) == 1


def test_a_record_with_empty_lines_and_commas(tmp_path: Path, files: Files) -> None:
    path = write_wheel(tmp_path / NAME, {**files, RECORD: b'"a,b",sha256=x,0\r\n\r\nc,sha256=y,0\r\n'})
    insert(path, MEMBER, b"", dist_info=DIST_INFO, epoch=0)
    with zipfile.ZipFile(path) as archive:
        said = archive.read(RECORD)
    assert said.startswith(b'"a,b",sha256=x,0\nc,sha256=y,0\n' + MEMBER.encode())


@pytest.mark.parametrize(("epoch", "when"), [(0, (1980, 1, 1, 0, 0, 0)), (315_532_802, (1980, 1, 1, 0, 0, 2))])
def test_a_time_before_that_of_zip(tmp_path: Path, files: Files, epoch: int, when: tuple[int, ...]) -> None:
    path = write_wheel(tmp_path / NAME, files)
    insert(path, MEMBER, b"", dist_info=DIST_INFO, epoch=epoch)
    assert archived(path)[MEMBER].date_time == when


def test_members_keep_how_they_are_packed(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("stored", (2026, 1, 2, 3, 4, 6)), b"x" * 100)
        archive.writestr(RECORD, "stored,,\n")
    insert(path, MEMBER, b"", dist_info=DIST_INFO, epoch=0)
    assert archived(path)["stored"].compress_type == zipfile.ZIP_STORED


def test_the_time_is_that_of_the_newest_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as archive:
        for year in (1999, 2001, 2000):
            archive.writestr(zipfile.ZipInfo(str(year), (year, 1, 1, 0, 0, 0)), b"")
    assert source_date_epoch(path) == "978307200"  # 2001-01-01 UTC


def test_the_environments_time(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second of SOURCE_DATE_EPOCH counts for an SBOM that is embedded by itself."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000001")
    path = write_wheel(tmp_path / NAME, files)
    sbom.embed(path)
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read(MEMBER))["metadata"]["timestamp"] == "2023-11-14T22:13:21+00:00"
