"""Verifying a published release with real uv and real pip, on machines whose settings lead elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ci import __main__ as cli
from ci.errors import CheckFailed, EnvironmentProblem
from ci.index import Index
from ci.matrix import Platform
from ci.release.dist import MANIFEST, complete, settle
from ci.release.verify import Verified, _Job, _pythons, verify
from ci.trial.fresh import Fresh

from . import index_support
from .release_support import EXTRAS, MATRIX, VERSION, make_dist, metadata, wheel_name, write_innocent, write_wheel

HERE = sys.executable
REQUIRING = {"METADATA": metadata(requires="innocent==1.0")}


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine's user reaches pip and uv; a network is not needed."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What was published, with its manifest."""
    folder = make_dist(tmp_path / "dist", changes=REQUIRING)
    settle(complete(folder), folder / MANIFEST)
    return folder


@pytest.fixture
def store(tmp_path: Path, folder: Path) -> Path:
    """What the index holds: the wheels, and a dependency's name that a stranger took."""
    shutil.copytree(folder, tmp_path / "store", ignore=shutil.ignore_patterns(MANIFEST))
    write_innocent(tmp_path / "store", "a stranger's")
    return tmp_path / "store"


@pytest.fixture
def index(store: Path) -> Iterator[Index]:
    with index_support.server(store) as url:
        yield index_support.index(url)


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The index that the machine uses for everything else, with another mlx-cuda of the same version."""
    folder = make_dist(tmp_path / "usual", changes={**REQUIRING, "licenses/LICENSE": "another\n"})
    write_innocent(folder, "ours")
    with index_support.server(folder) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}simple/")
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{url}simple/")
        yield folder


@pytest.mark.nightly
def test_both_tools_get_our_wheel_and_no_strangers_dependency(folder: Path, index: Index, usual: Path) -> None:
    done = verify(Version(VERSION), index, manifest_path=folder / MANIFEST, pythons=[HERE])
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    installed = [Verified(python, "uv", "cpu", "installed"), Verified(python, "pip", "cpu", "installed")]
    assert done == [*installed, *(Verified(python, "uv", extra, "resolved") for extra in EXTRAS[1:])]


@pytest.mark.nightly
def test_found_files_do_not_come_in_between(
    folder: Path, index: Index, usual: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder of wheels in the user's settings, with one that fits this machine better: a developer's own build."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else None
    if libc is None:
        pytest.skip("made for systems with glibc")
    own = wheel_name(MATRIX.platforms["linux-x86_64"], MATRIX.builds[0]).replace("2_28", libc.split()[1].replace(".", "_"))
    write_wheel(usual / own, changes=REQUIRING)
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nfind-links = {usual}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("PIP_FIND_LINKS", str(usual))
    monkeypatch.setenv("UV_FIND_LINKS", str(usual))
    done = verify(Version(VERSION), index, manifest_path=folder / MANIFEST, pythons=[HERE], extras=["cpu"])
    assert [each.tool for each in done] == ["uv", "pip"]


@pytest.mark.nightly
def test_both_tools_are_held_to_the_published_bytes(index: Index, usual: Path, tmp_path: Path) -> None:
    """Whatever was compared before, what they install is compared too."""
    job = _Job(Version(VERSION), index, dict.fromkeys(index_support.held(tmp_path / "store"), "0" * 64), HERE, tmp_path / "job")
    with pytest.raises(CheckFailed, match="Hash mismatch"):
        job._with_uv("cpu")
    with pytest.raises(CheckFailed, match="other bytes than the published ones"):
        job._with_pip("cpu")


@pytest.mark.nightly
def test_install_all(folder: Path, index: Index, usual: Path) -> None:
    done = verify(Version(VERSION), index, pythons=[HERE], extras=["cu12"], install_all=True)
    assert [(each.extra, each.tool, each.how) for each in done] == [("cu12", "uv", "installed"), ("cu12", "pip", "installed")]


def test_a_dependency_that_nobody_published(index: Index, usual: Path, folder: Path) -> None:
    (usual / "innocent-1.0-py3-none-any.whl").unlink()
    with pytest.raises(CheckFailed, match="innocent"):
        verify(Version(VERSION), index, pythons=[HERE], extras=["cu12"])
    with pytest.raises(CheckFailed, match="innocent"):
        verify(Version(VERSION), index, pythons=[HERE], extras=["cpu"])


def test_a_doctor_that_finds_something(index: Index, usual: Path) -> None:
    write_innocent(usual, "somebody else's")
    with pytest.raises(CheckFailed, match="the doctor finds origin: somebody else's"):
        verify(Version(VERSION), index, pythons=[HERE], extras=["cpu"])


def test_other_bytes_than_the_manifests(folder: Path, store: Path, index: Index) -> None:
    name = complete(folder).entries[2].name
    write_wheel(store / name, changes={**REQUIRING, "licenses/LICENSE": "another\n"})
    with pytest.raises(
        CheckFailed, match=f"^{index.name} gives {name} with other bytes than the manifest's {complete(folder).entries[2].sha256}$"
    ):
        verify(Version(VERSION), index, manifest_path=folder / MANIFEST, pythons=[HERE])


def test_a_missing_file(folder: Path, store: Path, index: Index) -> None:
    name, other = (complete(folder).entries[number].name for number in (2, 1))
    (store / name).unlink()
    (store / other).unlink()
    names = ", ".join(sorted((name, other)))
    with pytest.raises(CheckFailed, match=f"^{index.name} and {folder / MANIFEST} list different files: {names}$"):
        verify(Version(VERSION), index, manifest_path=folder / MANIFEST, pythons=[HERE])
    with pytest.raises(CheckFailed, match="is not a complete release"):
        verify(Version(VERSION), index, pythons=[HERE])


def test_nothing_there(folder: Path, index: Index) -> None:
    with pytest.raises(CheckFailed, match=rf"^{index.name} has no file of 9\.9$"):
        verify(Version("9.9"), index, pythons=[HERE])


def test_a_manifest_of_another_version(folder: Path, index: Index) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace(f'"version": "{VERSION}"', '"version": "1.0"'))
    with pytest.raises(EnvironmentProblem) as problem:
        verify(Version(VERSION), index, manifest_path=path, pythons=[HERE])
    assert str(problem.value) == f"{path} is of version 1.0, not {VERSION}\n  fix: give the manifest of this version"


def test_an_extra_that_is_not_offered(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnvironmentProblem, match=r"^there is no extra cu10, cu11\n  fix: use cpu, cu12, cu13$"):
        verify(Version(VERSION), index, pythons=[HERE], extras=["cu11", "cpu", "cu10"])
    assert capsys.readouterr().err == f"6 files of {VERSION} on {index.name} are the published ones\n"


@dataclass
class Outside:
    """Stands for environments and tools: what is done there, what the doctor reports, and what programs answer, by their first words."""

    job: _Job
    done: list[tuple[object, ...]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=lambda: {"mlx_cuda": VERSION, "checks": []})
    answers: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    compiled: str = f"other==1 \\\n    --hash=sha256:2\nmlx-cuda=={VERSION} \\\n    --hash=sha256:0 \\\n    --hash=sha256:1\n"

    def run(self, folder: Path, arguments: tuple[str, ...], options: dict[str, object]) -> subprocess.CompletedProcess[str]:
        self.done.append((folder.name, arguments, options))
        if "--dest" in arguments:
            wheels = Path(arguments[arguments.index("--dest") + 1])
            wheels.mkdir(parents=True)
            (wheels / "a.whl").write_bytes(b"wheel")
        code, out, err = next((answer for word, answer in self.answers.items() if word in arguments), (0, "", ""))
        return subprocess.CompletedProcess(arguments, code, out, err)

    def resolve(self, platform: Platform, *arguments: object) -> str:
        self.done.append((platform.name, *arguments))
        if platform.name == "win-amd64" and not self.compiled:
            raise CheckFailed("no wheel")
        return self.compiled or f"mlx-cuda=={VERSION} --hash=sha256:0 --hash=sha256:1"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    made = Outside(
        _Job(Version(VERSION), Index("there", (), "http://there/simple/"), {"a.whl": "0", "b.whl": "1"}, "3.14t", tmp_path / "job")
    )

    def make(folder: Path, python: str) -> Fresh:
        made.done.append((folder.name, python))
        return Fresh(folder)

    monkeypatch.setattr(Fresh, "make", make)
    monkeypatch.setattr(Fresh, "version", "3.14.0t")
    monkeypatch.setattr(Fresh, "run", lambda fresh, *arguments, **options: made.run(fresh.folder, arguments, options))
    monkeypatch.setattr(Fresh, "install", lambda fresh, *what, options=(): made.done.append((fresh.folder.name, *what, *options)))
    monkeypatch.setattr(Fresh, "doctor", lambda _: made.report)
    monkeypatch.setattr("ci.release.verify.resolve", made.resolve)
    return made


PROJECT = f"""\
[project]
name = "verification"
version = "0"
dependencies = ["mlx-cuda[cu12]=={VERSION}"]
[tool.uv.sources]
mlx-cuda = {{ index = "published" }}
[[tool.uv.index]]
name = "published"
url = "http://there/simple/"
explicit = true
"""


def test_how_an_extra_is_resolved(outside: Outside, capsys: pytest.CaptureFixture[str]) -> None:
    assert outside.job.verify("cu12", install=False) == [Verified("3.14.0t", "uv", "cu12", "resolved")]
    assert capsys.readouterr().err == "CPython 3.14.0t, uv, [cu12]: resolves to the published wheels\n"
    folder = outside.job.folder / "project-cu12"
    assert (folder / "pyproject.toml").read_text() == PROJECT
    options = ["--no-header", "--no-annotate", "--generate-hashes", "--refresh-package", "mlx-cuda"]
    options += ["--python", str(Fresh(folder / "environment").python), str(folder / "pyproject.toml")]
    assert outside.done == [("environment", "3.14t"), *((platform, folder, *options) for platform in MATRIX.platforms)]


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        ("", "[cu12] does not resolve on win-amd64, CPython 3.14.0t:\nno wheel"),
        ("other==1", "uv resolves [cu12] to nothing of this project, expected the published hashes"),
        ("mlx-cuda==1 --hash=sha256:0", "uv resolves [cu12] to mlx-cuda==1 --hash=sha256:0, expected the published hashes"),
    ],
)
def test_what_does_not_resolve(outside: Outside, compiled: str, said: str) -> None:
    outside.compiled = compiled
    with pytest.raises(CheckFailed) as failure:
        outside.job.verify("cu12", install=False)
    assert str(failure.value) == said


def test_how_an_extra_is_installed(outside: Outside, capsys: pytest.CaptureFixture[str]) -> None:
    """pip downloads our wheel alone, whatever the settings of the machine, and installs that file."""
    outside.job.digests["a.whl"] = hashlib.sha256(b"wheel").hexdigest()
    outside.answers["ensurepip"] = (1, "", "")
    outside.job._project("cu12")  # of an extra that was asked for twice
    assert outside.job.verify("cu12", install=True) == [Verified("3.14.0t", tool, "cu12", "installed") for tool in ("uv", "pip")]
    said = [f"CPython 3.14.0t, {tool}, [cu12]: installed, imported, the doctor is content" for tool in ("uv", "pip")]
    assert capsys.readouterr().err.splitlines() == said
    project, wheels = outside.job.folder / "project-cu12", outside.job.folder / "wheels-cu12"
    hashes = " ".join(f"--hash=sha256:{each}" for each in outside.job.digests.values())
    assert (project / "published.txt").read_text() == f"mlx-cuda=={VERSION} {hashes}\n"
    alone = dict.fromkeys(("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"), "")
    pip, binaries = ("-m", "pip", "--no-input", "--disable-pip-version-check"), ("--only-binary", ":all:")
    ours = ("--no-deps", *binaries, "--no-cache-dir", "--index-url", "http://there/simple/", "--dest", str(wheels), f"mlx-cuda=={VERSION}")
    constrained = ("--constraints", str(project / "published.txt"), "--requirements", str(project / "pyproject.toml"))
    assert outside.done == [
        ("uv-cu12", "3.14t"),
        ("uv-cu12", "--quiet", "--refresh-package", "mlx-cuda", *constrained),
        ("uv-cu12", ("-c", "import mlx_cuda"), {}),
        ("pip-cu12", "3.14t"),
        ("pip-cu12", ("-m", "ensurepip"), {"installs": True}),
        ("pip-cu12", "pip", "--quiet"),
        ("pip-cu12", (*pip, "download", *ours), {"env": {"PIP_CONFIG_FILE": os.devnull, **alone}, "installs": True}),
        ("pip-cu12", (*pip, "install", *binaries, f"mlx-cuda[cu12] @ {(wheels / 'a.whl').as_uri()}"), {"env": None, "installs": True}),
        ("pip-cu12", ("-c", "import mlx_cuda"), {}),
    ]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"download": (1, "out\n", "")}, "pip download failed: out"),
        ({"download": (1, "out", "err\n")}, "pip download failed: err"),
        ({}, "pip downloads a.whl with other bytes than the published ones"),
    ],
)
def test_what_pip_cannot_do(outside: Outside, answers: dict[str, tuple[int, str, str]], said: str) -> None:
    outside.answers = answers
    with pytest.raises(CheckFailed, match=f"^{said}$"):
        outside.job._with_pip("cpu")
    assert ("pip-cpu", "pip", "--quiet") not in outside.done, "the pip that comes with Python"


FAILING = (1, "", "ImportError: no\n")


@pytest.mark.parametrize(
    ("extra", "missing", "answers", "said"),
    [
        ("cpu", [], {"import mlx_cuda": FAILING}, "[cpu] from uv cannot be imported: ImportError: no"),
        ("cu12", [], {"import mlx_cuda": FAILING}, "[cu12] from uv cannot be imported: ImportError: no"),
        ("cu12", ["driver", "gpu"], {"import mlx_cuda": FAILING}, ""),
        ("cu13", ["gpu"], {}, ""),
        ("cpu", ["driver", "gpu"], {}, "[cpu] from uv: the doctor finds driver: none; gpu: none"),
        ("cu12", ["gpu", "mlx"], {}, "[cu12] from uv: the doctor finds gpu: none; mlx: none"),
    ],
)
def test_what_does_not_work(outside: Outside, extra: str, missing: list[str], answers: dict[str, tuple[int, str, str]], said: str) -> None:
    """A machine without a GPU may miss one, where the extra is for one."""
    outside.answers = answers
    good = {"name": "python", "status": "ok", "summary": "good"}
    outside.report["checks"] = [good, *({"name": name, "status": "fail", "summary": "none"} for name in missing)]
    fresh = Fresh(outside.job.folder)
    if not said:
        assert outside.job._works(fresh, "uv", extra) == Verified("3.14.0t", "uv", extra, "installed")
        return
    with pytest.raises(CheckFailed) as failure:
        outside.job._works(fresh, "uv", extra)
    assert str(failure.value) == said


def test_another_version_than_was_asked_for(outside: Outside) -> None:
    outside.report["mlx_cuda"] = "1.0"
    with pytest.raises(CheckFailed, match=rf"^\[cpu\] from pip is 1\.0, expected {VERSION}$"):
        outside.job._works(Fresh(outside.job.folder), "pip", "cpu")


def test_the_command(folder: Path, index: Index, usual: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = index.simple.removesuffix("simple/")
    arguments = ["--index", url, "--manifest", str(folder / MANIFEST), "--python", HERE, "--extra", "cu13", "--json"]
    assert cli.main(["release", "verify", VERSION, *arguments]) == 0
    out = capsys.readouterr().out
    python = ".".join(map(str, sys.version_info[:3]))
    assert out == json.dumps([{"python": python, "tool": "uv", "extra": "cu13", "how": "resolved"}], indent=2) + "\n"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["release", "verify", "not-a-version", *arguments])
    assert "Invalid version: 'not-a-version', expected one such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "jobs"),
    [
        ([], [(python, number, extra, extra == "cpu") for number, python in enumerate(["3.10", HERE]) for extra in EXTRAS]),
        (
            ["--python", "3.14t", "--python", "3.12", "--extra", "cu12", "--install-all"],
            [("3.14t", 0, "cu12", True), ("3.12", 1, "cu12", True)],
        ),
    ],
)
def test_each_extra_on_each_python(
    index: Index,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    jobs: list[tuple[str, int, str, bool]],
) -> None:
    done = []

    def note(job: _Job, extra: str, *, install: bool) -> list[Verified]:
        done.append((job.python, int(job.folder.name), extra, install))
        return [Verified("3.14.0", "uv", extra, "installed" if install else "resolved")]

    monkeypatch.setattr(_Job, "verify", note)
    assert cli.main(["release", "verify", VERSION, "--index", index.simple.removesuffix("simple/"), *arguments]) == 0
    assert done == jobs
    how = {True: "installed, imported, the doctor is content", False: "resolves to the published wheels"}
    assert capsys.readouterr().out.splitlines() == [f"CPython 3.14.0, uv, [{extra}]: {how[install]}" for _, _, extra, install in jobs]


def test_the_default_pythons_are_the_oldest_and_this_one() -> None:
    fields = Message()
    fields["Requires-Python"] = ">=3.10,!=3.11.0"
    assert _pythons(fields) == ["3.10", sys.executable]
    del fields["Requires-Python"]
    assert _pythons(fields) == ["3.10", sys.executable]
