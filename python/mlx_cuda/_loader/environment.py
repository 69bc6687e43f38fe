"""A snapshot of everything that the checks read, taken without importing MLX (which fails without a driver)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from . import limits_file, loaded
from . import origin as installed
from .driver import Driver, query
from .table import CPU_BACKEND, FRONTEND, Cuda, System, Table, Version, library_paths, load, version

PACKAGE = Path(__file__).parents[1]
SYSTEM: System = "windows" if sys.platform == "win32" else "darwin" if sys.platform == "darwin" else "linux"
CAPABILITY = "MLX_CUDA_CAPABILITY"  # has the GPU be an older one, of which nothing was measured here
MLX_LM = "mlx-lm"  # whose models' decode steps are replayed
_BACKEND_FILES = ("mlx/lib/libmlx.so", "mlx/mlx.dll")
WSL_DRIVER = "/usr/lib/wsl/lib"  # where Windows puts its driver's libcuda


@dataclass(frozen=True)
class Distribution:
    """An installed package: its version, site-packages directory and wheel tags."""

    version: str
    root: Path
    tags: tuple[str, ...] = ()

    @property
    def glibc(self) -> Version:
        """Return the oldest glibc of the wheel's platform tag; empty if it names none."""
        found = [version(f"{major}.{minor}") for tag in self.tags for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", tag)]
        return min(found, default=())


@dataclass(frozen=True)
class Headers:
    """The CUDA headers of MLX's run-time compiler, and what selects them."""

    source: str
    path: Path
    cuda: tuple[int, int]


@dataclass(frozen=True)
class Probe:
    """The result of loading the native module and running one operation in a separate process, and NVIDIA's libraries there."""

    error: str = ""
    details: str = ""
    capture: str = ""  # why no decode step is captured
    libraries: tuple[loaded.Loaded, ...] = ()


@dataclass(frozen=True)
class Environment:
    """The machine, the interpreter and the installed packages, as far as the checks need them."""

    table: Table
    system: System = SYSTEM
    python: str = platform.python_version()
    free_threaded: bool = False
    glibc: Version = ()
    package: Path = PACKAGE
    modules: frozenset[str] = frozenset()
    distributions: Mapping[str, Distribution] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    built_from_source: bool = False
    headers: Headers | None = None
    driver: Driver | None = None
    probe: Probe | None = None
    graphs: bool = True  # whether MLX launches CUDA graphs
    search: tuple[str, ...] = ()  # the folders of LD_LIBRARY_PATH, or of PATH on Windows
    shadows: tuple[str, ...] = ()  # libraries in them that installed packages have too
    conda: str = ""  # the prefix of a conda environment
    wsl: bool = False
    wsl_driver: bool = False  # libcuda is where Windows puts it
    archive: Path | None = None  # a zip file that this package is imported from
    origin: str = ""  # the wheel or checkout that was installed; empty: the package index
    measured: str = ""  # where the dispatch thresholds of the first GPU come from; empty: its data sheet

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the installed backends of MLX; several overwrite each other's library."""
        return tuple(name for name in self.table.backends if name in self.distributions)

    @property
    def cuda(self) -> Cuda | None:
        """Return the CUDA major in use: that of the installed backend, or of the only native module if MLX was built from source."""
        if self.backends:
            first = self.backends[0]
            return None if first == CPU_BACKEND else next(cuda for cuda in self.table.cuda.values() if cuda.backend == first)
        built = [cuda for cuda in self.table.cuda.values() if cuda.module in self.modules]
        return built[0] if self.built_from_source and len(built) == 1 else None

    @property
    def roots(self) -> dict[str, Path]:
        """Return the site-packages directory of each package: from its metadata, else the one beside this package, which RPATH searches."""
        beside = self.package.resolve().parent
        return dict.fromkeys(self.table.packages(), beside) | {name: found.root for name, found in self.distributions.items()}


def _distribution(name: str) -> Distribution | None:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    tags = re.findall(r"^Tag: (.+)$", found.read_text("WHEEL") or "", re.MULTILINE)
    return Distribution(version=found.version, root=Path(str(found.locate_file(""))).resolve(), tags=tuple(tags))


def _glibc() -> Version:
    with contextlib.suppress(AttributeError, ValueError):  # not Linux, or another C library
        return version((os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc "))
    return ()


def _modules() -> frozenset[str]:
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return frozenset(path.name.split(".")[0] for path in PACKAGE.glob("_cu*") if path.name.endswith(suffixes))


def _libraries(cuda: Cuda, system: System, roots: Mapping[str, Path]) -> dict[str, str]:
    """Return where each needed library was found; missing ones are left out."""
    paths = library_paths(cuda, system, roots)
    found = {name: str(path) for name, path in paths.items() if path.is_file()}
    for library in cuda.needed:
        if system == "linux" and library.name not in found and library.name != "libmlx":
            with contextlib.suppress(OSError):
                ctypes.CDLL(library.files["linux"].name)  # which the loader may find by itself: of a conda or system CUDA
                found[library.name] = "the loader's search path"
    return found


def _headers(variables: Mapping[str, str], system_toolkit: Path = Path("/usr/local/cuda")) -> Headers | None:
    """Return the headers that MLX uses: of CUDA_HOME, else CUDA_PATH, else the system's toolkit."""
    source = next((name for name in ("CUDA_HOME", "CUDA_PATH") if variables.get(name)), "")
    path = Path(variables[source]) if source else system_toolkit
    try:
        text = (path / "include" / "cuda.h").read_text("utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^#define CUDA_VERSION (\d+)", text, re.MULTILINE)
    return Headers(source or "the system's toolkit", path, (int(match[1]) // 1000, int(match[1]) % 1000 // 10)) if match else None


def _graphs(variables: Mapping[str, str]) -> bool:
    """Parse the variable as MLX does: anything that does not begin with a number other than 0 is 0."""
    return bool(re.match(r"\s*[+-]?0*[1-9]", variables.get("MLX_USE_CUDA_GRAPHS", "1")))


def _wsl(release: str = platform.release()) -> bool:
    return "microsoft" in release.lower()


def _conda() -> str:
    return next((prefix for prefix in (sys.prefix, sys.base_prefix) if Path(prefix, "conda-meta").is_dir()), "")


def _measured(env: Environment) -> str:
    if env.driver is None or env.driver.cuda is None or not env.driver.gpus or FRONTEND not in env.distributions:
        return ""
    if os.environ.get(CAPABILITY):
        return ""
    versions = limits_file.versions(".".join(map(str, env.driver.cuda)), env.distributions[FRONTEND].version)
    found = limits_file.measured(env.driver.gpus[0].name, versions, limits_file.default_path())
    return found.source if found else ""


def take(*, ask_driver: bool) -> Environment:
    """Take a snapshot. Querying the driver initializes CUDA in this process, so it is optional."""
    table = load()
    distributions = {name: found for name in (*table.packages(), MLX_LM) if (found := _distribution(name))}
    bare = Environment(
        table=table,
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        glibc=_glibc(),
        modules=_modules(),
        distributions=distributions,
        built_from_source=FRONTEND in distributions and any((distributions[FRONTEND].root / file).is_file() for file in _BACKEND_FILES),
        headers=_headers(os.environ),
        driver=query() if ask_driver else None,
        graphs=_graphs(os.environ),
        search=tuple(filter(None, os.environ.get(loaded.SEARCH, "").split(os.pathsep))),
        conda=_conda(),
        wsl=_wsl(),
        wsl_driver=Path(WSL_DRIVER, "libcuda.so.1").exists(),
        origin=installed.origin(),
        archive=next((parent for parent in PACKAGE.parents if parent.is_file()), None),
    )
    return replace(
        bare,
        libraries=_libraries(bare.cuda, SYSTEM, bare.roots) if bare.cuda else {},
        shadows=tuple(loaded.shadows(bare.roots.values(), os.environ)) if ask_driver else (),
        measured=_measured(bare),
    )
