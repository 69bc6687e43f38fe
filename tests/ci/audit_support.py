"""Small wheels, good by the project's own policy, for the tests of repair and audit to spoil: real binaries made by gcc and mingw."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from ci.audit import audit_wheel, expected
from ci.audit.checks import CHECKS
from ci.device import manifest, packed, plan
from ci.files import record_digest, tomllib
from ci.matrix import REPOSITORY, Cuda, System, load, newest_first
from ci.repair import sbom
from ci.toolkit import roots
from ci.wheelfile.wheel import DEVICE, MANIFEST

from .damage_support import later

Files = dict[str, bytes]

MATRIX = load()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
VERSION: str = PROJECT["version"]
PYTHON = REPOSITORY / "python"
DIST_INFO = f"mlx_cuda-{VERSION}.dist-info"
NAMES: Mapping[System, str] = {
    "linux": f"mlx_cuda-{VERSION}-cp310-abi3-manylinux_2_28_x86_64.whl",
    "windows": f"mlx_cuda-{VERSION}-cp310-abi3-win_amd64.whl",
}
SUFFIXES: Mapping[System, str] = {"linux": ".abi3.so", "windows": ".pyd"}
CU12, CU13 = MATRIX.cuda["12.8"], MATRIX.cuda["13.0"]
METADATA, WHEEL, RECORD = (f"{DIST_INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD"))
# The SBOM tells of every binary, so that any change of one would fire its check too.
QUICK = tuple(identifier for identifier in CHECKS if identifier != "sbom")
FLAGS = {"": 0, "a": 0x100000, "f": 0x200000}

# What CMake tells of a build, beside the modules.
BUILD: Mapping[str, Any] = {
    "cmake": "4.4.4",
    "compiler": {"id": "GNU", "version": "12.2.0"},
    "generator": "Ninja",
    "host": "linux-x86_64",
    "nanobind": "3.1.0",
    "platform": "linux-x86_64",
}


WINDOWS_BUILD = {**BUILD, "compiler": {"id": "MSVC", "version": "19.44.35211.0"}, "host": "win-amd64", "platform": "win-amd64"}


def code(kind: int, architecture: str) -> bytes:
    """As little of PTX or of a cubin as says for which GPU it is."""
    if kind == 1:
        return f"//\n.version 8.7\n.target sm_{architecture}\n.address_size 64\n\0".encode()
    number = int(architecture.rstrip("af"))
    old = 0x500 | number << 16 | number | (0x800 if architecture.endswith("a") else 0)
    abi, flags = (7, old) if number < 100 else (8, 0x6000002 | number << 8)
    return struct.pack("<7s2B7x2H28xI12x", b"\x7fELF\2\1\1", 0x33, abi, 2, 190, flags)


def entry(kind: int, architecture: str, payload: bytes | None = None, name: str = "") -> bytes:
    """One entry of a fatbin: kind 1 is PTX, 2 is SASS. `name` is the source's."""
    number = architecture.rstrip("af")
    unpacked = code(kind, architecture) if payload is None else payload
    padded = unpacked + bytes(-len(unpacked) % 8)
    header = bytearray(64) + name.encode().ljust(len(name) + -len(name) % 8, b"\0")
    struct.pack_into("<HHIQI", header, 0, kind, 0x101, len(header), len(padded), 0)
    struct.pack_into("<III", header, 28, int(number), 64, len(name))
    newest = 0x1000000 if kind == 2 and int(number) >= 100 else 0
    struct.pack_into("<QQQ", header, 40, 0x11 | newest | FLAGS[architecture[len(number) :]], 0, 0)
    return bytes(header) + padded


def container(entries: Iterable[bytes]) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def fatbin(sass: Iterable[int | str], ptx: Iterable[int | str], name: str = "decode.cu") -> bytes:
    return container(entry(kind, each, name=name) for kind, some in ((2, sass), (1, ptx)) for each in newest_first(map(str, some)))


def device_code(arch: Sequence[str] = ("declared",)) -> Files:
    """The members of good device code: a packed fatbin for each source that has code for these GPUs, and the manifest."""
    sources = plan.sources(arch)
    targets = {source.name: source.targets for source in sources}
    fatbins = {name: packed.pack(fatbin(each.sass, each.ptx, f"{name}.cu")) for name, each in targets.items()}
    told = {
        name: manifest.Fatbin(hashlib.sha256(data).hexdigest(), len(data), targets[name].sass, targets[name].ptx)
        for name, data in fatbins.items()
    }
    text = manifest.Manifest(manifest.inputs(sources), roots.find(MATRIX.device.root).packages, told).text
    return {**{f"{DEVICE}{name}{packed.SUFFIX}": data for name, data in fatbins.items()}, MANIFEST: text.encode()}


DEVICE_CODE = device_code()


def with_device(files: Files, code: Mapping[str, bytes]) -> None:
    """Put other device code into a wheel, which its native modules then know."""
    old, new = (hashlib.sha256(each[MANIFEST]).hexdigest().encode() for each in (files, code))
    for name in [name for name in files if name.startswith(DEVICE)]:
        del files[name]
    files.update(code)
    for name in [name for name in files if name.startswith("mlx_cuda/_cu")]:
        assert old in files[name]
        files[name] = files[name].replace(old, new)


def require(*tools: str) -> None:
    """Skip, and say so, where a compiler is missing; these wheels are for x86_64."""
    if sys.platform != "linux":
        pytest.skip("the wheels of these tests are made on Linux")
    for tool in tools:
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed (Debian: apt-get install gcc g++-mingw-w64-x86-64-posix)")


@dataclass(frozen=True)
class World:
    """Toolkit roots with tiny libraries under the declared names, and what compiles modules against them."""

    folder: Path
    system: System

    @property
    def compiler(self) -> str:
        return "x86_64-linux-gnu-gcc" if self.system == "linux" else "x86_64-w64-mingw32-gcc"

    def site(self, root: str) -> Path:
        return self.folder / root / "site"

    def compile(self, output: Path, source: str, *arguments: str | Path, strip: bool = True) -> Path:
        output.parent.mkdir(parents=True, exist_ok=True)
        code = output.with_suffix(".c")
        code.write_text(source)
        command = [self.compiler, "-shared", "-fPIC", "-O1", *(["-s"] if strip else []), "-o", str(output), str(code), *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True)
        code.unlink()
        return output

    def library(self, output: Path, source: str, *arguments: str) -> Path:
        """A library of this name, and on Windows its import library beside it."""
        extra = (f"-Wl,-soname,{output.name}",) if self.system == "linux" else (f"-Wl,--out-implib,{output}.lib",)
        return self.compile(output, source, *extra, *arguments)

    def module(
        self,
        name: str,
        cuda: Cuda,
        *,
        gpu_code: bytes = b"",
        source: str = "",
        without: Sequence[str] = (),
        rpath: Sequence[str] | None = None,
        arguments: Sequence[str | Path] = (),
        strip: bool = True,
    ) -> bytes:
        """A native module that needs the declared libraries and knows the good device code; `gpu_code` is inside it."""
        output = self.folder / "modules" / name
        libraries = [each for each in cuda.libraries if each.needed and each.name not in without]
        symbols = [f"{each.name}_of_{cuda.major}" for each in libraries] + ["cuInit"]
        calls = "".join(f"  s += {symbol}();\n" for symbol in symbols)
        declarations = "".join(f"int {symbol}(void);\n" for symbol in symbols)
        data = ",".join(map(str, gpu_code)) or "0"
        digest = hashlib.sha256(DEVICE_CODE[MANIFEST]).hexdigest()
        export = "__declspec(dllexport) " if self.system == "windows" else ""
        text = (
            f"{declarations}void *PyModule_Create2(void *, int);\n{source}\n"
            f"{export}const unsigned char gpu_code[] = {{{data}}};\n"
            f'{export}const char device_code[] = "{digest}", package[] = "mlx-cuda=={VERSION}";\n'
            f"{export}void *PyInit_{cuda.module}(void) {{\n  static int s;\n{calls}  return PyModule_Create2(&s, 3);\n}}\n"
        )
        files = [self._file(root, each.directories[self.system], each.files[self.system]) for each in libraries for root in cuda.roots]
        driver = self.folder / cuda.roots[0] / "lib" / "stubs" / MATRIX.driver[self.system]
        inputs: list[str | Path] = [path for path in [*filter(None, files), driver] if path.is_file()]
        if self.system == "windows":
            inputs = [*(f"{path}.lib" for path in inputs), f"{self.folder / 'python3.dll'}.lib"]
        else:
            entries = cuda.rpath() if rpath is None else rpath
            inputs = ["-Wl,--no-as-needed", *inputs, *([f"-Wl,--disable-new-dtags,-rpath,{':'.join(entries)}"] if entries else [])]
        return self.compile(output, text, *inputs, *arguments, strip=strip).read_bytes()

    def _file(self, root: str, directory: str, name: str) -> Path | None:
        path = self.site(root) / directory / name
        return path if path.is_file() else None


def make_world(folder: Path, system: System) -> World:
    """A copy of the one that this process has compiled."""
    require("x86_64-linux-gnu-gcc" if system == "linux" else "x86_64-w64-mingw32-gcc")
    shutil.copytree(_compiled_world(system), folder, dirs_exist_ok=True)
    return World(folder, system)


@cache
def _compiled_world(system: System) -> Path:
    temporary = tempfile.TemporaryDirectory(prefix="mlx-cuda-world-")
    atexit.register(temporary.cleanup)
    world = World(folder := Path(temporary.name), system)
    for cuda in MATRIX.cuda.values():
        versions = {"mlx-cuda-12": MATRIX.mlx, "mlx-cuda-13": MATRIX.mlx}
        for library in cuda.libraries:
            root = next(root for root in cuda.roots if root.startswith("mlx") == (library.name == "libmlx"))
            relative = f"{library.directories[system]}/{library.files[system]}"
            world.library(world.site(root) / relative, f"int {library.name}_of_{cuda.major}(void) {{ return 1; }}")
            version = versions.get(library.provider, "9.20.0" if "cudnn" in library.provider else f"{cuda.version}.1")
            information = world.site(root) / f"{library.provider.replace('-', '_')}-{version}.dist-info"
            information.mkdir(parents=True, exist_ok=True)
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library.provider}\nVersion: {version}\n")
            with (information / "RECORD").open("a") as record:
                record.write(f"{relative},,\n")
        for root in cuda.roots:
            world.site(root).mkdir(parents=True, exist_ok=True)
        world.library(folder / cuda.roots[0] / "lib" / "stubs" / MATRIX.driver[system], "int cuInit(void) { return 0; }")
    if system == "windows":
        world.library(folder / "python3.dll", "void *PyModule_Create2(void *m, int v) { return v ? m : 0; }")
    return folder


def member(world: World, cuda: Cuda) -> str:
    return f"mlx_cuda/{cuda.module}{SUFFIXES[world.system]}"


def good_files(world: World) -> Files:
    """The members of a good wheel, RECORD apart, which `write_wheel` adds."""
    modules = {member(world, cuda): world.module(f"{cuda.module}{SUFFIXES[world.system]}", cuda) for cuda in MATRIX.cuda.values()}
    return {
        **{path.relative_to(PYTHON).as_posix(): path.read_bytes() for path in sorted(PYTHON.rglob("*.*")) if path.suffix != ".pyc"},
        "mlx_cuda/_build.json": expected.build_facts(BUILD if world.system == "linux" else WINDOWS_BUILD).encode(),
        **DEVICE_CODE,
        **modules,
        f"{DIST_INFO}/METADATA": metadata().encode(),
        f"{DIST_INFO}/WHEEL": wheel_file(NAMES[world.system]).encode(),
        **{f"{DIST_INFO}/licenses/{name}": (REPOSITORY / name).read_bytes() for name in PROJECT["license-files"]},
    }


def metadata() -> str:
    return expected.metadata(PROJECT, VERSION)


def wheel_file(name: str) -> str:
    python, abi, platform = name.removesuffix(".whl").split("-")[2:]
    tags = "".join(f"Tag: {python}-{abi}-{each}\n" for each in platform.split("."))
    return f"Wheel-Version: 1.0\nGenerator: scikit-build-core 1.1.2\nRoot-Is-Purelib: false\n{tags}\n"


def write_wheel(path: Path, files: Files, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """Write a wheel with a right RECORD, unless `files` has one of its own."""
    record = f"{DIST_INFO}/RECORD"
    lines = [f"{name},{record_digest(data)},{len(data)}" for name, data in files.items() if name != record]
    everything = {**files, record: files.get(record, "\n".join([*lines, f"{record},,", ""]).encode())}
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in everything.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            entry.create_system, entry.external_attr, entry.compress_type = 3, 0o100644 << 16, compression
            archive.writestr(entry, data, compresslevel=1)  # which takes half the time
    return path


def with_sbom(path: Path) -> Path:
    """The wheel as repair leaves it: its SBOM is in it."""
    sbom.embed(path)
    return path


Change = Callable[[Files], None]


def said(path: Path, files: Files, change: Callable[[Files], object], checks: Collection[str] = QUICK) -> list[str]:
    """What the audit says of a wheel after a change, line by line, without the wheel's name."""
    changed = dict(files)
    change(changed)
    found = audit_wheel(write_wheel(path, changed), checks=checks)
    assert all(each.fix for each in found)
    return [str(each).removeprefix(f"{path.name}: ").partition("\n    fix: ")[0] for each in found]


@later
def replaced(files: Files, name: str, old: str, new: str) -> None:
    """A change to a text member; fails where there is nothing to change."""
    assert old.encode() in files[name], f"{old!r} is not in {name}"
    files[name] = files[name].replace(old.encode(), new.encode())


def with_module(world: World, **changes: Any) -> Change:
    """A change of the CUDA 13 module, built again."""
    name = member(world, CU13)
    built = world.module(PurePosixPath(name).name, CU13, **changes)
    return lambda files: files.update({name: built})
