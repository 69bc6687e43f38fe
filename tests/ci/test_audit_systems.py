"""What the audit knows of systems (ci/audit/systems.py), and of the machine that it runs on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ci.audit.checks import binaries
from ci.audit.systems import manylinux
from ci.errors import EnvironmentProblem
from ci.matrix import REPOSITORY


@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel installs on Linux")
def test_tags_are_read_as_of_glibc_wherever_the_audit_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from auditwheel.libc import Libc

    monkeypatch.setattr(Libc, "detect", lambda: Libc.MUSL)
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64"):
        found = manylinux.__wrapped__(tag)
        assert found
        assert found.name == tag
    for other in ("manylinux_2_5_aarch64", "musllinux_1_2_x86_64", "linux_x86_64_v9", "manylinux_2_28_riscv64"):
        assert manylinux.__wrapped__(other) is None


def test_auditing_needs_auditwheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It installs on Linux alone."""
    monkeypatch.setitem(sys.modules, "auditwheel.policy", None)
    with pytest.raises(
        EnvironmentProblem, match=r"^auditing a Linux wheel needs auditwheel: import of auditwheel\.policy halted"
    ) as missing:
        manylinux.__wrapped__("manylinux_2_28_x86_64")
    assert missing.value.fix == "audit it on Linux, where auditwheel installs"


def test_paths_below_places_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are: /usr is otherwise the running system's."""
    monkeypatch.setattr(binaries, "_own_places", lambda: {Path("/usr/one"), Path("/usr/two")})
    binaries._patterns.cache_clear()
    paths = ["/usr/one/a/b.cpp", "/usr/two/a/b.cpp", "/usr/three/a/b.cpp"]
    text = "\0".join(paths).encode()
    assert list(binaries._build_paths(text)) == paths[:2]
    monkeypatch.undo()
    binaries._patterns.cache_clear()


def test_places_that_everybody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of / or /usr would make everything a path of the build."""
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")  # noqa: S108
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert binaries._own_places() == {REPOSITORY, Path("/var/tmp")}  # noqa: S108


@pytest.mark.usefixtures("_no_home")
def test_places_of_this_machine_without_a_home() -> None:
    assert REPOSITORY in binaries._own_places()
