"""cibuildwheel: its configuration says what ci/matrix/matrix.toml says, and ``python -m ci container`` reads its words rightly."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ci import matrix
from ci.__main__ import main
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import tomllib
from ci.maintain import container
from ci.trial import load

OPTIONS = tomllib.loads((matrix.REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["cibuildwheel"]


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


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if cibuildwheel and an engine with the image localhost/there were installed."""
    monkeypatch.setattr(container, "find_spec", lambda _: True)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, command[-1] != "localhost/there"))
    monkeypatch.setattr(matrix, "host_platform", lambda: matrix.load().platform("linux-aarch64"))


@pytest.mark.parametrize(
    ("image", "set_to"),
    [
        (None, "of the caller"),
        ("localhost/there", "localhost/there"),
        ("manylinux_2_28", "manylinux_2_28"),  # an alias of cibuildwheel's, which fetches it
    ],
)
@pytest.mark.usefixtures("engine")
def test_an_image_by_its_name(monkeypatch: pytest.MonkeyPatch, image: str | None, set_to: str) -> None:
    monkeypatch.setenv("CIBW_MANYLINUX_AARCH64_IMAGE", "of the caller")
    assert container.surroundings(image)["CIBW_MANYLINUX_AARCH64_IMAGE"] == set_to


@pytest.mark.usefixtures("engine")
def test_an_image_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIBW_CONTAINER_ENGINE", "podman; create_args: --network=host")
    with pytest.raises(EnvironmentProblem, match="podman has no image localhost/absent"):
        container.surroundings("localhost/absent")


@pytest.mark.nightly
@pytest.mark.parametrize("mount", [True, False])
def test_the_commit_is_built_and_what_is_cached_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mount: bool
) -> None:
    """A stub for cibuildwheel says where it runs, and with what; a failure is one line."""
    (tmp_path / "cibuildwheel").mkdir()
    (tmp_path / "cibuildwheel" / "__init__.py").touch()
    (tmp_path / "cibuildwheel" / "__main__.py").write_text(
        "import os, sys\nprint(os.getcwd(), os.path.isfile('pyproject.toml'), os.environ.get('CIBW_CONTAINER_ENGINE'))\n"
        "sys.exit(os.environ.get('FAIL', 0))\n"
    )
    monkeypatch.setenv("MLX_CUDA_TOOLKITS", str(tmp_path / "toolkits"))
    monkeypatch.setenv("MLX_CUDA_DEVICE_STORE", str(tmp_path / "store"))
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "CIBW_CONTAINER_ENGINE": "podman; create_args: --network=host"}
    container.build(tmp_path / "out", environment, mount=mount)
    folder, there, engine = capfd.readouterr().err.split(" ", 2)
    assert there == "True"
    assert not Path(folder).exists()
    assert Path(folder) != matrix.REPOSITORY
    volumes = {"toolkits": tmp_path / "toolkits", "device": tmp_path / "store"} if mount else {}
    mounted = "".join(f" --volume={place}:{container.IN_CONTAINER}/{name}" for name, place in volumes.items())
    assert engine == f"podman; create_args: --network=host{mounted}\n"
    container.build(tmp_path / "out", environment | {"MLX_CUDA_DEVICE_STORE": "off"}, mount=mount)
    assert "store" not in capfd.readouterr().err
    with pytest.raises(CheckFailed, match="cibuildwheel failed"):
        container.build(tmp_path / "out", environment | {"FAIL": "3"}, mount=mount)


def test_an_image_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    name = container.debian(container.OLD)
    assert commands == [["podman", "image", "exists", name]]


@pytest.mark.parametrize("missing", ["podman", "debootstrap"])
def test_an_image_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else name)
    with pytest.raises(EnvironmentProblem, match=f"{missing} is needed.*\n  fix: "):
        container.debian(container.OLD)


def test_systems_to_load_in_are_made_before_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(suite: str) -> str:
        raise EnvironmentProblem(f"no {suite}")

    monkeypatch.setattr(container, "surroundings", lambda _: {})
    monkeypatch.setattr(container, "debian", missing)
    monkeypatch.setattr(container, "build", lambda *_, **__: pytest.fail("built first"))
    assert main(["container"]) == 2


def test_what_was_built_is_loaded_in_each_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel that lay there before is not taken for a new one."""
    loaded: list[tuple[str, object]] = []
    (tmp_path / "old.whl").touch()

    def build(output: Path, *_: object, mount: bool) -> None:
        assert mount
        (output / "new.whl").touch()

    monkeypatch.setattr(container, "surroundings", lambda _: {})
    monkeypatch.setattr(container, "build", build)
    monkeypatch.setattr(container, "debian", lambda suite: f"image of {suite}")
    monkeypatch.setattr(load, "check", lambda wheel, images: loaded.append((wheel.name, images)))
    assert main(["container", "-o", str(tmp_path)]) == 0
    assert loaded == [("new.whl", [f"image of {container.OLD}", f"image of {container.NEW}"])]
    assert capsys.readouterr().out == f"{tmp_path / 'new.whl'}\n"


def test_a_build_that_leaves_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "surroundings", lambda _: {})
    monkeypatch.setattr(container, "build", lambda *_, **__: None)
    assert main(["container", "--load-in", "-o", str(tmp_path)]) == 1
