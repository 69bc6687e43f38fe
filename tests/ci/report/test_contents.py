"""What the report knows of wheels: what their bytes are, who supplies their libraries, their bill of materials."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.device.packed import pack, unpack
from ci.report.contents import Label, examine, parts
from ci.report.model import make
from ci.report.page import render
from ci.wheelfile.wheel import DEVICE, MANIFEST, read

from ..audit_support import (
    CU12,
    CU13,
    DEVICE_CODE,
    DIST_INFO,
    MATRIX,
    World,
    container,
    entry,
    fatbin,
    with_module,
)


def test_every_byte_of_a_module_has_one_label(world: World) -> None:
    machine, text, other = entry(2, "90a", b"\x5a" * 800), entry(1, "120", b"\x5a" * 80), entry(8, "120")
    code = container([machine, text, other]) + fatbin(["90a"], [])
    data = world.module("labels.so", CU13, gpu_code=code)
    found = parts(data)
    assert sum(found.values()) == len(data)
    assert found[Label("sass", "sm_90a", "90a")] == len(machine) + len(entry(2, "90a", name="decode.cu"))
    assert found[Label("ptx", "compute_120", "120")] == len(text)
    assert found[Label("other", "kind 8 for 120")] == len(other)
    assert found[Label("code", "host code")] > 0


def test_overlapping_sections_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from ci.report import contents

    monkeypatch.setattr(contents, "_sections", lambda _: iter([(0, 60, ".text"), (40, 1000, ".rodata"), (50, 5, ".debug_info")]))
    assert {label.kind: size for label, size in parts(b"x" * 100).items()} == {"code": 60, "data": 40}


def test_gpu_code_is_not_counted_with_the_section_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ci.report import contents

    data = b"x" * 100 + fatbin([80, 90], [])
    monkeypatch.setattr(contents, "_sections", lambda _: iter([(0, len(data), ".rodata")]))
    size = len(entry(2, "80", name="decode.cu"))
    assert {label.name: size for label, size in parts(data).items()} == {"sm_80": size, "sm_90": size, "constants": 100 + 16}


def test_windows_modules_have_labels_too(windows: World) -> None:
    data = windows.module("_cu12.pyd", CU12)
    found = parts(data)
    assert sum(found.values()) == len(data)
    assert {"code", "tables"} <= {label.kind for label in found}


def test_every_byte_of_device_code_has_one_label(wheel: Callable[..., Path]) -> None:
    contents = make([wheel()]).wheels[0].contents
    sizes = contents.device.parts
    assert sum(sizes.values()) == contents.device.size == sum(len(data) for name, data in DEVICE_CODE.items() if name != MANIFEST)
    sources = [name.removeprefix(DEVICE).removesuffix(".fatbin.lzma") for name in DEVICE_CODE if name != MANIFEST]
    assert list(contents.device.fatbins) == sorted(sources)
    of_80 = [each for each in sources if "80" in MATRIX.device.declared(each).sass]
    shares = ((each, len(entry(2, "80", name=f"{each}.cu"))) for each in of_80)
    files = {each: DEVICE_CODE[f"{DEVICE}{each}.fatbin.lzma"] for each in of_80}
    assert sizes[Label("sass", "sm_80", "80")] == sum(size * len(files[each]) // len(unpack(files[each])) for each, size in shares)


def test_every_byte_has_one_kind(wheel: Callable[..., Path]) -> None:
    contents = examine(read(wheel()))
    assert contents.unpacked == sum(contents.kinds.values()) == sum(member.file_size for member in contents.members)
    described = [member for member in contents.members if member.filename.startswith(DIST_INFO)]
    assert contents.kinds["about"] == sum(member.file_size for member in described)
    assert contents.kinds["sass"] == sum(size for label, size in contents.device.parts.items() if label.kind == "sass")
    larger = examine(read(wheel(lambda files: files.update({"mlx_cuda/data.bin": b"x" * 7}), folder="larger")))
    assert larger.kinds["other"] == contents.kinds["other"] + 7


def test_gpu_code_stands_in_the_order_of_architectures(wheel: Callable[..., Path]) -> None:
    contents = examine(read(wheel()))
    assert [label.architecture for label in contents.device.parts if label.kind == "sass"] == list(MATRIX.device.sass)
    assert not {"sass", "ptx"} & {label.kind for module in contents.modules for label in module.parts}


def test_damaged_device_code_is_shown_all_the_same(wheel: Callable[..., Path]) -> None:
    report = make([wheel(lambda files: files.update({f"{DEVICE}decode.fatbin.lzma": pack(fatbin([80], []))[:-1]}))])
    assert report.wheels[0].contents.device.fatbins["decode"] == frozenset()
    assert "is not one packed fatbin" in render(report)


def test_who_supplies_what(wheel: Callable[..., Path], world: World) -> None:
    stranger = world.library(world.folder / "made" / "libstranger.so.1", "int stranger(void) { return 1; }")
    uses = make([wheel(with_module(world, arguments=[stranger]))]).wheels[0].uses
    found = {(use.library, use.supplier.kind, use.supplier.name, use.supplier.directory, use.modules) for use in uses}
    both = ("_cu12.abi3.so", "_cu13.abi3.so")
    assert ("libcudart.so.13", "package", "nvidia-cuda-runtime", "nvidia/cu13/lib", both[1:]) in found
    assert ("libmlx.so", "package", "mlx-cuda-12", "mlx/lib", both[:1]) in found
    assert ("libcuda.so.1", "driver", "NVIDIA driver", "", both) in found
    assert ("libc.so.6", "system", "every Linux of the tag", "", both) in found
    assert ("libstranger.so.1", "nobody", "nobody", "", both[1:]) in found


def test_the_bill_of_materials(wheel: Callable[..., Path]) -> None:
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "components": [
            {
                "type": "library",
                "name": "cccl",
                "version": "3.0",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256"}],
            },
            {"type": "application", "name": "NVRTC", "version": "12.8", "licenses": [{"expression": "A OR B"}]},
        ],
    }
    path = wheel(lambda files: files.update({f"{DIST_INFO}/sboms/x.cdx.json": json.dumps(document).encode()}))
    (found,) = make([path]).wheels[0].contents.bills
    assert found.format == "CycloneDX 1.6"
    assert [(each.name, each.license, each.hashed) for each in found.components] == [
        ("cccl", "Apache-2.0", True),
        ("NVRTC", "A OR B", False),
    ]
    html = render(make([path]))
    assert "2 components" in html
    assert "A OR B" in html


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"components": 5}',
        '{"components": [1, {"name": 3, "licenses": "x"}, {"licenses": [{"license": []}], "hashes": {}}]}',
        "\udcff",
    ],
)
def test_a_strange_bill_of_materials(wheel: Callable[..., Path], text: str) -> None:
    path = wheel(lambda files: files.update({f"{DIST_INFO}/sboms/x.cdx.json": text.encode("utf-8", "surrogateescape")}))
    report = make([path])
    assert report.wheels[0].contents.bills[0].format == "not a readable CycloneDX document"
    assert "Bill of materials: not a readable" in render(report)
