"""``python -m ci load``: load a Linux wheel's native modules with stub libraries for MLX and CUDA.

MLX needs a newer glibc than this project's wheels, and CUDA's packages have gigabytes, so neither is installed in a manylinux container or
on an old distribution. A stub library replaces each library outside the wheel, and exports the symbols that the modules need of it. glibc,
libstdc++ and Python are the real ones.

The command checks that the system's loader accepts the modules and binds each symbol, that the system has each symbol version, and that
static initializers run. It calls no function.

Exit codes: 0 all loaded, 1 a module was not loaded (the loader's message is on stderr), 2 usage or environment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from .. import process
from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import load as matrix
from . import variables

if TYPE_CHECKING:
    from ..wheelfile.wheel import Wheel

# Runs where nothing is installed, on any Python 3. One older than the wheel's lacks some of the stable ABI: a stub has it.
SCRIPT = """\
import ctypes, os, platform, sys
here = os.path.dirname(os.path.abspath(__file__))
machine = open(os.path.join(here, "machine")).read()
if machine != platform.machine():
    sys.exit("wrong architecture: the wheel is for %s, this Python for %s" % (machine, platform.machine()))
def files(folder):
    return [os.path.join(here, folder, name) for name in sorted(os.listdir(os.path.join(here, folder)))]
for path in files("outside") + (files("python") if sys.version_info < (3, 10) else []):
    ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_GLOBAL)
for path in files("modules"):
    ctypes.PyDLL(path, os.RTLD_NOW)
    print(os.path.basename(path), "loaded by CPython", platform.python_version(), "on glibc", platform.libc_ver()[1], platform.machine())
"""


def prepare(wheel: Wheel, folder: Path) -> None:
    """Write the native modules, the stub libraries and the script that loads them into ``folder``."""
    from ..toolkit.stub import shared_object

    if wheel.system != "linux":
        raise EnvironmentProblem(f"{wheel.path.name} is for Windows", fix="give a Linux wheel; Windows wheels are tested with `ci try`")
    wheel.readable()
    outside = {library.files["linux"] for extra in matrix().extras for library in extra.libraries} | {matrix().driver.get("linux", "")}
    modules = {name: binary for name, binary in wheel.binaries.items() if PurePosixPath(name).parent.name == matrix().module}
    if not modules:
        raise CheckFailed(f"{wheel.path.name} holds no native module")
    asked = {
        symbol for binary in modules.values() for symbol in binary.undefined if binary.asked_of.get(symbol, (None,))[0] in {None, *outside}
    }
    python = sorted(symbol for symbol in asked if symbol.startswith(("Py", "_Py")))
    foreign = sorted(asked - set(python))
    (machine,) = {binary.machine for binary in modules.values()}
    written: dict[str, bytes] = {f"modules/{PurePosixPath(name).name}": wheel.members[name] for name in modules}
    # The symbols are in one library of their own: ELF does not say where an unversioned one is to come from, and of a library that a
    # version names glibc expects that it has versions. The stubs under the libraries' names are empty.
    empty = {name for binary in modules.values() for name in binary.needed} & outside
    stubs = {"outside/0-symbols.so": foreign, "python/libpython3.so": python, **{f"outside/{soname}": [] for soname in empty}}
    written |= {name: shared_object(machine, PurePosixPath(name).name, symbols) for name, symbols in stubs.items()}
    written |= {"load.py": SCRIPT.encode(), "machine": machine.encode()}
    for name, data in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def load(folder: Path, before: Sequence[str], env: Mapping[str, str] | None = None) -> bool:
    """Run the script of a prepared folder; ``before`` is the command that runs a Python there. Its words go to stdout and stderr."""
    fix = f"install {before[0]}, or name another"
    return process.run([*before, folder / "load.py"], fix=fix, env=env, stdout=None, stderr=None).returncode == 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheel", metavar="WHEEL", type=Path, help="a repaired Linux wheel")
    parser.add_argument("--python", action="append", help="interpreter that loads them (repeatable; default: this one)")
    parser.add_argument("--image", action="append", default=[], help="container image, whose python3 loads them (repeatable)")
    parser.add_argument("--engine", default="podman", help="container engine: podman (default) or docker")


def check(wheel: Path, *, pythons: Sequence[str] = (), images: Sequence[str] = (), engine: str = "podman") -> None:
    """Load the wheel's modules with each interpreter and in each image; CheckFailed where one does not."""
    from ..wheelfile.wheel import read

    with tempfile.TemporaryDirectory(prefix=f"{matrix().name}-load-") as made:
        folder = Path(made)
        folder.chmod(0o755)  # also for another user in a container
        prepare(read(wheel), folder)
        loaded = [load(folder, [python], variables.for_code(folder)) for python in pythons]
        in_image = [engine, "run", "--rm", "--network=none", f"--volume={folder}:/load:ro"]
        loaded += [load(Path("/load"), [*in_image, image, "python3"]) for image in images]
    if not all(loaded):
        raise CheckFailed(f"{wheel.name} does not load; the loader's message is above")


def run(args: argparse.Namespace) -> int:
    check(args.wheel, pythons=args.python or ([] if args.image else [sys.executable]), images=args.image, engine=args.engine)
    return 0
