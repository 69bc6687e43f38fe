"""``python -m ci reproduce``, on a small repository whose wheel is written by a few lines of Python instead of a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci import __main__ as cli
from ci import matrix
from ci.errors import EnvironmentProblem
from ci.maintain import checkout, container, reproduce

from .audit_support import DIST_INFO, NAMES, wheel_file, write_wheel

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="umask, links and the stub for a container engine are of POSIX")
NAME = NAMES["linux"]
# Stands for the factory's commands "wheel" and "container": writes a wheel with what {contents} and {compiler} say.
BUILDER = """
import os, pathlib, sys, zipfile
command, output = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
output.mkdir(parents=True)
wheel = {wheel!r}.replace("Generator: test", "Generator: " + ({compiler}))
with zipfile.ZipFile(output / "{name}", "w") as archive:
    for name, data in {{"mlx_cuda/__init__.py": {contents}, "{dist_info}/WHEEL": wheel}}.items():
        archive.writestr(zipfile.ZipInfo(name), data)
"""


class Project:
    """A git repository with a build of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet")
        self.builder("'the same'")

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *identity, *arguments], cwd=self.folder, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        self.git("add", name)
        self.git("commit", "--quiet", "--allow-empty", "--message", name)
        return self.git("rev-parse", "HEAD")

    def builder(self, contents: str, *, compiler: str = "'test'") -> str:
        """Make the build write a wheel with what this Python expression gives."""
        text = BUILDER.format(name=NAME, dist_info=DIST_INFO, contents=contents, compiler=compiler, wheel=wheel_file(NAME))
        return self.commit("ci/__main__.py", text)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    made = Project(tmp_path / "project")
    monkeypatch.setattr(matrix, "REPOSITORY", made.folder)
    monkeypatch.setenv("MLX_CUDA_TOOLKITS", str(tmp_path / "toolkits"))
    monkeypatch.delenv("CIBW_BUILD", raising=False)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "given" / NAME, {f"{DIST_INFO}/WHEEL": wheel_file(NAME).encode()})


def reproduced(*arguments: str) -> int:
    return cli.main(["reproduce", *arguments])


# --------------------------------------------------------------------------------------------------------------- the verdict
def test_identical(project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert reproduced("-o", "kept") == 0
    assert "host-1 and host-2: byte-identical" in capfd.readouterr().out
    assert sorted(path.relative_to(tmp_path / "kept").as_posix() for path in (tmp_path / "kept").rglob("*.whl")) == [
        f"host-1/{NAME}",
        f"host-2/{NAME}",
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "trace",
    [
        "os.getcwd()",
        "str(len(os.getcwd()))",
        "os.environ['TMPDIR']",
        "os.environ['MLX_CUDA_TOOLKITS']",
        "os.environ['LC_ALL']",
        "__import__('time').strftime('%z')",
        "str(hash('text'))",
        "oct(os.stat('ci/__main__.py').st_mode)",
        "oct(os.umask(0))",
        "os.environ['CMAKE_BUILD_PARALLEL_LEVEL']",
        "str(os.stat('ci').st_mtime_ns)",
    ],
)
def test_a_trace_of_the_surroundings_is_found(project: Project, trace: str, capfd: pytest.CaptureFixture[str]) -> None:
    project.builder(trace)
    assert reproduced() == 1
    output = capfd.readouterr().out
    assert "host-1 and host-2: DIFFERENT\n  mlx_cuda/__init__.py: " in output
    assert "diffoscope" in output


@pytest.mark.nightly
@pytest.mark.parametrize("variable", ["CMAKE_CXX_COMPILER_LAUNCHER", "CCACHE_DISABLE", "MLX_CUDA_DEVICE_STORE", "MLX_CUDA_DEVICE_CODE"])
def test_no_compiler_cache(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "ccache")
    project.builder(f"os.environ['{variable}']")
    assert reproduced() == 0
    for path in (tmp_path / "build/reproduce").rglob("*.whl"):
        assert b"ccache" not in path.read_bytes()


@pytest.mark.parametrize(("code", "said"), [(1, "build host-1 failed"), (2, "build host-1 could not be made")])
def test_a_build_that_fails(project: Project, tmp_path: Path, code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    project.commit("ci/__main__.py", f"raise SystemExit({code})")
    assert reproduced() == code
    assert said in capfd.readouterr().err
    assert not (tmp_path / "build").exists()


def test_the_selection_reaches_the_build(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    project.builder("' '.join(sys.argv[1:6])")
    assert reproduced("--cuda", "13.0", "--arch", "90", "-o", "kept") == 0
    _, path, *_ = capfd.readouterr().out.splitlines()[0].split()
    assert b"wheel --cuda 13.0 --arch 90" in (project.folder.parent / path).read_bytes()


# ------------------------------------------------------------------------------------------------------------- given wheels
def test_against_a_wheel_one_build_is_enough(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert reproduced("-o", "before") == 0
    capfd.readouterr()
    assert reproduced("--against", f"before/host-1/{NAME}", "-o", "kept") == 0
    assert "given and host-1: byte-identical" in capfd.readouterr().out


def test_against_another_wheel(project: Project, given: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project.builder("'the same'", compiler="'another'")
    assert reproduced("--against", str(given)) == 1
    output = capfd.readouterr().out
    assert f"given and host-1: DIFFERENT\n  {DIST_INFO}/WHEEL: " in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--against", "absent.whl"],
        ["--container", "--cuda", "13.0"],
        ["--commit", "absent"],
    ],
    ids=" ".join,
)
def test_wrong_usage(project: Project, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert reproduced(*arguments) == 2
    assert capfd.readouterr().out == ""


# --------------------------------------------------------------------------------------------------------------- the commit
def test_a_changed_tree_is_refused_unless_the_commit_is_named(project: Project) -> None:
    head = project.git("rev-parse", "HEAD")
    assert checkout.commit(None) == head
    (project.folder / "forgotten.py").write_text("")
    with pytest.raises(EnvironmentProblem, match="differs from the commit in 1 files"):
        checkout.commit(None)
    assert checkout.commit("HEAD") == head


def test_an_older_commit(project: Project) -> None:
    head = project.git("rev-parse", "HEAD")
    project.git("tag", "--annotate", "v1", "--message", "first")
    project.builder("'another'")
    assert checkout.commit("v1") == head


def test_export_is_the_commit_and_nothing_else(project: Project, tmp_path: Path) -> None:
    head = project.commit("some/file.txt", "committed")
    (project.folder / "some/file.txt").write_text("changed since")
    (project.folder / "forgotten.py").write_text("")
    checkout.export(head, tmp_path / "tree", umask=0o077)
    files = {path.relative_to(tmp_path / "tree").as_posix() for path in (tmp_path / "tree").glob("[!.]*/*")}
    assert files == {"ci/__main__.py", "some/file.txt"}
    assert (tmp_path / "tree/some/file.txt").read_text() == "committed"
    assert (tmp_path / "tree/some/file.txt").stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------------------------------------- the container
@pytest.fixture
def containers(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Something that stands for cibuildwheel and for an engine that has the image ``localhost/there``."""
    monkeypatch.setattr(container, "find_spec", lambda _: True)
    engine = tmp_path / "bin" / "engine"
    engine.parent.mkdir()
    engine.write_text("#!/bin/sh\n[ $3 = localhost/there ]\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", str(engine.parent), prepend=":")
    monkeypatch.setenv("CIBW_CONTAINER_ENGINE", "engine; create_args: --network=host")
    monkeypatch.setattr(matrix, "host_platform", lambda: matrix.load().platform("linux-x86_64"))
    monkeypatch.setenv("CIBW_MANYLINUX_X86_64_IMAGE", "localhost/there")
    return project


def test_builds_in_the_container_must_be_like_each_other(containers: Project, capfd: pytest.CaptureFixture[str]) -> None:
    containers.builder("os.getcwd() if command == 'container' else 'the same'")
    assert reproduced("--container") == 1
    assert "container-1 and container-2: DIFFERENT" in capfd.readouterr().out


def test_a_given_wheel_is_compared_with_the_containers(containers: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert reproduced("--container", "-o", "before") == 0
    containers.builder("os.getcwd() if command == 'wheel' else 'the same'")
    capfd.readouterr()
    assert reproduced("--container", "--against", f"before/container-1/{NAME}") == 0
    assert capfd.readouterr().out.endswith("given and container-1: byte-identical\n")


def test_the_container_makes_one_build(containers: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    containers.builder("' '.join(sys.argv[1:4]) if command == 'container' else 'the same'")
    assert reproduced("--container", "-o", "kept") == 0
    assert b"container --build cp310-manylinux_x86_64" in (tmp_path / f"kept/container-1/{NAME}").read_bytes()
    monkeypatch.setenv("CIBW_BUILD", "cp311-*")
    assert reproduced("--container", "-o", "kept") == 0
    assert b"container --build cp311-*" in (tmp_path / f"kept/container-1/{NAME}").read_bytes()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CIBW_CONTAINER_ENGINE", "absent-engine", "the container engine absent-engine is not installed"),
        ("CIBW_MANYLINUX_X86_64_IMAGE", "localhost/absent", "engine has no image localhost/absent"),
        ("CIBW_MANYLINUX_X86_64_IMAGE", "manylinux_2_28", None),  # an alias of cibuildwheel's, which fetches it
    ],
)
def test_what_a_container_needs(
    containers: Project, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert reproduced("--container") == (2 if said else 0)
    captured = capfd.readouterr()
    if said:
        assert said in captured.err
        assert captured.out == ""
        assert "host-1" not in captured.err, "nothing is built before it is known that all can be"


def test_without_cibuildwheel(containers: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem, match="cibuildwheel is not installed"):
        container.surroundings(None)


def test_several_wheels_are_refused(project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    builder = (project.folder / "ci/__main__.py").read_text()
    project.commit("ci/__main__.py", f"{builder}\n(output / 'another.whl').touch()\n")
    assert reproduced() == 2
    assert "left 2 wheels instead of one" in capfd.readouterr().err


def test_the_two_surroundings_share_nothing_that_they_set() -> None:
    first, second = (reproduce.surroundings(number) for number in (1, 2))
    assert first.variables.keys() == second.variables.keys()
    assert all(second.variables[key] != value for key, value in first.variables.items())
    assert len(second.folder) > len(first.folder) + 20
    assert first.umask != second.umask
