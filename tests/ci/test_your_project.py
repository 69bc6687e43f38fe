"""docs/factory/your-project.md: its files and commands make audited wheels of a project that is not this one, without CUDA and with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.matrix import Platform, host_platform

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/factory/your-project.md").read_text("utf-8")
FILE = re.compile(r"^`demo/([^`\n]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ ((?!pip install ).+)$", re.MULTILINE)

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("bash"), reason="the page is written for Linux")


BASE, CUDA = PAGE.split("\n## 6. Add CUDA\n")
CUDA = CUDA.partition("\n## ")[0]
TOML = re.compile(r"^```toml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MLX_CUDA_", "GITHUB_"))} | variables
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment | {"PATH": path}, check=False, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as the page makes it, step by step."""
    beside = tmp_path_factory.mktemp("beside")
    (beside / "mlx-cuda").symlink_to(ROOT)
    folder = beside / "demo"
    folder.mkdir()
    (folder / "README.md").write_text("# demo\n")
    (folder / "LICENSE").write_text("MIT\n")
    for step in BASE.split("\n## "):
        follow(step, folder)
    return folder


def follow(step: str, folder: Path, **variables: str) -> None:
    """Write the files of a step, and run its commands."""
    for name, text in FILE.findall(step):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for command in COMMAND.findall(step):
        done = run(command, folder, **variables)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.nightly
def test_with_cuda(project: Path, installed_root: Callable[[str, Platform], Path]) -> None:
    """Section 6, with the roots that are installed for mlx-cuda, whose locks are the same."""
    toolkits = {installed_root(name, host_platform()).parent for name in ("device", "cuda-12.8", "cuda-13.0")}.pop()
    folder = project.with_name("with-cuda")
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns("wheelhouse"))
    shutil.rmtree(folder / "build")
    declared, metadata = TOML.findall(CUDA)
    matrix, pyproject = folder / "ci" / "matrix" / "matrix.toml", folder / "pyproject.toml"
    matrix.write_text(matrix.read_text().partition("[cpu]")[0] + declared)
    text, before = pyproject.read_text(), ""
    for line in (line for line in metadata.splitlines() if " = " in line):
        text, replaced = re.subn(rf"^{line.partition(' ')[0]} = .*$", line, text, flags=re.MULTILINE)
        text = text if replaced else text.replace(f"{before}\n", f"{before}\n{line}\n")
        before = line
    pyproject.write_text(text)
    follow(CUDA, folder, MLX_CUDA_TOOLKITS=str(toolkits))
    (wheel,) = (folder / "wheelhouse").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert {"demo/_cu12.abi3.so", "demo/_cu13.abi3.so", "demo/device/scale.fatbin.lzma"} <= {*archive.namelist()}


def test_the_wheel_works(project: Path, tmp_path: Path) -> None:
    (wheel,) = (project / "wheelhouse").iterdir()
    assert re.fullmatch(r"demo-1\.0\.0-cp310-abi3-manylinux.*\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = run("python -c \"import demo; print(demo.__version__, demo.parse('0.5'))\"", tmp_path)
    assert done.stdout == "1.0.0 0.5\n", done.stderr


@pytest.mark.parametrize(
    ("file", "more", "check"),
    [
        ("python/demo/__init__.py", "evil = 1\n", "sources"),
        ("README.md", "More.\n", "metadata"),
        ("ci/matrix/matrix.toml", '[[cpu.libraries]]\nname = "libz"\nprovider = "zlib"\nneeded = true\n'
         'files = { linux = "libz.so.1" }\ndirectories = { linux = "zlib/lib" }\n', "needed"),
    ],
)  # fmt: skip
def test_its_audit_refuses_what_its_checkout_does_not_have(project: Path, file: str, more: str, check: str) -> None:
    before = (project / file).read_text()
    try:
        (project / file).write_text(before + more)
        done = run("python -m ci audit wheelhouse/*.whl", project)
    finally:
        (project / file).write_text(before)
    assert done.returncode == 1
    assert f": {check}: " in done.stdout


def test_device_code_that_is_not_declared_is_refused(project: Path) -> None:
    folder = project / "with-device-code"
    folder.mkdir()
    (wheel,) = (project / "wheelhouse").iterdir()
    shutil.copy(wheel, folder)
    with zipfile.ZipFile(folder / wheel.name, "a") as archive:
        archive.writestr("demo/device/kernel.fatbin.lzma", b"")
    done = run(f"python -m ci audit {folder / wheel.name}", project)
    assert "demo/device/kernel.fatbin.lzma: device: is unexpected" in done.stdout
