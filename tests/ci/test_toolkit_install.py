"""ci.toolkit: installing, verifying and what can go wrong, with an index in a folder instead of the network."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ci import matrix, toolkit
from ci.errors import EnvironmentProblem
from ci.toolkit import layout, lock, manifest, roots, uv
from tests.ci import toolkit_support as support
from tests.ci.toolkit_support import LINUX, ROOT, Index, problem, run


def no_uv(*_: str, **__: Any) -> None:
    pytest.fail("uv was run")


@pytest.mark.parametrize("platform", ["linux-x86_64", "linux-aarch64"])
def test_a_linux_root_has_headers_libraries_links_and_the_driver_stub(index: Index, platform: str) -> None:
    path = toolkit.install([ROOT], matrix.load().platform(platform))[0].path
    assert path.parent == index.cache
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert files - {file for file in files if file.startswith("site/")} == {
        "include/cccl/cub/cub.cuh",
        "include/cub/cub.cuh",
        "include/cublasLt.h",
        "include/cuda.h",
        "lib/libcublasLt.so",
        "lib/libcublasLt.so.1",
        "lib/libcudart.so",
        "lib/libcudart.so.1",
        "lib/stubs/libcuda.so",
        "lib/stubs/libcuda.so.1",
        "manifest.json",
    }
    assert (path / "lib/libcudart.so").read_bytes() == support.runtime_files(platform)["nvidia/cu/lib/libcudart.so.1"]
    assert not (path / "site/.lock").exists()
    assert {file for file in files if ".dist-info/" in file and file.endswith("RECORD")} == {
        "site/acme_blas-2.0.dist-info/RECORD",
        "site/acme_runtime-1.0.dist-info/RECORD",
    }


def test_a_windows_root_is_made_on_any_machine(index: Index) -> None:
    path = toolkit.install([ROOT], matrix.load().platform("win-amd64"))[0].path
    assert {file.name for file in (path / "lib").iterdir()} == {"cudart.lib", "cuda.lib"}
    assert b"__imp_cuMemAlloc_v2" in (path / "lib/cuda.lib").read_bytes()


def test_a_complete_root_is_used_as_it_is(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    first = toolkit.install([ROOT], LINUX)[0]
    monkeypatch.setattr(uv, "run", no_uv)
    second = toolkit.install([ROOT], LINUX)[0]
    assert (first.cached, second.cached) == (False, True)
    assert first.path == second.path == toolkit.root_path(ROOT, LINUX)
    assert first.wheel_bytes == sum(path.stat().st_size for path in index.wheels.glob("*x86_64.whl"))
    assert second.wheel_bytes == 0


def test_a_changed_lock_gives_another_folder(index: Index) -> None:
    before = toolkit.install([ROOT], LINUX)[0].path
    index.lock_file.write_text(index.lock_file.read_text("utf-8") + "# changed\n", "utf-8")
    assert roots.directory(ROOT, LINUX) != before
    with pytest.raises(EnvironmentProblem, match="not installed"):
        toolkit.root_path(ROOT, LINUX)


def test_a_changed_layout_gives_another_folder(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    before = roots.directory(ROOT, LINUX)
    monkeypatch.setitem(roots.LAYOUT_VERSION, "linux", roots.LAYOUT_VERSION["linux"] + 1)
    assert roots.directory(ROOT, LINUX) != before


def test_the_command_line_installs_tells_the_path_and_verifies(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("path", ROOT) == 2
    assert f"fix: python -m ci toolkit install {ROOT} --platform {matrix.host_platform().name}" in capsys.readouterr().err
    assert run("install", ROOT, "--platform", "linux-aarch64", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["root"], entry["platform"], entry["cached"]) == (ROOT, "linux-aarch64", False)
    assert run("path", ROOT, "--platform", "linux-aarch64") == 0
    assert capsys.readouterr().out.strip() == entry["path"]
    assert run("verify", ROOT, "--platform", "linux-aarch64") == 0
    assert run("list", "--platform", "linux-aarch64", "--json") == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])[0]["installed"] is True


def test_the_path_command_needs_little_installed(index: Index) -> None:
    """The configure step asks for it in the build environment, which has neither uv nor filelock nor pefile."""
    toolkit.install([ROOT], LINUX)
    forbid = "import sys\nfor name in ('uv', 'filelock', 'pefile', 'rich', 'packaging', 'elftools'): sys.modules[name] = None\n"
    program = f"{forbid}from pathlib import Path\nfrom ci import matrix\nfrom ci.toolkit import roots, root_path\n"
    program += f"roots.TOOLKITS = Path({str(index.toolkits)!r})\nprint(root_path({ROOT!r}, matrix.load().platform('linux-x86_64')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=matrix.REPOSITORY, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == str(toolkit.root_path(ROOT, LINUX))


# ---------------------------------------------------------------------------------------------------- killed, and two at once

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# Code that makes the process kill itself at some point of the installation.
MOMENTS = {
    "before uv": f"uv.run = lambda *a, **k: {KILL}",
    "after uv": f"layout.arrange = lambda *a: {KILL}",
    "amid the layout": f"layout._link_unversioned = lambda lib: {KILL}",
    "before the manifest": f"manifest.write = lambda *a: {KILL}",
    "amid the manifest": f"manifest.json.dump = lambda document, file, **k: (file.write('{{'), file.flush(), {KILL})",
    "manifest written, not synced": f"os.fsync = lambda descriptor: {KILL}",
    "before the rename": f"Path.rename = lambda *a: {KILL}",
    "after the rename": f"rename = Path.rename; Path.rename = lambda *a: (rename(*a), {KILL})",
}


def assert_recovers(index: Index, process: subprocess.Popen[str]) -> None:
    """No half root is taken for one; the next run installs it and leaves nothing behind."""
    try:
        half = toolkit.root_path(ROOT, LINUX)
    except EnvironmentProblem:
        pass
    else:
        assert manifest.differences(half, manifest.read(half) or {}) == []
    path = toolkit.install([ROOT], LINUX)[0].path
    assert toolkit.root_path(ROOT, LINUX) == path
    assert manifest.differences(path, manifest.read(path) or {}) == []
    assert index.leftovers() == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=pytest.mark.nightly if number % 2 else ()) for number, each in enumerate(MOMENTS)]
)
def test_killed_at_a_chosen_moment(index: Index, moment: str) -> None:
    with index.start(MOMENTS[moment]) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert_recovers(index, process)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("count", [pytest.param(count, marks=pytest.mark.nightly if count % 18 != 1 else ()) for count in range(1, 60, 6)])
def test_killed_at_the_nth_change_of_the_file_system(index: Index, count: int) -> None:
    """Audit events come before each opening for writing, link, rename, removal and new folder that Python does."""
    code = f"""
seen = [0]
def hook(event, args):
    writing = event == "open" and isinstance(args[1], str) and "w" in args[1]
    if writing or event in ("os.link", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.chmod"):
        seen[0] += 1
        if seen[0] == {count}:
            {KILL}
sys.addaudithook(hook)
"""
    with index.start(code) as process:
        process.communicate()
    assert process.returncode in {-signal.SIGKILL, 0}
    assert process.returncode or count > 20, "the process was not killed"
    assert_recovers(index, process)


def test_two_processes_at_once_install_it_once(index: Index) -> None:
    """The first stops inside the installation until the second has said that it waits."""
    stop = "run = uv.run\ndef held(*a, **k):\n    print('inside', flush=True); input(); run(*a, **k)\nuv.run = held"
    refuse = "def refuse(*a, **k):\n    sys.exit('the second ran uv')\nuv.run = refuse"
    with index.start(stop) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "inside\n"
        with index.start(refuse) as second:
            assert second.stderr is not None
            assert second.stderr.readline().startswith("waiting for the process that is installing")
            assert "False" in first.communicate("go on\n")[0]
            assert second.communicate()[0] == "True\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert index.leftovers() == []


# ------------------------------------------------------------------------------------------------------------------ errors


def test_hash_mismatch(index: Index) -> None:
    support.write_wheel(index.wheels, "acme_blas", "2.0", support.TAGS["linux-x86_64"], {"nvidia/cublas/include/x.h": b"other"})
    assert "hash mismatch" in problem()
    assert index.leftovers() == []


def test_a_line_without_a_hash_in_the_lock(index: Index) -> None:
    support.write_wheel(index.wheels, "acme_extra", "1.0", support.TAGS["linux-x86_64"], {})
    index.lock_file.write_text(f"{index.lock_file.read_text('utf-8')}acme-extra==1.0\n", "utf-8")
    assert "has no hash" in problem()


def test_no_network(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_NO_INDEX", "UV_FIND_LINKS", "UV_OFFLINE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    assert "no network" in problem()


def test_network_switched_off(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_NO_INDEX")
    monkeypatch.delenv("UV_FIND_LINKS")
    assert "no network" in problem()


def test_an_index_without_the_wheel(index: Index) -> None:
    next(index.wheels.glob("acme_blas*x86_64.whl")).unlink()
    assert "lacks a wheel" in problem()


def test_too_little_space(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("usage", (), {"free": (1 << 20) - 1}))
    monkeypatch.setattr(uv, "run", no_uv)
    said = problem()
    assert "too full" in said
    assert "MLX_CUDA_TOOLKITS" in said


def test_the_disk_becomes_full(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(layout, "_link", full)
    assert "the disk is full" in problem()
    assert index.leftovers() == []


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("error: failed to write to `x`\n  Caused by: No space left on device (os error 28)", "the disk is full"),
        ("error: There is not enough space on the disk. (os error 112)", "the disk is full"),
        ("error: Failed to fetch: `x`\n  Caused by: dns error", "no network"),
        ("error: Failed to fetch: `x`\n  Caused by: invalid peer certificate: UnknownIssuer", "certificate is not trusted"),
        ("error: something new", "uv failed with exit code 2"),
    ],
)
def test_what_uv_says_is_explained(said: str, meaning: str) -> None:
    assert meaning in str(uv.explain(said, 2))


def test_a_folder_that_cannot_be_written(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_CUDA_TOOLKITS", str(tmp_path / "file" / "below"))
    assert "cannot be written" in problem()


def test_no_hard_links(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    path = toolkit.install([ROOT], LINUX)[0].path
    assert (path / "lib/libcudart.so").read_bytes() == (path / "site/nvidia/cu/lib/libcudart.so.1").read_bytes()
    assert manifest.differences(path, manifest.read(path) or {}) == []


def test_wheels_that_disagree_about_a_header(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    files = {**support.blas_files("linux-x86_64"), "nvidia/cublas/include/cuda.h": b"// another\n"}
    support.write_wheel(index.wheels, "acme_blas", "2.0", support.TAGS["linux-x86_64"], files)
    support.write_lock(index)
    assert run("install", ROOT, "--platform", "linux-x86_64") == 1
    assert "disagree about cuda.h" in capsys.readouterr().err


def test_uv_is_missing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    assert "pip install --require-hashes -r requirements/factory.txt" in problem()


def test_unknown_names(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown root 'nope'" in problem("nope")
    assert run("install", ROOT, "--platform", "macos-arm64") == 2
    assert "unknown platform 'macos-arm64'" in capsys.readouterr().err


def test_the_lock_lacks_the_platform(index: Index) -> None:
    support.declare(index, 'platforms = ["linux-x86_64", "linux-aarch64"]')
    support.write_lock(index)
    toolkit.install([ROOT], LINUX)
    said = problem(platform=matrix.load().platform("win-amd64"))
    assert "lacks the platform win-amd64" in said
    assert "toolkit lock" in said


def test_not_locked(index: Index) -> None:
    index.lock_file.unlink()
    assert "not locked" in problem()


# -------------------------------------------------------------------------------------------------------------------- lock


def test_a_lock_names_the_wheels_of_all_platforms(index: Index) -> None:
    wheels = lock.parse(index.lock_file.read_text("utf-8"))
    assert {(wheel.requirement, wheel.platform) for wheel in wheels} == {
        (requirement, platform) for requirement in ("acme-runtime==1.0", "acme-blas==2.0") for platform in support.TAGS
    }
    for wheel in wheels:
        assert wheel.size == (index.wheels / wheel.file).stat().st_size
        assert support.TAGS[wheel.platform] in wheel.file
    assert lock.render(wheels) == index.lock_file.read_text("utf-8")


def test_lock_check_tells_a_stale_lock(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lock", "--check") == 0
    for tag in support.TAGS.values():
        support.write_wheel(index.wheels, "acme_blas", "2.1", tag, {})
    support.declare(index, packages=("acme-runtime==1.0", "acme-blas==2.1"))
    before = index.lock_file.read_text("utf-8")
    assert run("lock", "--check") == 1
    assert "+acme-blas==2.1" in capsys.readouterr().out
    assert index.lock_file.read_text("utf-8") == before
    assert run("lock", ROOT) == 0
    assert run("lock", "--check") == 0


def test_lock_says_which_platform_has_no_wheel(index: Index) -> None:
    next(index.wheels.glob("acme_blas*win_amd64.whl")).unlink()
    with pytest.raises(EnvironmentProblem, match="lacks a wheel"):
        lock.resolve(roots.find(ROOT))
