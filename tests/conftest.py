"""What all tests share: without a GPU its tests are skipped as one; hypothesis is repeatable and without deadlines; workers of xdist."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

pytest_plugins = [f"{__package__}.skips"]
# What tests share has asserts too; those of the package may be collected first.
pytest.register_assert_rewrite(*(f"{__package__}.gpu.{name}" for name in ("cached_calls", "decoding_checks", "support")))

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("repeatable")

# Python looks for garbage every 700 objects; of the many that collecting tests and parsing sources make, it is a fourth of the time.
gc.set_threshold(50_000, 20, 20)

BY_DAY = {None, "", "pull-request", "mlx-lm"}  # places whose runs leave tests to the nightly workflow

_SKIPPED = pytest.StashKey[tuple[int, str]]()  # how many GPU tests, and why


def _why_no_gpu() -> str:
    try:
        import mlx.core as mx
    except ImportError as error:
        return f"mlx.core cannot be imported: {error}"
    return "" if mx.cuda.is_available() else "MLX sees no CUDA GPU (with one: pip install 'mlx-cuda[cu13]')"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, metavar="N", help="so many random examples of what tests of hypothesis may have more of")
    parser.addoption("--nightly", action="store_true", help="also the tests that are left to the nightly workflow, at any place")


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker a temporary folder: MLX writes what it compiles for the CPU there, and two processes would read each other's half.

    Python's own stays what it was. numpy's matmuls have their worker's part of the cores: else each worker has a thread for every core,
    and references take minutes.
    """
    if workers := config.getoption("numprocesses", None):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    if hasattr(config, "workerinput"):
        os.environ["TMPDIR"] = folder = tempfile.mkdtemp(prefix="mlx-cuda-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="session")
def tested_wheel() -> Path:
    """The wheel that is tested."""
    if not (path := os.environ.get("MLX_CUDA_WHEEL")):
        pytest.skip("MLX_CUDA_WHEEL names no wheel (nox -s tests sets it)")
    return Path(path)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder of this run that all workers have in common; a lock says who fills it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _compiled_for_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers hand each other what MLX has compiled, whole files alone: compiling takes longer than the tests that need it."""
    yield from handed_on(request.config, "*/cpu/*.so")


@pytest.fixture
def _no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No home directory, as for a user whom the system does not know where HOME is not set either."""
    for name in ("HOME", "USERPROFILE", "HOMEPATH", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> NoReturn:
        raise KeyError("uid not found")

    if sys.platform != "win32":
        monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(RuntimeError):
        Path.home()


def handed_on(config: pytest.Config, *patterns: str) -> Iterator[None]:
    """Before what yields: take over files of MLX's that other workers have; after it: give them those of this one.

    They are given in the order of the patterns, and taken the other way round: so whoever has a file has those that belong to it.
    """
    if not hasattr(config, "workerinput"):
        yield
        return
    common, own = Path(tempfile.gettempdir(), "mlx"), Path(os.environ["TMPDIR"], "mlx")
    _link(common, own, patterns[::-1])
    yield
    _link(own, common, patterns)


def _link(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            path = target / file.relative_to(source)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(file)


@pytest.hookimpl(trylast=True)  # what -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out without a GPU, unless MLX_CUDA_REQUIRE_GPU=1 says that there has to be one. Workers begin with the slow files.

    By day leave out what the nightly workflow runs.
    """
    by_day = config.getoption("--place", None) in BY_DAY and not config.getoption("--nightly")
    if by_day and (long := [item for item in items if item.get_closest_marker("nightly")]):
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=long)
    if any(item.get_closest_marker("gpu") for item in items) and not _required(config) and (reason := _why_no_gpu()):
        # Skipped one by one they take seconds, and a line for each function.
        left = [item for item in items if not item.get_closest_marker("gpu")]
        config.stash[_SKIPPED] = len(items) - len(left), reason
        items[:] = left
    if hasattr(config, "workerinput"):
        config.workeroutput["skipped"] = config.stash.get(_SKIPPED, None)  # type: ignore[attr-defined]
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """``gc.collect``, which pefile calls at each close, looks at no collected test from here on: half a second each time."""
    gc.freeze()


def _required(config: pytest.Config) -> bool:
    return os.environ.get("MLX_CUDA_REQUIRE_GPU") == "1" or bool(config.option.collectonly)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear from a worker of xdist what it has left out; each of them collects all tests."""
    if skipped := getattr(node, "workeroutput", {}).get("skipped"):
        node.config.stash[_SKIPPED] = tuple(skipped)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing but skipped tests is a success, as it is with pytest's own, unless the place does not declare it."""
    if not (skipped := session.config.stash.get(_SKIPPED, None)):
        return
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
    if judge := session.config.pluginmanager.get_plugin("skips"):
        judge.hear("tests/gpu", (None, None, skipped[1]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Count the GPU tests among the skipped ones, which get a line for all that have place and reason in common."""
    if skipped := config.stash.get(_SKIPPED, None):
        number, reason = skipped
        place = str(Path(__file__).parent / "gpu")
        report = pytest.TestReport("tests/gpu", (place, None, ""), {"skip": 1}, "skipped", (place, 0, reason), "setup")
        terminalreporter.stats.setdefault("skipped", []).extend([report] * number)
