"""tests/conftest.py, in a small copy of the project with a stand-in for MLX: what a machine without a GPU says of the GPU tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ON_GPU = "import pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(3))\ndef test_gpu(n): pass\n"
OTHERS = "import pytest\ndef test_good(): pass\n@pytest.mark.skip(reason='its own')\ndef test_other(): pass\n"
LINE = "SKIPPED [3] tests/gpu: MLX sees no CUDA GPU (with one: pip install 'mlx-cuda[cu13]')"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    conftest = Path(__file__).parents[1] / "conftest.py"
    for folder in ("tests/gpu", "tests/package", "mlx"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("tests", "tests/gpu", "tests/package", "mlx"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    (tmp_path / "tests" / "gpu" / "test_gpu.py").write_text(ON_GPU)
    (tmp_path / "tests" / "package" / "test_others.py").write_text(OTHERS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra --strict-markers\nmarkers =\n    gpu\n    slow\n")
    shutil.copy(conftest, tmp_path / "tests")
    return tmp_path


def said(project: Path, *arguments: str, required: str = "0") -> tuple[int, list[str]]:
    """The exit code, and the last lines of an ordinary run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"MLX_CUDA_REQUIRE_GPU": required, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *arguments]
    done = subprocess.run(command, cwd=project, env=environment, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_they_are_skipped_in_one_line_and_counted(project: Path, workers: str) -> None:
    code, lines = said(project, "-n", workers)
    assert code == 0
    assert set(lines[-3:-1]) == {LINE, "SKIPPED [1] tests/package/test_others.py:3: its own"}
    assert "1 passed, 4 skipped in " in lines[-1]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_nothing_else_is_no_failure(project: Path, workers: str) -> None:
    code, lines = said(project, "-n", workers, "tests/gpu")
    assert (code, lines[-2]) == (0, LINE)
    assert "3 skipped in " in lines[-1]


def test_what_was_not_asked_for_is_not_counted(project: Path) -> None:
    _, lines = said(project, "-k", "good or 1")
    assert lines[-2] == LINE.replace("3", "1", 1)
    assert "1 passed, 1 skipped, 3 deselected in " in lines[-1]
    assert said(project, "-k", "nothing")[0] == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_gpu_that_is_required(project: Path, workers: str) -> None:
    code, lines = said(project, "-n", workers, required="1")
    assert code == 0
    assert "4 passed, 1 skipped in " in lines[-1]
