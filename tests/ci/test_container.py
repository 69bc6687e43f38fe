"""cibuildwheel: its configuration says what ci/matrix/matrix.toml says, and ``python -m ci container`` reads its words rightly."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ci import matrix
from ci.__main__ import main
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import tomllib
from ci.maintain import container, images
from ci.trial import load

OPTIONS = tomllib.loads((matrix.REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["cibuildwheel"]

LOG = """
Running before_all...

+ python -m ci toolkit install
                                                                      ✓ 25.42s
Building cp310-manylinux_x86_64 wheel
Setting up build environment...
                                                                       ✓ 0.02s
Building wheel...
* Building wheel...
[58/83] Building CXX object CMakeFiles/_cu12.dir/src/libraries/cublaslt.cpp.o
                                                                     ✓ 101.89s
Repairing wheel...
                                                                       ✓ 0.68s
Building cp313-manylinux_x86_64 wheel
Testing wheel...
                                                                       ✓ 2.32s
Copying wheels back to host...
                                                                       ✓ 0.07s
"""


def test_every_declared_build_is_built_and_nothing_else() -> None:
    identifiers = OPTIONS["build"].split()
    declared = [f"{build.identifier}-*" for build in matrix.load().builds]
    assert set(declared) <= set(identifiers)
    # The others only test: cibuildwheel passes them over when a stable-ABI wheel that fits was built before them.
    oldest = int(matrix.load().builds[0].identifier.removeprefix("cp3"))
    for other in set(identifiers) - set(declared):
        assert int(other.removeprefix("cp3").removesuffix("-*")) > oldest
        assert identifiers.index(declared[0]) < identifiers.index(other)


def test_free_threaded_builds_have_the_tag_that_is_declared() -> None:
    override = tomllib.loads((matrix.REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["scikit-build"]["overrides"][0]
    (free_threaded,) = [build for build in matrix.load().builds if build.abi.endswith("t")]
    assert override["if"]["abi-flags"] == "t"
    assert override["wheel"]["py-api"] == free_threaded.identifier
    assert free_threaded.abi.startswith(free_threaded.identifier.removesuffix("t") + "-")


@pytest.mark.parametrize("option", ["before-all", "repair-wheel-command", "audit-command"])
def test_hooks_are_there(option: str) -> None:
    script = OPTIONS[option].split()[1].removeprefix("{project}/")
    assert (matrix.REPOSITORY / script).is_file()


def test_commands_of_the_factory_parse() -> None:
    from ci.__main__ import make_parser

    for command in (OPTIONS["repair-wheel-command"], OPTIONS["audit-command"], OPTIONS["linux"]["test-command"]):
        words = command.format(project=".", wheel="x.whl", dest_dir="out").split()
        assert words[:2] == ["python", "./wheel_hooks/factory.py"]
        make_parser().parse_args(words[2:])


def test_timings() -> None:
    assert container.timings(LOG) == {
        "": {"before-all": 25.42},
        "cp310-manylinux_x86_64": {"build": 101.89, "repair": 0.68},
        "cp313-manylinux_x86_64": {"test": 2.32},
    }


def test_a_stand_in_that_fails(tmp_path: Path) -> None:
    (tmp_path / "build.sh").write_text("exit 7\n")
    with pytest.raises(EnvironmentProblem, match="stand-in image"):
        container.surroundings(tmp_path)


def test_a_stand_in_sets_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CIBW_MANYLINUX_X86_64_IMAGE", raising=False)
    (tmp_path / "build.sh").write_text("true\n")
    (tmp_path / "env.sh").write_text('export CIBW_MANYLINUX_X86_64_IMAGE="made here; two\nlines"\n')
    (tmp_path / "seed_virtualenv.sh").write_text("true\n")
    assert container.surroundings(tmp_path)["CIBW_MANYLINUX_X86_64_IMAGE"] == "made here; two\nlines"


@pytest.mark.parametrize("mount", [True, False])
def test_the_commit_is_built_and_what_is_cached_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mount: bool
) -> None:
    """A stand-in for cibuildwheel says where it runs, and with what; a failure is one line."""
    (tmp_path / "cibuildwheel").mkdir()
    (tmp_path / "cibuildwheel" / "__init__.py").touch()
    (tmp_path / "cibuildwheel" / "__main__.py").write_text(
        "import os, sys\nprint(os.getcwd(), os.path.isfile('pyproject.toml'), os.environ.get('CIBW_CONTAINER_ENGINE'))\n"
        "sys.exit(os.environ.get('FAIL', 0))\n"
    )
    monkeypatch.setenv("MLX_CUDA_TOOLKITS", str(tmp_path / "toolkits"))
    monkeypatch.setenv("MLX_CUDA_DEVICE_STORE", str(tmp_path / "store"))
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "CIBW_CONTAINER_ENGINE": "podman; create_args: --network=host"}
    folder, there, engine = container.build(tmp_path / "out", environment, mount=mount).split(" ", 2)
    assert there == "True"
    assert not Path(folder).exists()
    assert Path(folder) != matrix.REPOSITORY
    volumes = {"toolkits": tmp_path / "toolkits", "device": tmp_path / "store"} if mount else {}
    mounted = "".join(f" --volume={place}:{container.IN_CONTAINER}/{name}" for name, place in volumes.items())
    assert engine == f"podman; create_args: --network=host{mounted}\n"
    assert folder in capsys.readouterr().err
    container.build(tmp_path / "out", environment | {"MLX_CUDA_DEVICE_STORE": "off"}, mount=mount)
    assert "store" not in capsys.readouterr().err
    with pytest.raises(CheckFailed, match="cibuildwheel failed"):
        container.build(tmp_path / "out", environment | {"FAIL": "3"}, mount=mount)


def test_an_image_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    name = images.debian(images.OLD)
    assert commands == [["podman", "image", "exists", name]]


@pytest.mark.parametrize("missing", ["podman", "debootstrap"])
def test_an_image_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else name)
    with pytest.raises(EnvironmentProblem, match=f"{missing} is needed.*\n  cure: "):
        images.debian(images.OLD)


def test_systems_to_load_in_are_made_before_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(suite: str) -> str:
        raise EnvironmentProblem(f"no {suite}")

    monkeypatch.setattr(images, "debian", missing)
    monkeypatch.setattr(container, "build", lambda *_, **__: pytest.fail("built first"))
    assert main(["container"]) == 2


def test_what_was_built_is_loaded_in_each_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel that lay there before is not taken for a new one."""
    loaded: list[tuple[str, object]] = []
    (tmp_path / "old.whl").touch()

    def build(output: Path, *_: object, mount: bool) -> str:
        assert mount
        (output / "new.whl").touch()
        return LOG

    monkeypatch.setattr(container, "build", build)
    monkeypatch.setattr(images, "debian", lambda suite: f"image of {suite}")
    monkeypatch.setattr(load, "check", lambda wheel, images: loaded.append((wheel.name, images)))
    assert main(["container", "--json", "-o", str(tmp_path)]) == 0
    assert loaded == [("new.whl", [f"image of {images.OLD}", f"image of {images.NEW}"])]
    answer = json.loads(capsys.readouterr().out)
    assert [Path(name).name for name in answer["wheels"]] == ["new.whl"]
    assert answer["seconds"] == container.timings(LOG)


def test_a_build_that_leaves_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "build", lambda *_, **__: LOG)
    assert main(["container", "--load-in", "-o", str(tmp_path)]) == 1
