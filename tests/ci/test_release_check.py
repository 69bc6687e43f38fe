"""What a release must be before it may go out: the set, the wheels, the manifest, and the command."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from packaging.version import Version

from ci import __main__ as cli
from ci.audit.checks import CHECKS
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import sha256
from ci.matrix import load
from ci.release import check
from ci.release.dist import MANIFEST, agree, complete, read_manifest, settle

from .release_support import MATRIX, VERSION, make_dist, metadata, wheel_name, write_wheel
from .trial_support import ALWAYS, record

LINUX, *_ = MATRIX.platforms.values()
BUILD = MATRIX.builds[0]
NAME = wheel_name(LINUX, BUILD)
TAGS = [platform.tag for platform in MATRIX.platforms.values()]
QUICK = ("record", "size", "tags")  # of the audit: they read the archive alone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_dist(tmp_path / "dist")


def test_complete(folder: Path) -> None:
    dist = complete(folder, expected=Version(VERSION))
    assert dist.version == Version(VERSION)
    assert len(dist.entries) == len(MATRIX.platforms) * len(MATRIX.builds)
    assert dist.entries[-1].name == NAME, "the most used wheel goes last"
    assert [entry.platform for entry in dist.entries[:: len(MATRIX.builds)]] == [*MATRIX.platforms][::-1]


def test_tags_of_older_systems_beside_the_declared_one(folder: Path) -> None:
    """auditwheel names every tag that a wheel earns."""
    (folder / NAME).rename(folder / NAME.replace("manylinux_2_28_x86_64", "manylinux_2_27_x86_64.manylinux_2_28_x86_64"))
    assert complete(folder).entries[-1].platform == LINUX.name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"mlx_cuda-{VERSION}.tar.gz", "is no wheel, and no sdist is published: pip would try to build it where a wheel does not fit\n"),
        (f"mlx_cuda-{VERSION}.zip", "is no wheel, and no sdist is published: pip"),
        ("notes.txt", "is no wheel\n"),
        ("mlx-1.0-py3-none-any.whl", "is of the project mlx, expected mlx-cuda\n"),
        (NAME.replace("-cp310", "-1-cp310"), "has a build number, expected none: each release has a version of its own\n"),
        (
            NAME.replace("manylinux_2_28_x86_64", "manylinux_2_34_x86_64.linux_x86_64"),
            f"is tagged linux_x86_64, manylinux_2_34_x86_64, expected one of {', '.join(TAGS)}\n",
        ),
        (NAME.replace("cp310-abi3", "cp312.cp311-cp311"), "is tagged cp311-cp311, cp312-cp311, expected cp310-abi3 or cp315-abi3t\n"),
        (NAME.replace(VERSION, "not-a-version"), "not-a-version"),
        (NAME.replace("manylinux_2_28_x86_64", "manylinux_2_17_x86_64.manylinux_2_28_x86_64"), "linux-x86_64 has 2 wheels of cp310-abi3"),
    ],
)
def test_superfluous(folder: Path, name: str, said: str) -> None:
    shutil.copy(folder / NAME, folder / name)
    with pytest.raises(CheckFailed, match="not a complete release") as failure:
        complete(folder)
    assert said in f"{failure.value}\n"


def test_missing(folder: Path) -> None:
    for name in (NAME, NAME.replace("x86_64", "aarch64")):
        (folder / name).unlink()
    missing = [f"\n  linux-{machine} has no wheel of cp310-abi3, expected one" for machine in ("aarch64", "x86_64")]
    with pytest.raises(CheckFailed, match=f"^{re.escape(str(folder))} is not a complete release:{''.join(missing)}$"):
        complete(folder)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (f"{VERSION}+local", "is a local version"),
        ("0.1.1", f"is not {MATRIX.mlx}.<n>"),
        (MATRIX.mlx, f"is not {MATRIX.mlx}.<n>"),
        (f"{MATRIX.mlx}.0", f"is not {MATRIX.mlx}.<n>"),
        (f"{VERSION}.post1", f"is not {MATRIX.mlx}.<n>"),
        (f"1!{VERSION}", f"is not {MATRIX.mlx}.<n>"),
    ],
)
def test_unfit_versions(tmp_path: Path, version: str, said: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        complete(make_dist(tmp_path, version))
    assert said in str(failure.value)


@pytest.mark.parametrize("version", [f"{VERSION}rc1", f"{VERSION}.dev202601020304", f"{MATRIX.mlx}.1"])
def test_fit_versions(tmp_path: Path, version: str) -> None:
    assert complete(make_dist(tmp_path, version), expected=Version(version)).version == Version(version)


def test_two_versions(folder: Path) -> None:
    other = f"{MATRIX.mlx}.8"
    write_wheel(folder / wheel_name(LINUX, BUILD, other), version=other)
    with pytest.raises(CheckFailed, match=rf"\n  there are 2 versions: {VERSION}, {other}, expected one$"):
        complete(folder)


def test_another_version_than_the_checkouts(folder: Path) -> None:
    with pytest.raises(CheckFailed, match=rf"the wheels have the version {VERSION}, expected {MATRIX.mlx}\.8, which this checkout states"):
        complete(folder, expected=Version(f"{MATRIX.mlx}.8"))


def test_no_folder(tmp_path: Path) -> None:
    fix = "give the folder that holds all wheels of the release"
    with pytest.raises(EnvironmentProblem, match=rf"missing is not a directory\n  fix: {fix}$"):
        complete(tmp_path / "missing")


def found(folder: Path) -> dict[str, str]:
    dist = complete(folder)
    findings = [*check.twine(dist), *check.wheels(dist, checks=QUICK)]
    said = {finding.check: str(finding).partition("\n    fix: ")[0] for finding in findings}
    return {identifier: each.partition(f"{identifier}: ")[2] for identifier, each in said.items()}


def test_good_wheels(folder: Path) -> None:
    assert found(folder) == {}


def test_metadata_must_be_the_same_to_the_byte(folder: Path) -> None:
    write_wheel(folder / NAME, changes={"METADATA": metadata() + "\n"})
    assert found(folder) == {"same-metadata": "METADATA is not byte-identical in all wheels"}


def test_device_code_must_be_the_same(folder: Path) -> None:
    for path in complete(folder).paths:
        write_wheel(path, package={"device/manifest.json": "{}"})
    assert found(folder) == {}
    write_wheel(folder / NAME, package={"device/manifest.json": "{ }"})
    digests = [hashlib.sha256(text).hexdigest() for text in (b"{ }", b"{}")]
    first = complete(folder).paths[0].name
    assert found(folder) == {"same-device": f"is {digests[0]}, expected the same as in {first}, {digests[1]}"}
    write_wheel(folder / NAME)
    assert found(folder)["same-device"].startswith("is nothing, expected")


def test_a_wheel_without_an_sbom(folder: Path) -> None:
    write_wheel(folder / NAME, changes={"sboms/mlx-cuda.cdx.json": None})
    (said,) = check.wheels(complete(folder), checks=QUICK)
    member = f"mlx_cuda-{VERSION}.dist-info/sboms/mlx-cuda.cdx.json"
    assert str(said) == f"{NAME}: {member}: sbom: is missing, expected the one that python -m ci repair writes"


def test_how_twine_is_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines are not broken."""
    dist = complete(folder)
    runs = record(monkeypatch, 1, " out\n", "err\n")
    assert [str(each) for each in check.twine(dist)] == ["twine: twine check --strict: out\\nerr"]
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, dist.paths)]
    assert runs == [(command, {**ALWAYS, "env": {**os.environ, "COLUMNS": "1000"}})]


def test_twine_is_strict(tmp_path: Path) -> None:
    """A description that is empty is no more than a warning otherwise."""
    changes = {"METADATA": metadata().partition("\n\n")[0] + "\n"}
    (said,) = found(make_dist(tmp_path, changes=changes)).values()
    assert "twine check --strict" in said
    assert "long_description" in said


@pytest.mark.parametrize(
    ("changes", "checks"),
    [
        ({"WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"}, {"tags"}),
        ({"WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n"}, {"tags"}),
    ],
)
def test_unfit_wheels(folder: Path, changes: dict[str, str | None], checks: set[str]) -> None:
    write_wheel(folder / NAME, changes=changes)
    assert set(found(folder)) == checks


def test_the_manifest_holds_the_next_run_to_the_same_wheels(folder: Path) -> None:
    path = folder / MANIFEST
    settle(complete(folder), path)
    version, entries = read_manifest(path)
    assert (version, entries) == (Version(VERSION), complete(folder).entries), "the manifest is no part of the set"
    before = path.read_bytes()
    assert before.decode() == json.dumps({"format": 1, "version": VERSION, "files": list(map(asdict, entries))}, indent=2) + "\n"
    settle(complete(folder), path)
    assert path.read_bytes() == before
    changed = sorted([NAME, NAME.replace("x86_64", "aarch64")])
    for name in changed:
        write_wheel(folder / name, changes={"METADATA": metadata() + "\n"})
    what = f"the manifest of version {VERSION}: {', '.join(changed)}\n  fix: take the very wheels that it was written for "
    with pytest.raises(CheckFailed, match=f"^the wheels are not those of {re.escape(str(path))}, {what}"):
        settle(complete(folder), path)


def test_a_manifest_is_held_to_its_digest(folder: Path) -> None:
    dist, path = complete(folder), folder / MANIFEST
    settle(dist, path)
    agree(dist, path, digest := sha256(path))
    for given, expected in (("", "one"), ("0", "0")):
        with pytest.raises(CheckFailed) as failure:
            agree(dist, path, given)
        assert str(failure.value) == f"{path} has the sha256 {digest}, expected {expected}\n  fix: give the manifest that check wrote"
    with pytest.raises(CheckFailed, match=r"the manifest of version [\d.]+: \n"):
        agree(replace(dist, version=Version("1")), path)


def test_the_manifest_is_written_whole_or_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = set(folder.iterdir())
    with pytest.raises(EnvironmentProblem, match=r"No space left on device\n  fix: free space, or give --manifest$"):
        settle(complete(folder), folder / MANIFEST)
    assert set(folder.iterdir()) == before


def test_a_run_that_was_killed_over_its_manifest(folder: Path) -> None:
    (folder / f".{MANIFEST}.1.part").write_text("{")
    settle(complete(folder), folder / MANIFEST)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1, "version": "x", "files": []}', '{"format": 1, "version": "1", "files": [{}]}'])
def test_damaged_manifests(tmp_path: Path, text: str) -> None:
    path = tmp_path / MANIFEST
    path.write_text(text)
    with pytest.raises(EnvironmentProblem, match=r"is not a manifest of a release: .*\n  fix: take it from the run that wrote it$"):
        read_manifest(path)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as problem:
        read_manifest(tmp_path / MANIFEST)
    assert str(problem.value) == f"cannot read {tmp_path / MANIFEST}: No such file or directory\n  fix: check the path"


def test_manifest_of_another_format(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_text('{"format": 2}')
    with pytest.raises(EnvironmentProblem, match=r"has format 2, expected 1\n  fix: use the version that wrote it$"):
        read_manifest(path)


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """These wheels have no native modules, which only the audit knows; what is wrong is told, and no manifest is written."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(check, "WITHOUT_TOOLKITS", ["modules"])  # the others take seconds
    monkeypatch.setattr("ci.release.version.current", lambda _: Version(VERSION))
    arguments = ["release", "check", str(folder), "--without-toolkits", "--manifest", str(tmp_path / "m.json")]
    assert cli.main(arguments) == 1
    assert "mlx_cuda/_cu12.*: modules: is missing" in capsys.readouterr().err
    assert not (tmp_path / "m.json").exists()
    monkeypatch.setattr(check, "WITHOUT_TOOLKITS", ["record"])
    assert cli.main(arguments) == 0
    assert shown(capsys.readouterr().out) == (
        [f"mlx-cuda {VERSION}"],
        ["wheel, in the order of upload", "platform", "build", f"MiB of {load().size_budget_mib}", "sha256"],
        *([entry.name, entry.platform, entry.build, "0.00", entry.sha256[:16]] for entry in complete(folder).entries),
        ["no problem found: this release can be published"],
    )
    assert read_manifest(tmp_path / "m.json")[1] == complete(folder).entries
    capsys.readouterr()
    assert cli.main([*arguments, "--index", "none", "--github"]) == 0
    assert capsys.readouterr().out == f"manifest={sha256(tmp_path / 'm.json')}\n"
    write_wheel(folder / NAME, changes={"licenses/LICENSE": "another"})
    monkeypatch.setattr(check, "WITHOUT_TOOLKITS", ["modules"])
    assert cli.main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: the wheels are not those of "), "found before the audit"
    monkeypatch.setattr("ci.release.version.current", lambda _: Version("1.2"))
    assert cli.main(arguments) == 1
    assert "expected 1.2, which this checkout states" in capsys.readouterr().err


def shown(text: str) -> tuple[list[str], ...]:
    """The cells of a table, and the lines around it."""
    return tuple([cell.strip() for cell in re.split("[│┃]", line) if cell] for line in text.splitlines() if line[0] not in "┏┡└")


def test_what_needs_no_toolkits() -> None:
    assert {*check.WITHOUT_TOOLKITS, *check.ROOT_CHECKS} == set(CHECKS)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check", "also query this index: none (default), pypi, testpypi, the base URL of an index"),
        (
            "publish",
            "--index NAME pypi, testpypi, the base URL of an index (uploads go to the URL, the simple API is at simple/), or a name",
        ),
        ("publish", "--manifest FILE manifest that check wrote (default: DIST/release.json, written before"),
        ("publish", "time limit of one upload (default: 600)"),
        ("verify", "print the results as JSON"),
    ],
)
def test_what_the_help_says(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["release", command, "--help"])
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ([], "COMMAND"),
        (["stamp"], "VERSION"),
        (["preflight"], "--index"),
        (["check"], "DIST"),
        (["publish", "dist"], "--index"),
        (["verify", VERSION], "--index"),
        (["notes", "dist"], "-o/--output"),
    ],
)
def test_what_has_to_be_given(command: list[str], needed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["release", *command])
    assert capsys.readouterr().err.endswith(f"error: the following arguments are required: {needed}\n")
