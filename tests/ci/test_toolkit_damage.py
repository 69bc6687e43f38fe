"""ci.toolkit: roots, caches and wheels that are damaged, or in whose place something else is; and what verify says of them."""

from __future__ import annotations

import errno
import shutil
import zipfile
from pathlib import Path
from typing import Any

import filelock
import pytest

from ci import toolkit
from ci.errors import EnvironmentProblem
from ci.toolkit import manifest, roots
from tests.ci import toolkit_support as support
from tests.ci.toolkit_support import LINUX, ROOT, Index, problem, run


def test_verify_finds_a_changed_a_missing_and_an_added_file(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    path = toolkit.install([ROOT], LINUX)[0].path
    header = path / "include/cublasLt.h"
    content = header.read_bytes()
    header.unlink()
    header.write_bytes(content.replace(b"L", b"l"))  # the same size: only its hash tells
    (path / "lib/libextra.so").write_bytes(b"")
    assert toolkit.root_path(ROOT, LINUX) == path
    assert run("verify", ROOT, "--platform", "linux-x86_64") == 1
    said = capsys.readouterr()
    assert "include/cublasLt.h: changed" in said.out
    assert "lib/libextra.so: not part of the root" in said.out
    assert "remove" in said.err

    (path / "lib/libcudart.so").unlink()
    with pytest.raises(EnvironmentProblem, match=r"incomplete.*lib/libcudart\.so"):
        toolkit.root_path(ROOT, LINUX)
    assert manifest.differences(path, manifest.read(path) or {})[0] == "lib/libcudart.so: missing"


def test_a_wheel_whose_content_is_not_what_its_record_says_does_not_verify(index: Index) -> None:
    """The manifest states what was published, so that damage between uv's cache and the root is seen."""
    path = toolkit.install([ROOT], LINUX)[0].path
    library = path / "site/nvidia/cublas/lib/libcublasLt.so.1"
    library.write_bytes(library.read_bytes()[::-1])
    manifest.write(path, {})
    assert {line.partition(":")[0] for line in manifest.differences(path, manifest.read(path) or {})} == {
        "lib/libcublasLt.so",
        "lib/libcublasLt.so.1",
        "site/nvidia/cublas/lib/libcublasLt.so.1",
    }


def cached(index: Index, name: str) -> Path:
    """A file in uv's cache."""
    (path,) = Path(index.environment["UV_CACHE_DIR"]).rglob(name)
    return path


def test_a_root_shares_no_file_with_another(index: Index) -> None:
    """A byte that changes in one of them, or in uv's cache, would change in all."""
    name = "libcublasLt.so.1"
    first = toolkit.install([ROOT], LINUX)[0].path
    names = list(first.rglob("libcublasLt.so*"))
    assert {path.stat().st_nlink for path in names} == {len(names)}
    good = cached(index, name).read_bytes()
    cached(index, name).write_bytes(good[::-1])
    assert run("verify", ROOT, "--platform", "linux-x86_64") == 0
    (first / "lib" / name).write_bytes(good.upper())
    cached(index, name).write_bytes(good)
    first.rename(index.cache / "elsewhere")
    assert (toolkit.install([ROOT], LINUX)[0].path / "lib" / name).read_bytes() == good


def test_what_uvs_cache_has_damaged_is_downloaded_again(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    """So the fix that verify names is one: remove, install again, verify."""
    path, name = toolkit.install([ROOT], LINUX)[0].path, "libcublasLt.so.1"
    for file in (path / "lib" / name, cached(index, name)):  # as where the root of an older version is one with the cache
        file.write_bytes(file.read_bytes()[::-1])
    other = cached(index, "libcudart.so.1").stat().st_ino
    capsys.readouterr()
    assert run("verify", ROOT, "--platform", "linux-x86_64") == 1
    assert f"fix: remove {path} and install again, which downloads the damaged files of uv's cache again" in capsys.readouterr().err
    shutil.rmtree(path)
    assert run("install", ROOT, "--platform", "linux-x86_64") == 0
    assert "uv's cache is damaged (lib/libcublasLt.so: changed: " in (said := capsys.readouterr().err)
    assert "downloading acme_blas again" in said
    assert run("verify", ROOT, "--platform", "linux-x86_64") == 0
    assert cached(index, "libcudart.so.1").stat().st_ino == other, "the other package stayed in the cache"
    assert index.leftovers() == []


def test_a_wheel_that_is_not_what_it_says_is_refused(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    """uv does not hold its files to RECORD; the lock holds the wheel as a whole."""
    wheel = next(index.wheels.glob("acme_blas*x86_64.whl"))
    with zipfile.ZipFile(wheel) as archive:
        files = {each: archive.read(each) for each in archive.namelist()}
    files["nvidia/cublas/lib/libcublasLt.so.1"] = files["nvidia/cublas/lib/libcublasLt.so.1"][::-1]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    support.write_lock(index)
    assert run("install", ROOT, "--platform", "linux-x86_64") == 1
    said = capsys.readouterr().err
    assert f"error: a wheel of {ROOT} does not match its RECORD:\n  lib/libcublasLt.so: changed: " in said
    assert "fix: another version in ci/toolkit/locks/toolkits.toml" in said
    assert index.leftovers() == []
    assert not roots.directory(ROOT, LINUX).exists()


@pytest.mark.parametrize("error", [OSError(errno.EROFS, "Read-only file system"), filelock.Timeout("lock")])
def test_a_complete_root_in_a_cache_that_cannot_be_written(index: Index, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What a killed process left there stays, and harms nobody; nor does one that is at it."""

    def acquire(*_: Any, **__: Any) -> None:
        raise error

    path = toolkit.install([ROOT], LINUX)[0].path
    (index.cache / f".{path.name}.abc.staging").mkdir()
    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    assert toolkit.install([ROOT], LINUX)[0].cached is True


@pytest.mark.parametrize("what", ["file", "dangling"])
def test_something_else_in_the_place_of_a_root(index: Index, what: str) -> None:
    target = roots.directory(ROOT, LINUX)
    if what == "file":
        target.write_text("")
    else:
        target.symlink_to(index.cache / "nothing")
    assert toolkit.install([ROOT], LINUX)[0].cached is False
    assert not target.is_symlink()
    assert run("verify", ROOT, "--platform", "linux-x86_64") == 0
    assert index.leftovers() == []


@pytest.mark.parametrize("what", ["file", "dangling", "circle"])
def test_something_else_in_the_place_of_the_cache(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    if what == "file":
        place.write_text("")
    else:
        place.symlink_to(tmp_path / ("nothing" if what == "dangling" else "place"))
    monkeypatch.setenv("MLX_CUDA_TOOLKITS", str(place))
    assert f"fix: remove what is at {place}, or set MLX_CUDA_TOOLKITS" in problem()


def test_a_root_that_lost_a_file_is_installed_again(index: Index) -> None:
    path = toolkit.install([ROOT], LINUX)[0].path
    (path / "lib/libcudart.so.1").unlink()
    assert toolkit.install([ROOT], LINUX)[0].cached is False
    assert toolkit.root_path(ROOT, LINUX) == path
    assert index.leftovers() == []


def test_what_a_killed_process_left_goes_even_when_the_root_is_complete(index: Index) -> None:
    """Its uv may have gone on writing while the next run removed the folder."""
    path = toolkit.install([ROOT], LINUX)[0].path
    (index.cache / f".{path.name}.abc.staging" / "site").mkdir(parents=True)
    assert toolkit.install([ROOT], LINUX)[0].cached is True
    assert index.leftovers() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 1}', '{"files": {"a": {"size": 1}}}'])
def test_half_a_manifest_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.NAME).write_text(text, "utf-8")
    assert manifest.read(tmp_path) is None
