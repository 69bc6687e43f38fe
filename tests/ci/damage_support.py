"""Damage to a finished wheel that an audit once took, and the words that it must be refused with.

RECORD, the SBOM and what the modules know of their device code are made right after each, so that nothing but the fault is left.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from ci.device import packed
from ci.wheelfile.binary.elf import EH_FRAME, ENTRY, HEADER, LOAD, NOTE, SEGMENT, SYMBOL, TAGS, Elf
from ci.wheelfile.binary.symbols import elf_hash
from ci.wheelfile.wheel import DEVICE, MANIFEST

Files = dict[str, bytes]
Data = TypeVar("Data")
Made = TypeVar("Made")
Rest = ParamSpec("Rest")

MODULE = "mlx_cuda/_cu13.abi3.so"
NUMBERS = {name: tag for tag, name in TAGS.items()}


def later(change: Callable[Concatenate[Data, Rest], Made]) -> Callable[Rest, Callable[[Data], Made]]:
    """A change that is given all but what it changes, which comes later."""

    def given(*arguments: Rest.args, **options: Rest.kwargs) -> Callable[[Data], Made]:
        return lambda data: change(data, *arguments, **options)

    return given


@dataclass(frozen=True)
class Damage:
    what: str
    words: str  # a part of the sentence
    files: Callable[[Files], object] | None = None  # before SBOM and RECORD are made
    finished: Callable[[Files], object] | None = None  # after the SBOM is
    record: Callable[[str], str] = str
    entry: Callable[[zipfile.ZipInfo], object] | None = None  # of each file
    name: Callable[[str], str] = str  # of the wheel
    wheel: Callable[[bytes], bytes] = bytes  # the archive


def put(data: bytes, place: int, layout: str, *values: int) -> bytes:
    return data[:place] + struct.pack(layout, *values) + data[place + struct.calcsize(layout) :]


@later
def module(files: Files, *changes: Callable[[bytes], bytes]) -> None:
    for each in changes:
        new = each(files[MODULE])
        assert new != files[MODULE]
        files[MODULE] = new


def header(place: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    return lambda data: put(data, place, layout, value)


def without_sections(data: bytes) -> bytes:
    return put(put(data, 40, "<Q", 0), 60, "<2H", 0, 0)


@later
def segment(data: bytes, kind: int, which: int, field: int, new: Callable[[int, bytes], int]) -> bytes:
    """Another number in the header of a segment: field 0 is the type, 1 the flags, 2 the offset, 5 and 6 the sizes, 7 the alignment."""
    elf = Elf(data)
    number = [place for place, each in enumerate(elf.segments) if each.type == kind][which]
    fields = list(elf.segments[number])
    fields[field] = new(fields[field], data)
    return put(data, HEADER.size + number * SEGMENT.size, "<IIQQQQQQ", *fields)


@later
def tag(data: bytes, number: int, value: int = 0) -> bytes:
    """One dynamic entry more, in the place of a spare one, or another value where it is there."""
    elf = Elf(data)
    ((place, size),) = [(each.offset, each.stored) for each in elf.of(2)]
    numbers = [each for each, _ in elf.entries]
    where = numbers.index(number) if number in numbers else len(numbers)
    assert (where + 2) * ENTRY.size <= size
    return put(data, place + where * ENTRY.size, "<QQ", number, value)


@later
def string_tag(data: bytes, number: int, name: str) -> bytes:
    """One whose value is a string that the module has."""
    start, size = Elf(data).string_table
    return tag(number, data.index(f"\0{name}\0".encode(), start, start + size) + 1 - start)(data)


def newer_glibc(data: bytes) -> bytes:
    old, new = "GLIBC_2.2.5", "GLIBC_9.9.9"
    hashes = [struct.pack("<I", elf_hash(each)) for each in (old, new)]
    assert f"{old}\0".encode() in data
    return data.replace(f"{old}\0".encode(), f"{new}\0".encode()).replace(hashes[0], hashes[1])


@later
def versions_of(data: bytes, name: str, value: int) -> bytes:
    elf = Elf(data)
    return put(data, elf.place(elf.tags["VERSYM"]) + 2 * [each.name for each in elf.symbols].index(name), "<H", value)


def asked_of_glibc(data: bytes) -> bytes:
    """A function of the driver's, which has no versions."""
    elf = Elf(data)
    name = next(each.name for each in elf.symbols if each.name.startswith("cu") and not each.section and each.version == 1)
    return versions_of(name, next(each.number for each in elf.needs if each.library == "libc.so.6"))(data)


def hidden_entry(data: bytes) -> bytes:
    """It becomes local, which the hash table does not know."""
    elf = Elf(data)
    number = next(number for number, each in enumerate(elf.symbols) if each.name.startswith("PyInit_"))
    return put(data, elf.place(elf.tags["SYMTAB"]) + number * SYMBOL.size + 4, "<B", 2)


def renamed_sections(data: bytes) -> bytes:
    return data.replace(b".gnu.version_r\0", b".gnu.version_x\0").replace(b".dynsym\0", b".dynsyx\0")


def private_symbol(data: bytes) -> bytes:
    name = next(each.name for each in Elf(data).symbols if each.name.startswith("Py") and not each.section and len(each.name) > 8)
    return data.replace(b"\0" + name.encode() + b"\0", b"\0_Py" + name[3:].encode() + b"\0")


@later
def in_code(data: bytes, new: bytes) -> bytes:
    """Bytes in the place of what only an unwinder reads."""
    (there,) = Elf(data).of(EH_FRAME)
    assert len(new) <= there.stored
    return data[: there.offset] + new + data[there.offset + len(new) :]


NEWEST_PROCESSOR = struct.pack("<3I4s2II4x", 4, 16, 5, b"GNU\0", 0xC0008002, 4, 8)


def zeroed_digest(files: Files) -> None:
    digest = hashlib.sha256(files[MANIFEST]).hexdigest().encode()
    files[MODULE] = files[MODULE].replace(digest, b"0" * 64) + digest


@later
def replaced(files: Files, member: str, old: str, new: str) -> None:
    """`member` is the end of a name."""
    (name,) = (each for each in files if each.endswith(member))
    assert re.search(old, files[name].decode(), re.MULTILINE), old
    files[name] = re.sub(old, new, files[name].decode(), count=1, flags=re.MULTILINE).encode()


@later
def document(files: Files, member: str, change: Callable[[Any], object]) -> None:
    (name,) = (each for each in files if each.endswith(member))
    value = json.loads(files[name])
    change(value)
    files[name] = (json.dumps(value, indent=1, sort_keys=member.endswith("manifest.json"), ensure_ascii=False) + "\n").encode()


def licenses(bom: Any) -> None:
    for each in bom["components"]:
        if "licenses" in each:
            each["licenses"] = [{"expression": "MIT"}]


def versions(bom: Any) -> None:
    for each in bom["components"]:
        if "version" in each:
            each["version"] = "0.0.1"


def without(bom: Any, name: str) -> None:
    bom["components"] = [each for each in bom["components"] if not each["bom-ref"].startswith(name)]


@later
def device(files: Files, change: Callable[[bytes], bytes], manifest: Callable[[Any], object] = lambda _: None) -> None:
    """Other fatbins, which manifest and modules know."""
    old = hashlib.sha256(files[MANIFEST]).hexdigest().encode()
    told = json.loads(files[MANIFEST])
    for source, facts in told["fatbins"].items():
        name = f"{DEVICE}{source}.fatbin.lzma"
        files[name] = packed.pack(change(packed.unpack(files[name])))
        facts.update(sha256=hashlib.sha256(files[name]).hexdigest(), size=len(files[name]))
    manifest(told)
    files[MANIFEST] = (json.dumps(told, indent=1, sort_keys=True) + "\n").encode()
    for name in [each for each in files if each.endswith(".so")]:
        files[name] = files[name].replace(old, hashlib.sha256(files[MANIFEST]).hexdigest().encode())


def exchanged(files: Files) -> None:
    """Two fatbins for the same GPUs, each under the name of the other, and all that tells of them corrected."""
    told = json.loads(files[MANIFEST])["fatbins"]
    one, two = [f"{DEVICE}{name}.fatbin.lzma" for name in ("decode", "decode_wide")]
    assert all(told["decode"][each] == told["decode_wide"][each] for each in ("sass", "ptx"))
    files[one], files[two] = files[two], files[one]
    device(bytes)(files)


@later
def payload(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Another code of the first entry, of the same length."""
    size, length = struct.unpack_from("<IQ", data, 16 + 4)
    code = data[16 + size : 16 + size + length]
    return data[: 16 + size] + change(code)[:length].ljust(length, b"\0") + data[16 + size + length :]


def swapped(told: Any) -> None:
    one, two = list(told["fatbins"])[:2]
    told["fatbins"][one], told["fatbins"][two] = told["fatbins"][two], told["fatbins"][one]


def added(name: str, data: bytes = b"") -> Callable[[Files], None]:
    return lambda files: files.update({name: data or files[MODULE]})


@later
def entries(entry: zipfile.ZipInfo, /, **values: Any) -> None:
    for name, value in values.items():
        setattr(entry, name, value)


def another_disk(data: bytes) -> bytes:
    return put(data, data.rindex(b"PK\1\2") + 34, "<H", 7)


METADATA, WHEEL, BUILD = ".dist-info/METADATA", ".dist-info/WHEEL", "mlx_cuda/_build.json"
SBOM = "mlx-cuda.cdx.json"
FLAGS_1 = NUMBERS["FLAGS_1"]
GARBAGE = bytes(range(256)) * 400

ELF_DAMAGES = (
    Damage("no section headers", "has no section headers", module(without_sections)),
    Damage("a newer glibc", "needs GLIBC_9.9.9 of libc.so.6", module(newer_glibc)),
    Damage("a newer glibc, no section headers", "needs GLIBC_9.9.9 of libc.so.6", module(newer_glibc, without_sections)),
    Damage("a newer glibc, sections of other names", "needs GLIBC_9.9.9 of libc.so.6", module(newer_glibc, renamed_sections)),
    Damage("a private symbol of Python", "expected the stable ABI only", module(private_symbol)),
    Damage("a private symbol, no section headers", "expected the stable ABI only", module(private_symbol, without_sections)),
    Damage("a function of the driver asked of glibc", "expected a symbol that libc.so.6 has", module(asked_of_glibc)),
    Damage("a local entry point", "does not export PyInit__cu13", module(hidden_entry)),
    Damage("DF_1_NOOPEN", "without NOOPEN", module(tag(FLAGS_1, 0x40))),
    Damage("DF_1_PIE", "without PIE", module(tag(FLAGS_1, 0x08000000))),
    Damage("DF_TEXTREL", "without TEXTREL", module(tag(30, 4))),
    Damage("ET_EXEC", "has the ELF type 0x2, expected 0x3", module(header(16, "<H", 2))),
    Damage("ET_REL", "has the ELF type 0x1, expected 0x3", module(header(16, "<H", 1))),
    Damage("EI_OSABI of FreeBSD", "expected that of System V or GNU", module(header(7, "<B", 9))),
    Damage("EI_ABIVERSION 9", "expected that of System V or GNU", module(header(8, "<B", 9))),
    Damage("DT_RELR", "has the dynamic tag DT_RELR", module(tag(36, 0x1000))),
    Damage("DT_AUXILIARY", "has the dynamic tag DT_AUXILIARY", module(string_tag(0x7FFFFFFD, "libmlx.so"))),
    Damage("DT_FILTER", "has the dynamic tag DT_FILTER", module(string_tag(0x7FFFFFFF, "libmlx.so"))),
    Damage("DT_AUDIT", "has the dynamic tag DT_AUDIT", module(string_tag(0x6FFFFEFC, "libmlx.so"))),
    Damage("DT_DEPAUDIT", "has the dynamic tag DT_DEPAUDIT", module(string_tag(0x6FFFFEFB, "libmlx.so"))),
    Damage("DT_TEXTREL", "has the dynamic tag DT_TEXTREL", module(tag(22))),
    Damage("soname libmlx.so", "calls itself libmlx.so", module(string_tag(14, "libmlx.so"))),
    Damage("soname libc.so.6", "calls itself libc.so.6", module(string_tag(14, "libc.so.6"))),
    Damage("a LOAD segment writable and executable", "never both", module(segment(LOAD, 1, 1, lambda _, __: 7))),
    Damage("all LOAD segments so", "never both", module(*(segment(LOAD, each, 1, lambda _, __: 7) for each in range(4)))),
    Damage("p_offset of the last LOAD less 0x40", "no loader accepts it", module(segment(LOAD, -1, 2, lambda old, _: old - 0x40))),
    Damage(
        "p_filesz of the last LOAD beyond the file", "it would be killed (SIGBUS)", module(segment(LOAD, -1, 5, lambda _, data: len(data)))
    ),
    Damage("p_align 0x800", "that is aligned to 0x800", module(*(segment(LOAD, each, 7, lambda _, __: 0x800) for each in range(4)))),
    Damage("p_memsz without end", "expected a little more in memory", module(segment(LOAD, -1, 6, lambda _, __: 2**46))),
    Damage("a segment of an unknown type", "has a segment of type 0x6fffff00", module(segment(EH_FRAME, 0, 0, lambda _, __: 0x6FFFFF00))),
    Damage("PT_INTERP", "has a segment of type 0x3", module(segment(EH_FRAME, 0, 0, lambda _, __: 3))),
    Damage("cut by 4096 bytes", "is not readable as ELF", finished=module(lambda data: data[:-4096])),
    Damage("cut by half", "is not readable as ELF", finished=module(lambda data: data[: len(data) // 2])),
    Damage("an overlay", "nothing belongs behind the file's own", module(lambda data: data + b"PK\3\4evil")),
    Damage("the digest behind the file alone", "nothing belongs behind the file's own", zeroed_digest),
    Damage(
        "an ISA note of x86-64-v4",
        "needs a processor of x86-64-v4",
        module(
            in_code(NEWEST_PROCESSOR),
            segment(EH_FRAME, 0, 0, lambda _, __: NOTE),
            segment(NOTE, -1, 5, lambda _, __: 32),
            segment(NOTE, -1, 6, lambda _, __: 32),
            segment(NOTE, -1, 7, lambda _, __: 8),
        ),
    ),
    Damage("a library in mlx_cuda.libs", "is an unexpected binary", added("mlx_cuda.libs/libevil.so")),
    Damage("libm.so.6 in mlx_cuda.libs", "is an unexpected binary", added("mlx_cuda.libs/libm.so.6")),
    *(
        Damage(
            f"a path of the build, {path}", f"holds paths of the build (1), such as {path}", module(in_code(b"\0" + path.encode() + b"\0"))
        )
        for path in ("/builds/group/x.cpp", "/mnt/data/x/y.cpp", "/var/lib/jenkins/x.cpp", "/opt/acme/x/y.cpp", "/nix/store/abc-x/y.cpp")
    ),
)
TEXT_DAMAGES = (
    Damage("WHEEL begins with an empty line", "has the line ''", replaced(WHEEL, r"\A", "\n")),
    Damage("wheel-version: 2.0 first", "has the line 'wheel-version: 2.0'", replaced(WHEEL, r"\A", "wheel-version: 2.0\n")),
    Damage("Wheel-Version: 1.evil", "has the line 'Wheel-Version: 1.evil'", replaced(WHEEL, r"1\.0", "1.evil")),
    Damage("root-is-purelib: true first", "has the line 'root-is-purelib: true'", replaced(WHEEL, r"\A", "root-is-purelib: true\n")),
    Damage("RECORD with a form feed", "is not written as installers read it", record=lambda text: text.replace("\n", "\f\n", 1)),
    Damage("RECORD with CR LF", "is not written as installers read it", record=lambda text: text.replace("\n", "\r\n")),
    Damage(
        "another license",
        "has the line 'License-Expression: GPL-3.0-only'",
        replaced(METADATA, "^License-Expression: .*", "License-Expression: GPL-3.0-only"),
    ),
    Damage("another summary", "has the line 'Summary: evil'", replaced(METADATA, "^Summary: .*", "Summary: evil")),
    Damage("another description", "has the line 'evil'", replaced(METADATA, r"\Z", "\nevil")),
    Damage("another Project-URL", "evil.example", replaced(METADATA, "^(Project-URL: Homepage, ).*", r"\1https://evil.example")),
    *(
        Damage(
            line.partition(":")[0] if line[:4] != "Clas" else line,
            f"has the line {line!r}",
            replaced(METADATA, "^Requires-Python", f"{line}\nRequires-Python"),
        )
        for line in (
            "Author: evil",
            "Download-URL: https://evil.example",
            "Classifier: Private :: Do Not Upload",
            "Classifier: No :: Such",
            "Classifier: Operating System :: MacOS",
            "Provides-Dist: mlx",
            "Obsoletes-Dist: mlx",
            "Requires-External: libevil",
            "Dynamic: Requires-Dist",
            "Platform: any",
            "Supported-Platform: any",
            "Requires-Dist: mlx==0.32.4",
        )
    ),
    Damage(
        "a content type that is none",
        "has the line 'Description-Content-Type: text/x-rst'",
        replaced(METADATA, "text/markdown", "text/x-rst"),
    ),
    Damage("no License-File", "lacks the line 'License-File: LICENSE'", replaced(METADATA, "^License-File: LICENSE\n", "")),
    Damage("no _build.json", "is missing or not what CMake writes", lambda files: files.pop(BUILD)),
    Damage("_build.json of NULs", "is missing or not what CMake writes", finished=lambda files: files.update({BUILD: bytes(100)})),
    Damage("a payload in _build.json", "has the line", document(BUILD, lambda told: told.update(payload="x" * 450_000))),
    Damage("_build.json of another compiler", "has the compiler Evil 12.2.0", replaced(BUILD, "GNU", "Evil")),
    Damage("a path in _build.json", "has the generator /home/ci/ninja", replaced(BUILD, "Ninja", "/home/ci/ninja")),
)
SBOM_DAMAGES = tuple(
    Damage(f"SBOM: {what}", words, finished=document(SBOM, change))
    for what, words, change in (
        ("all licenses MIT", "in /components", licenses),
        ("a package more", "log4j", lambda bom: bom["components"].append({"type": "library", "name": "log4j", "bom-ref": "log4j"})),
        ("no requirements", "lacks in /components mlx", lambda bom: without(bom, "requirement:")),
        ("no nanobind", "lacks in /components nanobind", lambda bom: without(bom, "pkg:pypi/nanobind@")),
        ("no dependencies", "in /dependencies", lambda bom: bom.pop("dependencies")),
        ("no formulation", "in /formulation", lambda bom: bom.pop("formulation")),
        ("purl of another project", "/metadata/component/purl", lambda bom: bom["metadata"]["component"].update(purl="pkg:pypi/evil@1")),
        ("time 2099", "/metadata/timestamp", lambda bom: bom["metadata"].update(timestamp="2099-01-01T00:00:00+00:00")),
        ("every version 0.0.1", "lacks in /components mlx-cuda-13", versions),
        (
            "a second hash of a file",
            "in /components mlx_cuda/",
            lambda bom: bom["components"][0]["hashes"].append({"alg": "SHA-256", "content": "0" * 64}),
        ),
        (
            "another serial number",
            "is written otherwise",
            lambda bom: bom.update(serialNumber="urn:uuid:00000000-0000-0000-0000-000000000000"),
        ),
    )
)
DEVICE_DAMAGES = (
    Damage("all code garbage", "code for no architecture", device(payload(lambda _: GARBAGE))),
    Damage("all code empty", "code for no architecture", device(payload(lambda _: b""))),
    Damage("unknown flags", "the flags 0x", device(lambda data: put(data, 16 + 40, "<Q", struct.unpack_from("<Q", data, 56)[0] | 0x40))),
    Damage("the code of another architecture", "expected it for 89", device(lambda data: put(data, 16 + 28, "<I", 89))),
    Damage("two fatbins exchanged in the manifest", "has the SHA-256", device(bytes, swapped)),
    Damage("two fatbins exchanged, and told so", "code of decode_wide.cu, expected that of decode.cu", exchanged),
    Damage(
        "inputs of other sources",
        "is made of the inputs 0000000000000000, expected ",
        device(bytes, lambda told: told.update(inputs="0" * 64)),
    ),
    Damage(
        "a size in words",
        "is not written as python -m ci device does",
        device(bytes, lambda told: told["fatbins"]["copy"].update(size=str(told["fatbins"]["copy"]["size"]))),
    ),
    Damage(
        "a size with a fraction",
        "is not written as python -m ci device does",
        device(bytes, lambda told: told["fatbins"]["copy"].update(size=told["fatbins"]["copy"]["size"] + 0.5)),
    ),
    Damage("more keys", "is not written as python -m ci device does", device(bytes, lambda told: told.update(more=1))),
)
ZIP_DAMAGES = (
    Damage("made on FAT", "is of an archive of system 0", entry=entries(create_system=0, external_attr=0)),
    Damage("made on Darwin", "is of an archive of system 19", entry=entries(create_system=19)),
    Damage("mode 0600", "has the mode 100600", entry=entries(external_attr=0o100600 << 16)),
    Damage("mode 0755", "has the mode 100755", entry=entries(external_attr=0o100755 << 16)),
    Damage("version 62 needed", "needs version 62 of zip", entry=entries(extract_version=62, create_version=62)),
    Damage("a time to come", "is of the year 2107", entry=entries(date_time=(2107, 1, 1, 0, 0, 0))),
    Damage("RECORD first", "expected it last", finished=lambda files: files.update({"first": b""})),
    Damage("another disk", "and part 7", wheel=another_disk),
    Damage("a py3-none wheel", "has the tag py3-none", name=lambda name: name.replace("cp310-abi3", "py3-none")),
)
DAMAGES = (*ELF_DAMAGES, *TEXT_DAMAGES, *SBOM_DAMAGES, *DEVICE_DAMAGES, *ZIP_DAMAGES)
