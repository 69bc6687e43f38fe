"""What repeats ci/matrix/matrix.toml equals it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ci import matrix
from ci.matrix import package_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((matrix.REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def test_extras_are_the_matrix_requirements(project: dict[str, Any]) -> None:
    declared = matrix.load()
    expected = {cuda.extra: list(cuda.requires) for cuda in declared.cuda.values()}
    assert project["optional-dependencies"] == expected | {"cpu": [f"mlx-cpu=={declared.mlx}"]}


def test_mlx_is_pinned_and_the_version_follows_it(project: dict[str, Any]) -> None:
    mlx = matrix.load().mlx
    assert f"mlx=={mlx}" in project["dependencies"]
    base, _, number = project["version"].rpartition(".")
    assert base == mlx
    assert int(number) >= 1


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
