"""The native module's reader of packed fatbins (src/runtime/unpack.cpp): the code of each GPU, and an error for a damaged file."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from ci.device import packed
from ci.matrix import REPOSITORY

from .audit_support import container, entry

# The command line of this program: capability, then files. It prints the code or the error of each.
PROGRAM = """
#include "runtime/unpack.h"
#include <fstream>
#include <iostream>
#include <iterator>

int main(int count, char** arguments) {
  for (int n = 2; n < count; ++n) {
    std::ifstream file(arguments[n], std::ios::binary);
    const std::string data((std::istreambuf_iterator<char>(file)), {});
    try {
      std::cout << mlx_cuda::unpack_code(data, std::stoi(arguments[1])) << "\\n";
    } catch (const std::runtime_error& error) {
      std::cout << error.what() << "\\n";
    }
  }
}
"""
TEXTS = [(2, "120"), (2, "100"), (2, "90a"), (2, "89"), (2, "80"), (1, "90a"), (1, "80")]
GOOD = packed.pack(container(entry(kind, each, f"{kind}: {each}".ljust(8).encode(), "decode.cu") for kind, each in TEXTS))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (compiler := shutil.which("g++")):
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("unpack")
    (folder / "main.cpp").write_text(PROGRAM, "utf-8")
    options = ["-std=c++20", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-x", "c++"]
    includes = [f"-I{REPOSITORY / 'src'}", "-isystem", str(REPOSITORY / "third_party")]
    sources = [folder / "main.cpp", REPOSITORY / "src/runtime/unpack.cpp", REPOSITORY / "third_party/lzma/LzmaDec.c"]
    subprocess.run([compiler, *options, *includes, *map(str, sources), "-o", str(folder / "unpack")], check=True)
    return folder / "unpack"


def unpacked(program: Path, capability: int, *files: bytes) -> list[str]:
    names = [program.with_name(f"{number}.fatbin.lzma") for number in range(len(files))]
    for name, data in zip(names, files, strict=True):
        name.write_bytes(data)
    done = subprocess.run([str(program), str(capability), *map(str, names)], check=False, capture_output=True, encoding="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        *((75, ""), (80, "2: 80"), (86, "2: 80"), (89, "2: 89"), (90, "2: 90a"), (100, "2: 100"), (103, "2: 100")),
        *((110, "1: 80"), (120, "2: 120"), (121, "2: 120")),
    ],
)
def test_the_code_that_a_gpu_gets(program: Path, capability: int, code: str) -> None:
    """As _loader/device_code.py tells of it."""
    assert [each.rstrip() for each in unpacked(program, capability, GOOD)] == [code]


def test_damage_is_an_error_and_no_crash(program: Path) -> None:
    seed = random.Random(7)  # noqa: S311
    files = [GOOD[:size] for size in range(0, len(GOOD) - 8, 7)]
    for _ in range(300):
        data = bytearray(GOOD)
        data[seed.randrange(13, len(data))] ^= 1 << seed.randrange(8)
        files.append(bytes(data))
    found = unpacked(program, 75, *files)
    assert all(each.startswith("[mlx_cuda] The device code is damaged: ") for each in found[: len(files) - 300])
    assert sum(each.startswith("[mlx_cuda] The device code is damaged: ") for each in found) > len(files) // 2


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "it is no LZMA file"),
        (GOOD[:5] + b"\xff" * 8 + GOOD[13:], "it is no LZMA file"),
        (b"\xff" + GOOD[1:], "its LZMA properties are not valid"),
        (GOOD[:20], "its LZMA stream is not valid"),
        (packed.pack(b"short"), "it ends inside a fatbin"),
        (packed.pack(bytes(80)), "an entry of its fatbin has no header"),
    ],
)
def test_the_words_of_an_error(program: Path, data: bytes, told: str) -> None:
    (found,) = unpacked(program, 80, data)
    assert found == f"[mlx_cuda] The device code is damaged: {told}. Reinstall mlx-cuda; `python -m mlx_cuda doctor` says how."
