"""The package's device code: which of it a GPU gets, and that nothing is handed on that is not whole and of this very build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_cuda import BackendError
from mlx_cuda._loader import checks, device_code
from mlx_cuda._loader.device_code import Fatbin
from mlx_cuda._loader.driver import Driver, Gpu
from mlx_cuda._loader.environment import Environment
from mlx_cuda._loader.origin import origin, reinstall

from .environments import DECLARED, NO_CODE, healthy, write_device_code

REINSTALL = reinstall(origin())

# By compute capability: the code of most sources, of Hopper's own, of 8-bit numbers, of what Hopper has others for, of what Turing runs,
# of what needs more shared memory than others have.
SERVED = {
    ((7, 5),): ("", "", "", "", "sm_75", ""),
    ((8, 0), (8, 6), (8, 7)): ("sm_80", "", "", "sm_80", "sm_80", "compute_80"),
    ((8, 9),): ("sm_80", "", "sm_89", "sm_80", "sm_80", "compute_80"),
    ((9, 0),): ("sm_90a", "sm_90a", "sm_90a", "compute_80", "sm_90a", "sm_90a"),
    ((10, 0), (10, 3)): ("sm_100", "", "sm_100", "sm_100", "sm_100", "sm_100"),
    ((12, 0), (12, 1)): ("sm_120", "", "sm_120", "sm_120", "sm_120", "compute_80"),
    ((11, 0), (13, 0)): ("compute_80", "", "compute_89", "compute_80", "compute_80", "compute_80"),
}


@pytest.mark.parametrize(("capability", "served"), [(each, served) for alike, served in SERVED.items() for each in alike], ids=str)
def test_the_code_that_each_gpu_gets(capability: tuple[int, int], served: tuple[str, ...]) -> None:
    assert tuple(Fatbin("", *targets).serving(capability) for targets in DECLARED.values()) == served


def test_ptx_with_a_letter_serves_its_own_gpu_only() -> None:
    bound = Fatbin("", (), ("90a",))
    assert [bound.serving(each) for each in ((8, 9), (9, 0), (10, 0))] == ["", "compute_90a", ""]


def test_good_code_is_handed_on(package: Path) -> None:
    assert device_code.load(package, write_device_code(package)) == {name: name.encode() for name in DECLARED}


def _one_byte(folder: Path) -> None:
    (folder / "fp8.fatbin.lzma").write_bytes(b"fp9")


def _changed(text: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "manifest.json").write_text(text if isinstance(text, str) else json.dumps(text), "utf-8")


MANIFEST = r"the device code's manifest .*manifest\.json cannot be read: "
DAMAGE = {
    "no folder": (lambda folder: folder.rename(folder.with_name("elsewhere")), MANIFEST),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), MANIFEST),
    "empty": (_changed(""), MANIFEST),
    "not JSON": (_changed("{"), MANIFEST),
    "not text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\xfa"), MANIFEST),
    "a list": (_changed([1]), MANIFEST),
    "a number": (_changed(1), MANIFEST),
    "no fatbins": (_changed({"inputs": ""}), MANIFEST),
    "fatbins that are a list": (_changed({"fatbins": ["fp8"]}), MANIFEST),
    "a fatbin that is a string": (_changed({"fatbins": {"fp8": "80"}}), MANIFEST),
    "a fatbin without a digest": (_changed({"fatbins": {"fp8": {"sass": [], "ptx": []}}}), MANIFEST),
    "numbers for names": (_changed({"fatbins": {"fp8": {"sha256": "", "sass": 80, "ptx": 80}}}), MANIFEST),
    "no fatbin": (lambda folder: (folder / "fp8.fatbin.lzma").unlink(), "device code is missing: .*fp8.fatbin.lzma"),
    "one byte": (_one_byte, r"the device code .*fp8\.fatbin\.lzma is damaged: its digest is not the manifest's"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_code_is_refused_with_the_fix(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    digest = write_device_code(tmp_path)
    damage(tmp_path / "device")
    with pytest.raises(BackendError, match=said) as refused:
        device_code.load(tmp_path, digest)
    assert refused.value.fix == REINSTALL


def test_code_of_another_build_is_refused(package: Path) -> None:
    with pytest.raises(BackendError, match=r"is of another build than the native module") as refused:
        device_code.load(package, "0" * 64)
    assert refused.value.fix == REINSTALL


# ------------------------------------------------------------------------------------------------------------- the doctor's check
def checked(env: Environment) -> checks.Check:
    return next(check for check in checks.run(env) if check.name == "code")


def found(*capabilities: tuple[int, int], **changed: Any) -> checks.Check:
    gpus = tuple(Gpu("a GPU", each) for each in capabilities)
    return checked(healthy(driver=Driver(cuda=(13, 0), gpus=gpus), **changed))


def test_the_doctor_tells_the_code_of_each_gpu() -> None:
    check = found((8, 9), (8, 9), (7, 5))
    assert (check.name, check.status) == ("code", "ok")
    assert check.summary == (
        "sm_89: sm_89 of fp8, sm_80 of decode, grouped, swiglu, compute_80 of chunk_gradients; not for this GPU: flash_sm90; "
        "sm_75: sm_75 of swiglu; not for this GPU: chunk_gradients, decode, flash_sm90, fp8, grouped"
    )


def test_the_doctor_finds_a_gpu_without_code(tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    _changed({"fatbins": {"flash_sm90": {"sha256": "", "sass": ["90a"], "ptx": []}}})(tmp_path / "device")
    assert found((9, 0), package=tmp_path).status == "ok"
    check = found((9, 0), (8, 0), package=tmp_path)
    assert (check.status, check.summary) == ("fail", "this build of mlx-cuda holds no code for sm_80")
    assert check.fix == "build the wheel again with --arch 80, or without --arch"


def test_the_doctor_finds_damage_without_a_gpu() -> None:
    check = found(package=NO_CODE)
    assert (check.status, check.fix) == ("fail", REINSTALL)
    assert check.summary.startswith("the device code's manifest ")
    assert "\n" not in check.summary


def test_the_doctor_needs_a_gpu_to_say_more() -> None:
    assert found().status == checked(healthy(driver=None)).status == "skip"
