"""ci/audit/sbom/sources.toml against what is really compiled in, and the licenses against what the packages themselves carry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from ci import matrix, toolkit
from ci.audit.sbom import sources
from ci.device import plan
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import sha256
from ci.matrix import REPOSITORY
from ci.toolkit import lock, roots

from .audit_support import PROJECT

LICENSES = REPOSITORY / "licenses"
LOCKED = {pin.requirement.split("==")[0] for root in roots.declared().values() for pin in lock.parse(roots.lock_text(root))}
LZMA = {  # the files of 7-Zip 25.01
    "7zTypes.h": "5de943c886d5d7bbcf16203e9b292a9e7be327b43fe3dfd9f4ad07d6d0870ef6",
    "Compiler.h": "e4b14a798e6c01bc885966249afa6b5061a5dd10c723ce86b254e89ae650de7f",
    "LzmaDec.c": "b9ca2b8707400347c75d6fef288d1354a3b4cf93e8da42f26207b8bd4c4d5e59",
    "LzmaDec.h": "3aaf07b4ae4173a2d103179455dc7089b5ddbc7fc3db3c0e40964a7499c69266",
    "Precomp.h": "fea249c753dfbbdd69d9397e91497205452b784279f70cad4658dc567cd2f85f",
}
COMPILED_IN = {name for source in sources.load() if "headers" in source.use for name in source.packages}


def test_every_locked_package_and_no_other() -> None:
    known = [name for source in sources.load() for name in source.packages]
    assert sorted(known) == sorted({*LOCKED, "nanobind", "7zip"})


def test_an_unknown_package() -> None:
    with pytest.raises(CheckFailed, match=r"ci/audit/sbom/sources\.toml has no entry for nvidia-cufft"):
        sources.of("nvidia-cufft")


def test_the_license_names_all_that_is_compiled_in() -> None:
    parts = {source.license for source in sources.load()}
    assert set(PROJECT["license"].split(" AND ")) == {"MIT", *parts}


def test_each_text_is_in_the_wheel() -> None:
    texts = {f"licenses/{source.text}" for source in sources.load()}
    assert PROJECT["license-files"] == ["LICENSE", *sorted(texts)]
    assert texts == {path.relative_to(REPOSITORY).as_posix() for path in LICENSES.iterdir()}


# ------------------------------------------------------------------------------------------------------------ texts of the packages


@cache
def installed(root: str) -> tuple[Path, tuple[Distribution, ...]]:
    """A toolkit root of this machine's platform and the packages in it."""
    try:
        path = toolkit.root_path(root, matrix.host_platform())
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    return path, tuple(distributions(path=[str(path / "site")]))


def license_text(package: Distribution) -> bytes:
    (file,) = (file for file in package.files or () if ".dist-info" in str(file) and "licen" in file.name.lower())
    return Path(str(package.locate_file(file))).read_bytes()


@pytest.mark.parametrize("root", sorted(roots.declared()))
def test_copies_are_what_the_locked_packages_carry(root: str) -> None:
    for package in installed(root)[1]:
        source = sources.of(canonicalize_name(package.metadata["Name"]))
        if source.title != "CCCL":  # see below
            assert license_text(package) == (LICENSES / source.text).read_bytes(), package.metadata["Name"]


def test_the_copy_of_nanobinds_license() -> None:
    assert license_text(distribution("nanobind")) == (LICENSES / sources.of("nanobind").text).read_bytes()


def test_the_lzma_decoder_is_as_7zip_has_it() -> None:
    folder = REPOSITORY / "third_party" / "lzma"
    assert {path.name: sha256(path) for path in folder.iterdir()} == LZMA
    assert all("Igor Pavlov : Public domain" in path.read_text("utf-8") for path in folder.iterdir())


@pytest.mark.parametrize("root", ["cuda-12.8", "cuda-13.0", "device"])
def test_ccls_license_is_the_one_its_headers_name(root: str) -> None:
    """Its packages carry the toolkit's license, each of its files another."""
    path, _ = installed(root)
    source = sources.of("nvidia-cuda-cccl")
    headers = [path / "include/nv/target", *sorted((path / "include/nv/detail").iterdir())]
    for header in headers:
        assert f"SPDX-License-Identifier: {source.license}\n" in header.read_text("utf-8"), header
    text = (LICENSES / source.text).read_text("utf-8")
    assert "Apache License\n                           Version 2.0" in text
    assert "LLVM Exceptions to the Apache 2.0 License" in text


# ------------------------------------------------------------------------------------------------------------ what the compilers read


def headers(build: Path) -> Iterator[Path]:
    """Every file that the C++ compiler read, as it told ninja."""
    ninja = shutil.which("ninja", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    assert ninja, "ninja belongs to the dependency group 'factory'"
    told = subprocess.run([ninja, "-C", str(build), "-t", "deps"], check=True, capture_output=True, encoding="utf-8").stdout
    yield from sorted({(build / line.strip()).resolve() for line in told.splitlines() if line.startswith("    ")})


def owners(root: str) -> dict[Path, str]:
    """Whose the headers of a root are. Those in its include folder are links to what the packages installed."""
    path, packages = installed(root)
    found = {}
    for package in packages:
        for file in package.files or ():
            place = Path(str(package.locate_file(file)))
            if "include" in file.parts and place.is_file():
                stat = place.stat()
                found[stat.st_dev, stat.st_ino] = canonicalize_name(package.metadata["Name"])
    every = (each for each in (path / "include").rglob("*") if each.is_file())
    return {each.resolve(): found[each.stat().st_dev, each.stat().st_ino] for each in every}


def build_tree() -> Path:
    """The tree of a whole build for this machine."""
    trees = sorted(REPOSITORY.glob(f"build/cp*-{sysconfig.get_platform().replace('-', '_')}/.ninja_deps"))
    if not trees:
        pytest.skip("build/ holds no tree of a whole build (python -m ci wheel makes one)")
    return trees[0].parent


@pytest.mark.skipif(sys.platform == "win32", reason="where Windows' own headers lie is for the compiler to say")
def test_what_the_cpp_compiler_reads() -> None:
    tree, whose = build_tree(), {header: name for root in roots.declared() for header, name in owners(root).items()}
    read = list(headers(tree))
    found, strangers = set(), []
    for header in read:
        if header in whose:
            found.add(whose[header])
        elif "toolkits" in header.parts and not header.exists():
            pytest.skip(f"{tree} was built with other toolkits")
        elif {"nanobind", "include"} <= set(header.parts):
            found.add("nanobind")
        elif header.is_relative_to(REPOSITORY / "third_party" / "lzma"):
            found.add("7zip")
        elif not header.is_relative_to(REPOSITORY) and not _of_the_platform(header):
            strangers.append(header)
    assert strangers == []
    # In the packages but not compiled in: CUTLASS and CuTe (MLX's), most of CCCL, nlohmann's JSON (cudnn_frontend's).
    assert not [header for header in read if {"cutlass", "cute", "thrust", "cub", "nlohmann"} & set(header.parts)]
    assert found == COMPILED_IN


def _of_the_platform(header: Path) -> bool:
    """The compiler's, the C library's or Python's."""
    return (
        header.is_relative_to("/usr") or header.is_relative_to("/opt") or any((folder / "Python.h").is_file() for folder in header.parents)
    )


def test_what_nvrtc_reads() -> None:
    """NVRTC does not tell, so every include is followed, whatever its condition: too many, never too few."""
    root = matrix.load().device.root
    whose, include = owners(root), installed(root)[0] / "include"
    kernels = sorted((REPOSITORY / "src").rglob("*.cu"))
    read = {header for kernel in kernels for header in plan.own_headers(kernel, [REPOSITORY / "src", include])}
    assert {whose[header] for header in read if header in whose} <= COMPILED_IN
    assert whose[(include / "cuda_bf16.h").resolve()] in COMPILED_IN
    assert (include / "cuda_bf16.h").resolve() in read


def test_the_compilers_of_device_code_are_tools() -> None:
    tools = {package for package in roots.find(matrix.load().device.root).packages if "tool" in sources.of(package.split("==")[0]).use}
    assert {package.split("==")[0] for package in tools} == {
        "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-nvfatbin-cu12",
    }  # fmt: skip
