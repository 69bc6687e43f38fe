"""The audit's checks of device code: each passes the good wheel and says what is wrong with a bad one."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci.audit import audit_wheel, describe, disagreements
from ci.audit.checks import SAME_DEVICE
from ci.device.packed import pack
from ci.errors import EnvironmentProblem
from ci.matrix import newest_first
from ci.toolkit import roots
from ci.wheelfile.wheel import DEVICE, MANIFEST, read

from .audit_support import (
    DEVICE_CODE,
    MATRIX,
    NAMES,
    Files,
    World,
    container,
    device_code,
    entry,
    fatbin,
    member,
    with_device,
    with_sbom,
    write_wheel,
)
from .damage_support import later

CHECKS = ("device", "device-digest")
DECODE = f"{DEVICE}decode.fatbin.lzma"
DECLARED = MATRIX.device.declared("decode")
GOOD = fatbin(DECLARED.sass, DECLARED.ptx)
PACKED = pack(GOOD)
SHORT = struct.pack("<HHIQ12xI8xQ8x", 2, 0x101, 48, 8, 90, 0x11)  # an entry with a header too small for what is read of one
COMPILERS = ", ".join(roots.find(MATRIX.device.root).packages)
Found = list[tuple[str, str, str]]


@pytest.fixture
def found(tmp_path: Path, files: Files) -> Callable[..., Found]:
    """What the audit finds in the good wheel with other device code, which its native modules know."""

    def run(change: Callable[[Files], object], arch: tuple[str, ...] = ()) -> Found:
        changed, code = dict(files), dict(DEVICE_CODE)
        change(code)
        with_device(changed, {MANIFEST: b"", **code})
        if MANIFEST not in code:
            del changed[MANIFEST]
        violations = audit_wheel(write_wheel(tmp_path / NAMES["linux"], changed), arch=arch, checks=CHECKS)
        return [(each.check, each.member, each.message) for each in violations]

    return run


def told(code: Files, change: Callable[[dict[str, Any]], object]) -> None:
    """Let the manifest say something else."""
    document = json.loads(code[MANIFEST])
    change(document)
    code[MANIFEST] = (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


@later
def rewritten(code: Files, /, data: bytes, *, packs: bool = True, **says: list[str]) -> None:
    """Another fatbin in one file, or other contents, with their digest and size in the manifest."""
    code[DECODE] = data = pack(data) if packs else data
    facts = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), **says}
    told(code, lambda document: document["fatbins"]["decode"].update(facts))


def test_good(found: Callable[..., Found]) -> None:
    assert found(lambda _: None) == []


def test_a_missing_fatbin(found: Callable[..., Found]) -> None:
    assert found(lambda code: code.pop(DECODE)) == [("device", DECODE, "is missing, expected the device code of this source")]


def test_several_that_are_wrong(found: Callable[..., Found]) -> None:
    """Each is told, whatever is wrong with those before it."""
    names = sorted(name for name in DEVICE_CODE if name.endswith(".fatbin.lzma"))[:4]

    def change(code: Files) -> None:
        for name in names[::2]:
            del code[name]
        for name in names[1::2]:
            code[name] = b"x"

    missing, wrong = "is missing", "is not one packed fatbin: it has 1 bytes"
    told = [(name, message.partition(",")[0]) for _, name, message in found(change)]
    expected = [(name, wrong if number % 2 else missing) for number, name in enumerate(names)]
    assert [each for each in told if each[1] in {missing, wrong}] == expected


@pytest.mark.parametrize("name", ["other.fatbin.lzma", "notes.txt", "deeper/decode.fatbin.lzma"])
def test_an_extra_file(found: Callable[..., Found], name: str) -> None:
    message = "is unexpected, expected the manifest and a fatbin for each source of device code"
    assert found(lambda code: code.update({f"{DEVICE}{name}": GOOD})) == [("device", f"{DEVICE}{name}", message)]


def test_a_changed_byte(found: Callable[..., Found]) -> None:
    changed = PACKED[:-1] + b"x"
    digests = [hashlib.sha256(data).hexdigest() for data in (changed, PACKED)]
    expected = ("device", DECODE, f"has the SHA-256 {digests[0]}, expected the manifest's {digests[1]}")
    assert expected in found(lambda code: code.update({DECODE: changed}))


def test_another_size(found: Callable[..., Found]) -> None:
    (violation,) = found(lambda code: told(code, lambda document: document["fatbins"]["decode"].update(size=7)))
    assert violation == ("device", DECODE, f"is {len(PACKED)} bytes, expected the manifest's 7")


def test_no_manifest(found: Callable[..., Found]) -> None:
    assert found(lambda code: code.pop(MANIFEST)) == [("device", MANIFEST, "is missing, expected the manifest of the device code")]


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"fatbins": {}}', b"\xff"])
def test_an_unreadable_manifest(found: Callable[..., Found], text: bytes) -> None:
    ((check, name, message),) = found(lambda code: code.update({MANIFEST: text}))
    assert (check, name) == ("device", MANIFEST)
    assert message.startswith("is not a manifest of device code: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document["fatbins"].pop("decode"), "does not list decode, expected every source of device code"),
        (
            lambda document: document["fatbins"].update(other=document["fatbins"]["decode"]),
            "lists other, expected sources of device code only",
        ),
        (
            lambda document: document["fatbins"]["decode"].update(sass=["80"]),
            "says of decode sm_80 compute_80, expected sm_80 sm_90a sm_100 sm_120 compute_80",
        ),
        (
            lambda document: document["fatbins"]["decode"].update(ptx=[]),
            "says of decode sm_80 sm_90a sm_100 sm_120, expected sm_80 sm_90a sm_100 sm_120 compute_80",
        ),
        (
            lambda document: document["fatbins"]["decode"].update(sass=[], ptx=[]),
            "says of decode nothing, expected sm_80 sm_90a sm_100 sm_120 compute_80",
        ),
        (
            lambda document: document.update(packages=["nvidia-cuda-nvrtc-cu12==1", "b==2"]),
            f"names the compilers nvidia-cuda-nvrtc-cu12==1, b==2, expected {COMPILERS}",
        ),
        (lambda document: document.update(packages=[]), f"names the compilers none, expected {COMPILERS}"),
    ],
    ids=["one less", "one more", "SASS", "PTX", "nothing", "compilers", "no compilers"],
)
def test_a_wrong_manifest(found: Callable[..., Found], change: Callable[[dict[str, Any]], object], message: str) -> None:
    assert found(lambda code: told(code, change)) == [("device", MANIFEST, message)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (fatbin(DECLARED.sass[1:], DECLARED.ptx), "has SASS for 90a, 100, 120, expected 80, 90a, 100, 120"),
        (fatbin([*DECLARED.sass, 87], DECLARED.ptx), "has SASS for 80, 87, 90a, 100, 120, expected 80, 90a, 100, 120"),
        (fatbin([80, 90, 100, 120], DECLARED.ptx), "has SASS for 80, 90, 100, 120, expected 80, 90a, 100, 120"),
        (fatbin(DECLARED.sass, []), "has PTX for no architecture, expected 80"),
        (fatbin(DECLARED.sass, [80, 90]), "has PTX for 80, 90, expected 80"),
        (container([GOOD[16:], entry(16, "90")]), "has entries of kind 16, expected SASS and PTX only"),
        (GOOD + b"\0", "is not one whole fatbin: end: 1 bytes behind the fatbin"),
        (GOOD + GOOD, f"is not one whole fatbin: end: {len(GOOD)} bytes behind the fatbin"),
        (b"\0" + GOOD, "is not one whole fatbin: start: there is no fatbin"),
        (GOOD[:-1], "is not one whole fatbin: fatbin at offset 0: its "),
        (b"", "is not one whole fatbin: start: there is no fatbin"),
        (container([GOOD[16:], SHORT]), f"is not one whole fatbin: fatbin at offset 0: the entry at {len(GOOD)} "),
    ],
    ids=["one missing", "one more", "variant", "no PTX", "more PTX", "other kind", "behind", "two", "before", "cut off", "empty", "short"],
)
def test_what_is_in_a_fatbin(found: Callable[..., Found], data: bytes, message: str) -> None:
    """The digest is right: it is what the compilers made that is wrong."""
    ((check, name, said),) = found(rewritten(data))
    assert (check, name) == ("device", DECODE)
    assert said.startswith(message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes, expected an LZMA file"),
        (GOOD, f"the header {GOOD[:13].hex()}, expected that of an LZMA file with lc=0 lp=4 pb=4"),
        (PACKED[:-1], f"a stream of {len(GOOD)} bytes, expected one whole stream of {len(GOOD)}"),
        (PACKED[:40], "a stream of "),
        (PACKED + b"\0", f"a stream of {len(GOOD)} bytes, expected one whole stream of {len(GOOD)}"),
        (PACKED[:13] + b"\1" + PACKED[14:], "what cannot be unpacked ("),
        (PACKED[:5] + struct.pack("<Q", len(GOOD) - 1) + PACKED[13:], f"a stream of {len(GOOD)} bytes, expected one whole stream of "),
        (PACKED[:5] + struct.pack("<Q", len(GOOD) + 1) + PACKED[13:], f"a stream of {len(GOOD)} bytes, expected one whole stream of "),
        (PACKED[:5] + struct.pack("<Q", 2**28 + 1) + PACKED[13:], "the header "),
    ],
    ids=["empty", "unpacked", "cut off", "cut short", "behind", "no stream", "longer than told", "shorter than told", "too large"],
)
def test_a_file_that_is_no_packed_fatbin(found: Callable[..., Found], data: bytes, message: str) -> None:
    ((check, name, said),) = found(rewritten(data, packs=False))
    assert (check, name) == ("device", DECODE)
    assert said.startswith(f"is not one packed fatbin: it has {message}")


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((4, 0, 1, 2, 3), "has PTX before SASS, expected it last"),
        ((0, 1, 3, 2, 4), "has SASS for 120, 100, 80, 90a in this order, expected the newest first"),
    ],
)
def test_an_order_in_which_a_gpu_finds_other_code(found: Callable[..., Found], order: tuple[int, ...], message: str) -> None:
    entries = [*(entry(2, each, name="decode.cu") for each in newest_first(DECLARED.sass)), entry(1, "80", name="decode.cu")]
    assert container(entries) == GOOD
    assert found(rewritten(container(entries[each] for each in order))) == [("device", DECODE, message)]


def test_a_manifest_that_tells_the_truth_of_a_wrong_fatbin(found: Callable[..., Found]) -> None:
    """Fatbin and manifest agree, and both are not what is declared."""
    violations = found(rewritten(fatbin([80], [80]), sass=["80"]))
    assert [name for _, name, _ in violations] == [MANIFEST, DECODE]


def test_a_module_of_other_device_code(tmp_path: Path, files: Files, world: World) -> None:
    name, digest = member(world, MATRIX.cuda["12.8"]), hashlib.sha256(files[MANIFEST]).hexdigest()
    changed = {**files, name: files[name].replace(digest.encode(), b"0" * 64)}
    (violation,) = audit_wheel(write_wheel(tmp_path / NAMES["linux"], changed), checks=CHECKS)
    assert (violation.check, violation.member) == ("device-digest", name)
    assert violation.message == f"is of other device code, expected the manifest's SHA-256 in it, {digest}"


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(("90",), id="90", marks=pytest.mark.nightly),
        pytest.param(("90a",), id="90a"),
        pytest.param(("80", "compute_80"), id="80 compute_80"),
        pytest.param(("75",), id="75", marks=pytest.mark.nightly),
        pytest.param(("compute_80",), id="compute_80", marks=pytest.mark.nightly),
    ],
)
def test_a_developers_build(found: Callable[..., Found], arch: tuple[str, ...]) -> None:
    """Less device code is right by what was asked for, and wrong by the whole matrix and by anything else."""

    def change(code: Files) -> None:
        code.clear()
        code.update(device_code(arch))

    assert found(change, arch) == []
    assert found(change)
    assert found(change, ("89",))


def test_an_unknown_gpu(found: Callable[..., Found]) -> None:
    with pytest.raises(EnvironmentProblem, match="unknown architectures 'hopper'"):
        found(lambda _: None, ("hopper",))


def test_wheels_with_different_device_code(
    tmp_path: Path, files: Files, locked_roots: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is as its own manifest says, and only side by side they are wrong."""
    from ci.__main__ import main

    changed = dict(files)
    code = dict(DEVICE_CODE)
    rewritten(PACKED[:-1] + b"x", packs=False)(code)
    with_device(changed, code)
    one = with_sbom(write_wheel(tmp_path / NAMES["linux"], files))
    other = with_sbom(write_wheel(tmp_path / NAMES["linux"].replace("2_28", "2_29"), files | changed))
    assert main(["audit", str(one), str(one)]) == 0
    assert main(["audit", str(one), str(other)]) == 1
    digests = [hashlib.sha256(each[MANIFEST]).hexdigest() for each in (code, files)]
    expected = f"{other.name}: {MANIFEST}: {SAME_DEVICE}: is {digests[0]}, expected the same as in {one.name}, {digests[1]}"
    assert expected in capsys.readouterr().out.splitlines()


def test_a_wheel_without_device_code_beside_one_with_it(tmp_path: Path, files: Files) -> None:
    names = [NAMES["linux"], NAMES["linux"].replace("2_28", "2_29")]
    without = {name: data for name, data in files.items() if name != MANIFEST}
    wheels = [read(write_wheel(tmp_path / name, each)) for name, each in zip(names, (files, without), strict=True)]
    digest = hashlib.sha256(files[MANIFEST]).hexdigest()
    for wheels_, digests in ((wheels, ("nothing", digest)), (wheels[::-1], (digest, "nothing"))):
        first, other = (wheel.path.name for wheel in wheels_)
        expected = f"{other}: {MANIFEST}: {SAME_DEVICE}: is {digests[0]}, expected the same as in {first}, {digests[1]}"
        assert [str(each).partition("\n")[0] for each in disagreements(wheels_)] == [expected]


def test_facts(tmp_path: Path, files: Files) -> None:
    facts = describe(write_wheel(tmp_path / NAMES["linux"], files)).device
    fatbins = {name: data for name, data in DEVICE_CODE.items() if name != MANIFEST}
    assert facts.digest == hashlib.sha256(DEVICE_CODE[MANIFEST]).hexdigest()
    assert facts.size == sum(map(len, fatbins.values()))
    assert facts.fatbins == tuple(sorted(name.removeprefix(DEVICE).removesuffix(".fatbin.lzma") for name in fatbins))
    assert (facts.sass, facts.ptx) == (MATRIX.device.sass, MATRIX.device.ptx)


def test_facts_of_what_is_damaged_or_not_there(tmp_path: Path, files: Files) -> None:
    changed = {name: data for name, data in files.items() if not name.startswith(DEVICE)}
    assert describe(write_wheel(tmp_path / "a" / NAMES["linux"], changed)).device.digest == ""
    facts = describe(write_wheel(tmp_path / "b" / NAMES["linux"], {**changed, DECODE: PACKED[:-1]})).device
    assert (facts.size, facts.fatbins, facts.sass) == (len(PACKED) - 1, ("decode",), ())
