"""Variant wheels: the payload of the wheel they are made from, and what real uv picks for each driver."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ci import __main__ as cli
from ci.files import record_digest, sha256
from ci.maintain.variants import EXTRAS, requiring
from ci.matrix import gpu, load
from ci.toolkit import uv
from ci.trial.fresh import Fresh

from .release_support import EXTRAS as OFFERED
from .release_support import MATRIX, VERSION, metadata, wheel_name, write_innocent, write_wheel

NAME = wheel_name(MATRIX.platforms["linux-x86_64"], MATRIX.builds[0])
DIST_INFO = f"mlx_cuda-{VERSION}.dist-info"
FORCED = "NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION"
FITTING = {"null": "cpu"}  # the extra of a label that is not called after it
PREVIEW = ["--preview-features", "wheel-variants"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the small wheels are for Linux")


def requirements(first: str = "always>=1") -> str:
    """METADATA that requires a package anyway, and one for each extra."""
    return metadata(requires="\nRequires-Dist: ".join([first, *(f'for_{extra}>=1,<2; extra == "{extra}"' for extra in OFFERED)]))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "finished" / NAME, changes={"METADATA": requirements()})


@pytest.fixture
def folder(tmp_path: Path, wheel: Path) -> Path:
    """The variants of the wheel, and what they require."""
    assert cli.main(["variants", str(wheel), "-o", str(tmp_path / "variants")]) == 0
    for name in ("always", *(f"for_{extra}" for extra in OFFERED)):
        write_innocent(tmp_path / "variants", "ours", name)
    return tmp_path / "variants"


def variant(folder: Path, label: str) -> Path:
    return folder / NAME.replace(".whl", f"-{label}.whl")


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert len(set(archive.namelist())) == len(archive.namelist())
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_extra_without_requirements(wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = replace(load(), cpu=replace(load().cpu, requires=()))
    monkeypatch.setattr("ci.maintain.variants.load", lambda: matrix)
    assert cli.main(["variants", str(wheel), "-o", "unused"]) == 2
    assert "error: the extra [cpu] of ci/matrix/matrix.toml requires nothing" in capsys.readouterr().err


@pytest.mark.parametrize("label", EXTRAS)
def test_the_payload_stays(folder: Path, wheel: Path, label: str) -> None:
    old, new = members(wheel), members(variant(folder, label))
    own = {f"{DIST_INFO}/METADATA", f"{DIST_INFO}/RECORD", f"{DIST_INFO}/variant.json"}
    assert {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} == own
    record = list(csv.reader(new[f"{DIST_INFO}/RECORD"].decode().splitlines()))
    expected = [[name, record_digest(data), str(len(data))] for name, data in new.items() if not name.endswith("/RECORD")]
    assert sorted(record) == sorted([*expected, [f"{DIST_INFO}/RECORD", "", ""]])


def test_the_same_wheel_gives_the_same_bytes(folder: Path, wheel: Path, tmp_path: Path) -> None:
    assert cli.main(["variants", str(wheel), "-o", str(tmp_path / "again")]) == 0
    for path in (tmp_path / "again").iterdir():
        assert sha256(path) == sha256(folder / path.name)


def test_what_the_variants_are_for(folder: Path) -> None:
    index = json.loads((folder / f"mlx_cuda-{VERSION}-variants.json").read_text("utf-8"))
    assert index["$schema"].endswith("/peps/850/v0.2.0.json")  # which uv knows, and docs/factory/variants.md names
    drivers = {cuda.extra: {"nvidia": {"cuda_version_lower_bound": [cuda.driver_cuda]}} for cuda in MATRIX.cuda.values()}
    assert index["variants"] == {**drivers, "null": {}}
    for label in EXTRAS:
        own = json.loads(members(variant(folder, label))[f"{DIST_INFO}/variant.json"])
        assert own == {**index, "variants": {label: index["variants"][label]}}


def test_an_extra_becomes_required_and_stays_offered() -> None:
    text = requirements()
    own = requiring(text.encode(), "cu13").decode()
    assert own == text.replace('for_cu13>=1,<2; extra == "cu13"', "for_cu13>=1,<2")
    assert "Provides-Extra: cu13" in own
    assert requiring(b"Requires-Dist: a ; extra == 'cu13'\nRequires-Dist: b; extra == 'cu130'", "cu13").startswith(b"Requires-Dist: a\n")
    below = f"{text}Requires-Dist: c; extra == 'cu13'\n"
    assert requiring(below.encode(), "cu13").decode() == f"{own}Requires-Dist: c; extra == 'cu13'\n"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fresh:
    for variable in [each for each in os.environ if each.startswith(("PIP_", "UV_", "NV_"))]:
        monkeypatch.delenv(variable)
    for variable, value in {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(variable, value)
    return Fresh.make(tmp_path / "environment", python=sys.executable)


def install(fresh: Fresh, *arguments: str, driver: str | None = None) -> str:
    """Run uv with a driver of this CUDA version, or this machine's; gives what it says."""
    command = [uv.executable(), "pip", "install", "--python", str(fresh.python), "--no-index", *arguments]
    environment = {**os.environ, **({FORCED: driver} if driver else {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stderr


def installed(fresh: Fresh) -> str:
    """The label of the variant that is installed, "" for a plain wheel; with it are the requirements of its extra, and of no other."""
    (site,) = fresh.folder.glob("lib/python*/site-packages")
    described = site / DIST_INFO / "variant.json"
    label: str = next(iter(json.loads(described.read_text("utf-8"))["variants"])) if described.exists() else ""
    assert {path.stem for path in site.glob("*.py")} - {"_virtualenv"} == {
        "always",
        *([f"for_{FITTING.get(label, label)}"] if label else []),
    }
    return label


DRIVERS = {"11.8": "null", "12.3": "null", "12.4": "cu12", "12.9": "cu12", "13.0": "cu13", "13.4": "cu13", "14.0": "cu13"}


@linux
@pytest.mark.parametrize("driver", [*DRIVERS, None])
def test_uv_picks_by_the_driver(fresh: Fresh, folder: Path, driver: str | None) -> None:
    install(fresh, *PREVIEW, "--find-links", str(folder), MATRIX.name, driver=driver)
    here = gpu.extra()
    assert installed(fresh) == (DRIVERS[driver] if driver else {"cpu": "null"}.get(here, here))


@linux
@pytest.mark.parametrize(("label", "least", "older"), [("cu12", "12.4", "12.3"), ("cu13", "13.0", "12.9")])
def test_from_a_path(fresh: Fresh, folder: Path, label: str, least: str, older: str) -> None:
    arguments = ["--find-links", str(folder), str(variant(folder, label))]
    assert "requires `--preview-features wheel-variants`" in " ".join(install(fresh, *arguments, driver=least).split())
    assert "only unsupported wheel variants" in install(fresh, *PREVIEW, *arguments, driver=older)
    install(fresh, *PREVIEW, *arguments, driver=least)
    assert installed(fresh) == label


@linux
def test_beside_the_plain_wheel(fresh: Fresh, folder: Path, wheel: Path) -> None:
    """Who knows no variants gets the plain wheel: uv without the switch, and pip; with the switch the variant comes first."""
    plain = ["--find-links", str(folder), "--find-links", str(wheel.parent), MATRIX.name]
    install(fresh, *plain, driver="13.0")
    assert installed(fresh) == ""
    pip = [sys.executable, "-m", "pip", "--python", str(fresh.python), "install", "--no-index", "--force-reinstall", "--no-deps", *plain]
    subprocess.run(pip, check=True, capture_output=True)
    assert installed(fresh) == ""
    install(fresh, *PREVIEW, "--reinstall", *plain, driver="13.0")
    assert installed(fresh) == "cu13"


def test_several_wheels(tmp_path: Path) -> None:
    names = [wheel_name(platform, MATRIX.builds[0]) for platform in MATRIX.platforms.values()]
    wheels = [write_wheel(tmp_path / name, changes={"METADATA": requirements()}) for name in names]
    assert cli.main(["variants", *map(str, wheels), "-o", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("*.whl"))) == len(EXTRAS) * len(MATRIX.platforms)
    assert len(list((tmp_path / "out").glob("*.json"))) == 1


def test_the_wheels_of_two_versions(tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_wheel(tmp_path / NAME.replace(VERSION, "1.0"), version="1.0", changes={"METADATA": requirements()})
    assert cli.main(["variants", str(wheel), str(other), "-o", str(tmp_path / "out")]) == 2
    assert f"these are wheels of mlx_cuda-{VERSION}, mlx_cuda-1.0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_wheel_without_the_extras(tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = write_wheel(tmp_path / NAME.replace("cp310", "cp315"))
    assert cli.main(["variants", str(wheel), str(bare), "-o", str(tmp_path / "out")]) == 1
    assert "METADATA has no requirement of the extra cu12\n  fix: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_variant_of_a_variant(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["variants", str(variant(folder, "cu12")), "-o", str(tmp_path / "out")]) == 2
    assert "give the path of a .whl file" in capsys.readouterr().err
