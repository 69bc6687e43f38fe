"""tests/conftest.py and tests/skips.py, in a small project with stubs for MLX and hypothesis: what is skipped, and may be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci import matrix
from tests import skips

ON_GPU = "import pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(3))\ndef test_gpu(n): pass\n"
OTHERS = "import pytest\ndef test_good(): pass\n@pytest.mark.skip(reason='its own')\ndef test_other(): pass\n"
# Which takes longer to import than all of a test.
HYPOTHESIS = "class settings:\n    register_profile = load_profile = staticmethod(lambda *_, **__: None)\n"
LINE = "SKIPPED [3] tests/gpu: MLX sees no CUDA GPU (with one: pip install 'mlx-cuda[cu13]')"

PARAMETRIZED = """\
import pytest
@pytest.mark.parametrize("n", [0, 1])
def test_other(n):
    if n:
        pytest.skip("{reason}")
"""
SKIPS = """\
[places]
nightly = "all tests"
some = "some"
[[skips]]
places = ["some", "nightly"]
tests = "tests/gpu"
reason = "no CUDA GPU"
[[skips]]
places = ["nightly"]
tests = "tests/package/test_others.py::*[[]1[]]"
reason = "^its own$"
[[skips]]
places = ["nightly"]
tests = "tests/package/*"
reason = "never"
"""
UNDECLARED = "UNDECLARED SKIP [1] tests/package/test_others.py: its own"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("tests/gpu", "tests/package", "mlx"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("tests", "tests/gpu", "tests/package", "mlx"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    (tmp_path / "hypothesis.py").write_text(HYPOTHESIS)
    (tmp_path / "tests" / "gpu" / "test_gpu.py").write_text(ON_GPU)
    (tmp_path / "tests" / "package" / "test_others.py").write_text(OTHERS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra --strict-markers\nmarkers =\n    gpu\n    nightly\n    slow\n")
    for name in ("conftest.py", "skips.py"):
        shutil.copy(Path(__file__).parents[1] / name, tmp_path / "tests")
    (tmp_path / "tests" / "skips.toml").write_text(SKIPS)
    return tmp_path


def said(project: Path, *arguments: str, required: str = "0", place: str = "") -> tuple[int, list[str]]:
    """The exit code, and the last lines of an ordinary run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"MLX_CUDA_REQUIRE_GPU": required, "MLX_CUDA_PLACE": place, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *arguments]
    done = subprocess.run(command, cwd=project, env=environment, check=False, capture_output=True, text=True)
    return done.returncode, (done.stdout or done.stderr).splitlines()


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


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_undeclared_skip_fails(project: Path, workers: str) -> None:
    code, lines = said(project, "-n", workers, "--place", "some")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert UNDECLARED in lines
    assert lines[lines.index(UNDECLARED) + 1] == "fix: give some what is missing, or declare the skip in tests/skips.toml"
    assert not [line for line in lines if "STALE" in line or "GPU" in line.partition("UNDECLARED")[2]]


def test_declared_skips_pass_and_stale_rows_are_said(project: Path) -> None:
    (project / "tests" / "package" / "test_others.py").write_text(PARAMETRIZED.format(reason="its own"))
    code, lines = said(project, place="nightly")
    assert code == 0
    assert [line for line in lines if "UNDECLARED" in line] == []
    assert [line for line in lines if "STALE" in line] == [
        "STALE in tests/skips.toml: nothing of tests/package/* was skipped because of never"
    ]


@pytest.mark.parametrize(("name", "reason"), [("test_other", "not its own"), ("test_more", "its own")])
def test_test_and_reason_have_to_be_the_declared_ones(project: Path, name: str, reason: str) -> None:
    text = PARAMETRIZED.format(reason=reason).replace("[0, 1]", "[0, 1]" if name == "test_other" else "[0, 2]")
    (project / "tests" / "package" / "test_others.py").write_text(text)
    code, lines = said(project, place="nightly")
    assert code == 1
    assert f"UNDECLARED SKIP [1] tests/package/test_others.py: {reason}" in lines


@pytest.mark.parametrize("workers", ["0", "2"])
def test_gpu_tests_are_judged_as_one(project: Path, workers: str) -> None:
    (project / "tests" / "skips.toml").write_text(SKIPS.replace("no CUDA GPU", "something else"))
    code, lines = said(project, "-n", workers, "tests/gpu", place="some")
    assert code == 1
    assert f"UNDECLARED SKIP [1] {LINE.partition('] ')[2]}" in lines


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_module_that_is_skipped_as_a_whole_is_heard_of(project: Path, workers: str) -> None:
    (project / "tests" / "package" / "test_others.py").write_text(
        "import pytest\npytest.importorskip('nothing_like_this', reason='gone')\n"
    )
    (project / "tests" / "package" / "test_good.py").write_text("def test_good(): pass\n")
    code, lines = said(project, "-n", workers, place="some")
    assert code == 1
    assert "UNDECLARED SKIP [1] tests/package/test_others.py: gone" in lines


def test_what_is_expected_to_fail_is_no_skip(project: Path) -> None:
    (project / "tests" / "package" / "test_others.py").write_text("import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n")
    assert said(project, place="some")[0] == 0


@pytest.mark.parametrize(
    ("place", "arguments"),
    [("", []), ("", ["--nightly"]), ("some", ["-n", "2"]), ("pull-request", []), ("pull-request", ["--nightly"]), ("nightly", [])],
)
def test_what_is_left_to_the_night(project: Path, place: str, arguments: list[str]) -> None:
    """Without a place, and on a pull request, unless it is asked for; a wheel's trial has all tests of the package."""
    (project / "tests" / "skips.toml").write_text(SKIPS.replace("[places]", '[places]\npull-request = ""'))
    text = "import pytest\ndef test_good(): pass\n@pytest.mark.nightly\ndef test_long(): pass\n"
    (project / "tests" / "package" / "test_others.py").write_text(text)
    code, lines = said(project, *arguments, "tests/package", place=place)
    assert code == 0
    assert ("1 passed, 1 deselected in " if place in {"", "pull-request"} and not arguments else "2 passed in ") in lines[-1]


def test_an_unknown_place(project: Path) -> None:
    code, lines = said(project, place="nowhere")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "unknown place 'nowhere': use one of nightly, some" in "\n".join(lines)


def test_the_real_list() -> None:
    places, rows = skips.load()
    assert set(places) == {"pull-request", "nightly", "mlx-lm", "try", "gpu"}
    assert all(row.places and set(row.places) <= set(places) for row in rows)
    assert len({(row.tests, row.reason) for row in rows}) == len(rows)
    for row in rows:
        assert re.compile(row.reason)
        assert any(matrix.REPOSITORY.glob(row.tests.partition("::")[0])), row.tests
