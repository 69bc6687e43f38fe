"""What repeats ci/matrix/matrix.toml equals it, and what it declares fits together."""

from __future__ import annotations

import ast
import ctypes
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ci import matrix
from ci.errors import EnvironmentProblem
from ci.files import tomllib
from ci.matrix import Row, gpu, package_table
from ci.release.version import unfit


@pytest.fixture
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((matrix.REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    return table


@pytest.mark.parametrize(
    ("line", "instead", "said"),
    [
        ("[release]", "[released]", "lacks 'release'"),
        ('abi = "cp310-abi3" ', "", ": Build missing 1 required positional argument: 'abi'"),
        ('extra = "cpu"\nrequires', 'about = "CPU"\nextra = "cpu"\nrequires', ": Extra got an unexpected keyword argument 'about'"),
        ("[driver]", "[drivers]", " has unknown tables: drivers"),
        ("[gpus]", "[gpu]", " has unknown tables: gpu"),
        ("[[device.sources]]", "[[device.source]]", ": device got an unexpected keyword argument 'source'"),
        ("[device]", "[device]\ncompiler = 1", ": device got an unexpected keyword argument 'compiler'"),
        ("[[device.sources]]", "[[device.sources]]\nwhat = 1", ": Targets got an unexpected keyword argument 'what'"),
        ("major = 12", "major =", " is not TOML: "),
    ],
)
def test_a_faulty_file_is_named(line: str, instead: str, said: str) -> None:
    text = (matrix.REPOSITORY / "ci" / "matrix" / "matrix.toml").read_text("utf-8")
    assert line in text
    with pytest.raises(EnvironmentProblem, match=rf"^ci/matrix/matrix.toml.*{re.escape(said)}.*\n  fix: "):
        matrix.parse(text.replace(line, instead, 1))


def test_what_linux_alone_has_needs_no_names_of_windows() -> None:
    text = re.sub(r', windows = "[^"]+"', "", (matrix.REPOSITORY / "ci" / "matrix" / "matrix.toml").read_text("utf-8"))
    (first, *_) = json.loads(package_table.render(matrix.parse(text)))["12"]["libraries"]
    assert first["linux"] == {"soname": "libcudart.so.12", "dir": "nvidia/cuda_runtime/lib"}
    assert "windows" not in first


def test_extras_are_the_matrix_requirements(project: dict[str, Any]) -> None:
    declared = matrix.load()
    assert project["optional-dependencies"] == {each.extra: list(each.requires) for each in declared.extras}
    assert all(f"=={declared.mlx}" in each.requires[0] for each in declared.extras)


def test_mlx_is_pinned_and_the_version_follows_it(project: dict[str, Any]) -> None:
    mlx = matrix.load().mlx
    assert f"mlx=={mlx}" in project["dependencies"]
    assert list(unfit(Version(project["version"]))) == []


def test_the_package_says_the_same_version(project: dict[str, Any]) -> None:
    text = (matrix.REPOSITORY / "python/mlx_cuda/_version.py").read_text("utf-8")
    assert f'__version__ = "{project["version"]}"\n' in text


def test_the_packages_extract_is_current() -> None:
    assert package_table.PATH.read_text("utf-8") == package_table.render(), "run python -m ci.matrix.package_table"


def test_backends_and_libraries_come_from_the_extras() -> None:
    for cuda in matrix.load().cuda.values():
        required = " ".join(cuda.requires)
        missing = [library.provider for library in cuda.libraries if library.needed and library.provider not in required]
        assert not missing
        assert f"mlx-cuda-{cuda.major}" in required


def values() -> set[str]:
    """What the factory's code reads from the matrix: none of it is short enough to stand there by chance."""
    declared = matrix.load()
    libraries = [library for cuda in declared.cuda.values() for library in cuda.libraries]
    return {
        *(declared.name, declared.mlx, declared.repository, *declared.driver.values()),
        *(Requirement(each).name for extra in declared.extras for each in extra.requires),
        *(value for library in libraries for value in (library.provider, *library.files.values(), *library.directories.values())),
        *(value for platform in declared.platforms.values() for value in (platform.tag, platform.uv, platform.runner)),
    } - {"mlx", "mlx/lib"}  # a folder, and one where any wheel of a toolkit may have it


def copied(source: str, owned: set[str]) -> Iterator[str]:
    """The literals of a module that hold such a value; docstrings may name what they like."""
    tree = ast.parse(source)
    spoken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    alone = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, owned))})(?![\w])")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and id(node) not in spoken:
            text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            yield from (f"{node.lineno}: {match.group()}" for match in alone.finditer(text))


def test_no_module_repeats_a_value_of_the_matrix() -> None:
    modules = sorted((matrix.REPOSITORY / "ci").rglob("*.py"))
    found = [f"{path}:{each}" for path in modules for each in copied(path.read_text("utf-8"), values())]
    assert found == [], "read it from ci.matrix.load()"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('re.compile(rb"mlx-cuda==(.*)")', ["1: mlx-cuda"]),
        ('SBOM = "mlx-cuda.cdx.json"', ["1: mlx-cuda"]),
        ('AT_ONCE = ("mlx", "mlx-cpu")', ["1: mlx-cpu"]),
        ('f"{folder}/libcudart.so.12"', ["1: libcudart.so.12"]),
        ('"""Of mlx-cuda."""', []),
        ('"ld-mlx-cpu", "mlx-cpus"', []),
    ],
)
def test_a_copied_value_is_found(source: str, found: list[str]) -> None:
    assert list(copied(source, values())) == found


@pytest.mark.parametrize(
    ("tag", "platforms"),
    [
        ("manylinux_2_35_x86_64", ["linux-x86_64"]),
        ("manylinux2014_aarch64", ["linux-aarch64"]),
        ("linux_x86_64", ["linux-x86_64"]),
        ("win_amd64", ["win-amd64"]),
        ("win_arm64", []),
        ("macosx_14_0_x86_64", []),
        ("musllinux_1_2_x86_64", []),
        ("any", []),
    ],
)
def test_whose_a_platform_tag_is(tag: str, platforms: list[str]) -> None:
    assert [platform.name for platform in matrix.load().platforms.values() if platform.takes(tag)] == platforms


def test_the_name_of_a_row() -> None:
    assert Row("linux-x86_64", "3.15t", "cpu").name == "linux-x86_64-cp315t-cpu"
    assert Row("win-amd64", "3.10", "cu13", "hopper", "580.65").name == "win-amd64-cp310-cu13-hopper"
    assert matrix.load().row("linux-x86_64-cp310-cpu") == Row("linux-x86_64", "3.10", "cpu")
    with pytest.raises(EnvironmentProblem, match=r"unknown row 'x'\n  fix: use one of linux-x86_64-cp310-cpu, "):
        matrix.load().row("x")


def test_rows_are_of_what_is_declared(project: dict[str, Any]) -> None:
    declared = matrix.load()
    backends = {cuda.extra: cuda for cuda in declared.cuda.values()}
    assert len({row.name for row in declared.tests}) == len(declared.tests)
    for row in declared.tests:
        assert row.platform in declared.platforms
        assert row.python.removesuffix("t") in SpecifierSet(project["requires-python"])
        assert bool(row.gpu) == bool(row.driver) == (row.extra in backends)
        assert row.gpu or row.extra == declared.cpu.extra
        if row.gpu:
            assert row.gpu in declared.gpus
            assert matrix.numbers(row.driver) >= matrix.numbers(backends[row.extra].driver), "older than the extra's own"
    with_gpu = [row for row in declared.tests if row.gpu]
    assert {row.extra for row in with_gpu} == set(backends)
    assert any(row.python.endswith("t") for row in with_gpu)


@pytest.mark.parametrize("platform", matrix.load().platforms)
def test_each_wheel_is_tried_on_the_oldest_and_the_newest_python_of_its_platform(platform: str, project: dict[str, Any]) -> None:
    pythons = {row.python for row in matrix.load().tests if row.platform == platform and not row.gpu}
    oldest = project["requires-python"].removeprefix(">=")
    free_threaded = [build.identifier for build in matrix.load().builds if build.abi.endswith("t")]
    assert oldest in pythons
    assert {f"cp{python.replace('.', '')}" for python in pythons} >= set(free_threaded)
    assert len({python.removesuffix("t") for python in pythons}) >= 2


def test_a_gpu_is_of_one_family() -> None:
    capabilities = [capability for family in matrix.load().gpus.values() for capability in family]
    assert len(set(capabilities)) == len(capabilities)
    assert set(map(matrix.capability, matrix.load().device.sass)) <= set(capabilities)


class FakeDriver:
    """As much of the driver's two libraries as a row asks for: a Hopper, and the version."""

    def __init__(self, version: bytes = b"580.65.06", *, init: int = 0, answer: int = 0) -> None:
        self.version, self.init, self.answer = version, init, answer

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.init

    def nvmlSystemGetDriverVersion(self, buffer: Any, length: int) -> int:  # noqa: N802
        assert length == len(buffer) > len(self.version)
        buffer.value = self.version
        return self.answer


def test_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver())
    assert gpu.driver_version() == "580.65.06"


@pytest.mark.parametrize("driver", [FakeDriver(init=9), FakeDriver(answer=1)], ids=["not loaded", "no answer"])
def test_a_driver_that_does_not_tell_its_version(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    with pytest.raises(EnvironmentProblem, match="does not report its version\n  fix: check that nvidia-smi works"):
        gpu.driver_version()


def test_the_drivers_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(EnvironmentProblem, match=r"version cannot be queried \((.+): cannot open\)\n  fix: install \1, a part of"):
        gpu.driver_version()


@pytest.mark.parametrize(
    ("found", "version", "said"),
    [
        ((90,), "550.54", None),
        ((90,), "550.54.14", None),
        ((90,), "550.100", None),
        ((90,), "1000.0", None),
        ((90,), "550.53.99", "the driver here is 550.53.99"),
        ((89, 90), "580.65", "a GPU here has the compute capability 8.9, which is not of hopper"),
        ((90, 120), "580.65", "a GPU here has the compute capability 12.0, which is not of hopper"),
    ],
)
def test_the_machine_that_a_row_asks_for(monkeypatch: pytest.MonkeyPatch, found: tuple[int, ...], version: str, said: str | None) -> None:
    monkeypatch.setattr(gpu, "capabilities", lambda _: found)
    monkeypatch.setattr(gpu, "driver_version", lambda: version)
    row = Row("linux-x86_64", "3.10", "cu12", "hopper", "550.54")
    if said is None:
        gpu.fits(row)
        return
    with pytest.raises(EnvironmentProblem) as raised:
        gpu.fits(row)
    fix = "run the row linux-x86_64-cp310-cu12-hopper on a machine with a GPU of the family hopper and the driver 550.54 or newer"
    assert str(raised.value) == f"{said}\n  fix: {fix}"
