"""``python -m ci device`` with the real compilers: what is compiled when, what comes of it, and what a failure leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as cli
from ci import device, matrix, toolkit
from ci.device import __main__ as alone
from ci.device import compilers, manifest, packed, plan, store
from ci.device.build import parallel, perform, steps
from ci.errors import CheckFailed, CiError, EnvironmentProblem
from ci.toolkit import roots
from ci.wheelfile.binary import fatbin

from .device_support import edit, installed_tools, reported, write_kernels

TARGETS = ["90", "80", "compute_80"]
FIRST = {"first.cu compute_80", "first.cu compute_90a", "first.cu sm_80", "first.cu sm_90a", "first.fatbin"}
SECOND = {step.replace("first", "second") for step in FIRST}


@pytest.fixture(scope="module")
def tools() -> compilers.Tools:
    return installed_tools()


@pytest.fixture
def src(tmp_path: Path, tools: compilers.Tools, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels in the place of the tree's, and an empty store."""
    monkeypatch.setattr(plan, "SRC", tmp_path / "src")
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    monkeypatch.delenv(roots.PREBUILT, raising=False)
    return write_kernels(tmp_path / "src", "first", "second")


@pytest.fixture
def made(src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., set[str]]:
    """Build into ``output``; returns the steps that were done."""

    def run(output: str = "output", *requested: str) -> set[str]:
        device.make(tmp_path / output, requested or TARGETS)
        return reported(capsys.readouterr().err)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_only_what_an_edit_touches_is_compiled(made: Callable[..., set[str]], src: Path) -> None:
    assert made() == FIRST | SECOND
    assert made() == set()
    edit(src / "kernels" / "first.cu", "threadIdx.x", "blockIdx.x")
    assert made() == FIRST
    edit(src / "kernels" / "shared.h", "2 * x", "3 * x")
    assert made() == FIRST | SECOND
    edit(src / "kernels" / "shared.h", "3 * x", "2 * x")
    edit(src / "kernels" / "first.cu", "blockIdx.x", "threadIdx.x")
    assert made("another") == set()  # as it was
    assert made("output", "90", "compute_80") == {"first.fatbin", "second.fatbin"}


def test_what_comes_of_it(made: Callable[..., set[str]], tmp_path: Path) -> None:
    made()
    files = contents(tmp_path / "output")
    told = manifest.parse(files.pop("manifest.json").decode())
    assert set(files) == {"first.fatbin.lzma", "second.fatbin.lzma"}
    for name, entry in told.fatbins.items():
        (found,) = fatbin.find(packed.unpack(files[f"{name}.fatbin.lzma"]))
        assert found.offset == 0
        assert [(each.kind, each.architecture) for each in found.entries] == [("sass", "90a"), ("sass", "80"), ("ptx", "80")]
        assert (entry.sass, entry.ptx) == (("80", "90a"), ("80",))
        assert entry.size == len(files[f"{name}.fatbin.lzma"])


def test_a_gpu_of_a_declared_family_has_its_code_of_the_declared_ptx(made: Callable[..., set[str]], tmp_path: Path) -> None:
    assert made("output", "86") == {f"{name}{rest}" for name in ("first", "second") for rest in (".cu compute_80", ".cu sm_86", ".fatbin")}


def test_two_folders_give_the_same_bytes(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "another place"):
        place = tmp_path / name
        place.mkdir()
        monkeypatch.setattr(plan, "SRC", src.rename(place / "src"))
        device.make(place / "output", TARGETS)
        (tmp_path / "store").rename(place / "store")
        src = place / "src"
        found.append(contents(place / "output"))
        compiled = {path.name: path.read_bytes() for path in (place / "store").rglob("*") if path.is_file()}
        assert len(compiled) == len(FIRST | SECOND)
        found[-1] |= compiled
    assert found[0] == found[1]


def test_a_damaged_entry_of_the_store_is_made_again(made: Callable[..., set[str]], tmp_path: Path) -> None:
    made()
    before = contents(tmp_path / "output")
    for path in (tmp_path / "store").glob("??/*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert made() == FIRST | SECOND
    assert contents(tmp_path / "output") == before


def test_without_the_users_store_the_tree_has_its_own(
    made: Callable[..., set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.VARIABLE, "off")
    assert made() == FIRST | SECOND
    assert made() == set()
    assert made("another") == FIRST | SECOND
    assert not (tmp_path / "store").exists()


def test_a_store_that_cannot_be_written(src: Path, tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with pytest.raises(EnvironmentProblem, match=r"cannot write .*store.*\n  fix: MLX_CUDA_DEVICE_STORE=off"):
        device.make(tmp_path / "output", TARGETS)


def test_fatbins_of_the_past_are_removed(made: Callable[..., set[str]], src: Path, tmp_path: Path) -> None:
    made()
    (tmp_path / "output" / "notes.txt").touch()
    (src / "kernels" / "first.cu").unlink()
    assert made() == set()
    assert set(contents(tmp_path / "output")) == {"second.fatbin.lzma", "manifest.json", "notes.txt"}


def test_header_and_depfile(src: Path, tmp_path: Path) -> None:
    header, depfile = tmp_path / "include" / "code.h", tmp_path / "a b.d"
    first = device.make(tmp_path / "a b", TARGETS, header=header, depfile=depfile)
    assert header.read_text("utf-8") == f'#define MLX_CUDA_DEVICE_CODE "{first.digest}"\n'
    target, _, names = depfile.read_text("utf-8").rstrip("\n").partition(": ")
    assert target == f"{tmp_path}/a\\ b/manifest.json"
    assert names.split() == [str(src / "kernels" / name) for name in ("first.cu", "second.cu", "shared.h")]
    for path in (header, depfile, tmp_path / "a b" / "manifest.json"):
        os.utime(path, (0, 0))
    device.make(tmp_path / "a b", TARGETS, header=header, depfile=depfile)
    assert {path.stat().st_mtime for path in (header, depfile, tmp_path / "a b" / "manifest.json")} == {0}


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("first.cu", "scale(", "scalf(", r'kernels/first\.cu\(2\): error: identifier "scalf" is undefined'),
        ("shared.h", "return 2 * x", "return y", r'kernels/shared\.h\(2\): error: identifier "y" is undefined'),
        ("first.cu", "{ out[", '{ asm volatile("nonsense;"); out[', "first.cu: ptxas for sm_(80|90a): .*line"),
        (
            "first.cu",
            "__global__",
            "__device__",
            r"first\.cu: no kernel for compute_(80|90a), which \[device\] of ci/matrix/matrix\.toml declares",
        ),
    ],
    ids=["source", "header", "ptxas", "no kernel"],
)
def test_a_failure_says_where_and_leaves_the_old_output(
    made: Callable[..., set[str]],
    src: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    old: str,
    new: str,
    said: str,
) -> None:
    made()
    before = contents(tmp_path / "output")
    edit(src / "kernels" / file, old, new)
    with pytest.raises(CheckFailed, match=said):
        device.make(tmp_path / "output", TARGETS)
    assert contents(tmp_path / "output") == before
    capsys.readouterr()
    edit(src / "kernels" / file, new, old)
    assert made() == set()


@pytest.mark.parametrize("left", [0.0, 0.001, 0.5, 0.999])
def test_a_part_of_a_cubin_is_not_kept(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float) -> None:
    """As ptxas leaves it on a full disk."""
    (source, _), assemble, kept = plan.sources(["90"], src), compilers.assemble, store.Store(tmp_path / "kept")
    ptx, sass = steps(source)[:2]
    perform(ptx, compilers.tools(), kept)

    def cut(*given: Any) -> bytes:
        image = assemble(*given)
        return image[: int(left * len(image))]

    with monkeypatch.context() as full_disk:
        full_disk.setattr(compilers, "assemble", cut)
        with pytest.raises(EnvironmentProblem, match=r"first\.cu sm_90a: ptxas has not written all of its result"):
            perform(sass, compilers.tools(), kept)
    assert kept.get(sass.key) is None
    perform(sass, compilers.tools(), kept)
    assert kept.get(sass.key)


def test_what_an_edit_meets_is_not_kept(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler reads the edited header, but the key is of the one before."""
    (source, _), compile_ptx, kept = plan.sources(["90"], src), compilers.compile_ptx, store.Store(tmp_path / "kept")
    ptx = steps(source)[0]

    def edited(*given: Any) -> bytes:
        edit(src / "kernels" / "shared.h", "2 * x", "3 * x")
        return compile_ptx(*given)

    monkeypatch.setattr(compilers, "compile_ptx", edited)
    with pytest.raises(CheckFailed, match=r"^first\.cu, or a header of it, has changed while it was compiled; build again$"):
        perform(ptx, compilers.tools(), kept)
    assert kept.get(ptx.key) is None


def test_an_edit_is_not_older_than_the_manifest(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build system compares their times, and would not build again."""
    output = tmp_path / "output"
    with monkeypatch.context() as patch:  # the last that is done before the manifest is written
        patch.setattr(store.Store, "prune", lambda _: edit(src / "kernels" / "first.cu", "threadIdx.x", "blockIdx.x"))
        with pytest.raises(CheckFailed, match=r"^first\.cu, or a header of it, has changed"):
            device.make(output, TARGETS)
    assert not (output / manifest.NAME).exists()
    assert device.make(output, TARGETS).inputs == manifest.inputs(plan.sources(TARGETS))


def test_a_failing_packer_names_the_call(tools: compilers.Tools) -> None:
    with pytest.raises(CheckFailed, match=r"^nvFatbinAddCubin: "):
        compilers.NvFatbin(tools.nvfatbin).pack("first.cu", {"90a": b"not SASS"}, {})


def test_what_is_declared_has_hoppers_own_instructions(made: Callable[..., set[str]], src: Path) -> None:
    edit(src / "kernels" / "first.cu", "{ out", '{ asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); out')
    assert made("output", "90") == {step for step in FIRST | SECOND if "80" not in step}
    with pytest.raises(CheckFailed, match=r"first\.cu: ptxas for sm_80"):
        device.make(src.parent / "output", ["80"])


def test_every_declared_gpu_is_one_that_the_compilers_know(tools: compilers.Tools, tmp_path: Path) -> None:
    source = write_kernels(tmp_path, "first") / "kernels" / "first.cu"
    declared = matrix.load().device
    kinds = {declared.default, *dict(declared.special).values()}
    fronts = {each: compilers.compile_ptx(tools, source, each, tmp_path, plan.OPTIONS) for targets in kinds for each in targets.ptx}
    for architecture, front in {(each, targets.front(each)) for targets in kinds for each in targets.sass}:
        if front not in fronts:
            fronts[front] = compilers.compile_ptx(tools, source, front, tmp_path, plan.OPTIONS)
        assert compilers.assemble(tools, fronts[front], architecture, "first.cu").startswith(b"\x7fELF")


# ------------------------------------------------------------------------------------------------------------- taken ready-made
@pytest.fixture
def finished(made: Callable[..., set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished folder that the environment names, where no compiler is installed."""
    made("finished")

    def missing(name: str, platform: matrix.Platform) -> Path:
        raise EnvironmentProblem(f"{name} is not installed")

    monkeypatch.setattr(toolkit, "root_path", missing)
    monkeypatch.setenv(roots.PREBUILT, str(tmp_path / "finished"))
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "no store"))
    return tmp_path / "finished"


def test_a_finished_folder_needs_no_compiler(finished: Path, tmp_path: Path) -> None:
    taken = device.make(tmp_path / "output", TARGETS)
    assert contents(tmp_path / "output") == contents(finished)
    assert taken == manifest.parse((finished / "manifest.json").read_text("utf-8"))


def _another_shape(folder: Path) -> None:
    (folder / "manifest.json").write_text("[1, 2]", "utf-8")


def _one_fewer(folder: Path) -> None:
    told = json.loads((folder / "manifest.json").read_text("utf-8"))
    del told["fatbins"]["first"]
    (folder / "manifest.json").write_text(json.dumps(told), "utf-8")


def _elsewhere(folder: Path) -> None:
    edit(folder / "manifest.json", '"first"', '"../first"')


def _one_byte(folder: Path) -> None:
    data = bytearray((folder / "first.fatbin.lzma").read_bytes())
    data[-1] ^= 1
    (folder / "first.fatbin.lzma").write_bytes(data)


def _other_source(folder: Path) -> None:
    edit(folder.parent / "src" / "kernels" / "first.cu", "threadIdx.x", "blockIdx.x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "holds no device code: .*No such file"),
        (lambda folder: (folder / "manifest.json").write_text("{", "utf-8"), "holds no device code: not a manifest"),
        (_another_shape, "holds no device code: not a manifest"),
        (lambda folder: (folder / "first.fatbin.lzma").unlink(), "holds no device code: .*first.fatbin"),
        (_one_fewer, "made from other sources, compilers or for other GPUs"),
        (_elsewhere, "made from other sources, compilers or for other GPUs"),
        (_other_source, "made from other sources, compilers or for other GPUs"),
        (_one_byte, r"first\.fatbin\.lzma is damaged: its digest is not the manifest's"),
    ],
    ids=["no manifest", "no JSON", "other JSON", "no fatbin", "one fewer", "a path", "other source", "one byte"],
)
def test_what_is_not_whole_or_not_of_this_tree_is_refused(
    finished: Path, tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    change(finished)
    with pytest.raises(EnvironmentProblem, match=f"{said}.*\n  fix: compile it from this commit .python -m ci device., or unset MLX_CUDA"):
        device.make(tmp_path / "output", TARGETS)
    assert not (tmp_path / "output").exists()


def test_a_finished_folder_for_other_gpus_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="for other GPUs"):
        device.make(tmp_path / "output", ["90"])


# ------------------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize("main", [lambda: cli.main(["device", "--help"]), alone.main])
def test_help_explains(main: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["device", "--help"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    for word in (roots.PREBUILT, store.VARIABLE, "CMAKE_BUILD_PARALLEL_LEVEL", "Exit codes", "declared", "native", "compute_80"):
        assert word in out


def test_the_command_says_what_it_made(src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["device", "--arch", *TARGETS, "-o", str(tmp_path / "output")]) == 0
    digest = manifest.parse((tmp_path / "output" / "manifest.json").read_text("utf-8")).digest
    assert re.fullmatch(rf"device code: 2 fatbins, 0\.\d\d MiB, {digest[:12]}\n", capsys.readouterr().out)


@pytest.mark.parametrize(("asked", "jobs"), [("3", 3), ("0", None), ("", None), ("-1", None), ("many", None)])
def test_how_many_at_once(monkeypatch: pytest.MonkeyPatch, asked: str, jobs: int | None) -> None:
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "")
    cores = parallel()
    assert cores >= 1
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", asked)
    assert parallel() == (jobs or cores)


def test_no_more_than_asked_run_at_once(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "1")
    device.make(tmp_path / "output", TARGETS)
    assert "device code: 10 steps, 1 at a time\n" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- ended from outside
# A source that takes minutes: in NVRTC, which hears no signal, or in ptxas, a child of the worker.
ENDLESS = {
    "NVRTC": "#define EIGHT(x) x x x x x x x x\n"
    'extern "C" __global__ void {name}(float* out) {{ float y = out[0];\n'
    "EIGHT(EIGHT(EIGHT(EIGHT(EIGHT(y = y * out[(int)y] + 1;))))) out[0] = y; }}\n",
    "ptxas": 'extern "C" __global__ void {name}(float* out) {{ out[0] = 1; }}\n',
}


class Running:
    """``python -m ci device`` in a process group of its own, busy in a compiler."""

    def __init__(self, src: Path, where: str) -> None:
        for name in ("first", "second"):
            (src / "kernels" / f"{name}.cu").write_text(ENDLESS[where].format(name=name), "utf-8")
        self.folder = src.parent
        self.temporary = self.folder / "temporary"
        self.temporary.mkdir()
        program = f"""
import signal
import sys
from pathlib import Path
from ci.device import __main__, compilers, plan
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it, as nohup's background jobs do
plan.SRC = Path({str(src)!r})
if {where == "ptxas"}:
    found = compilers.tools()
    slow = Path({str(self.folder / "slow ptxas")!r})
    slow.write_text("#!/bin/sh\\nexec sleep 100\\n")
    slow.chmod(0o755)
    compilers.tools = lambda: compilers.Tools(found.nvrtc, slow, found.nvfatbin, found.include)
sys.argv = ["device", "--arch", "80", "-o", {str(self.folder / "output")!r}]
sys.exit(__main__.main())
"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=matrix.REPOSITORY,
            env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "2", "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        )
        self.wait(lambda: len(list(self.temporary.iterdir())) == 2 if where == "ptxas" else self.compiling() == 2)
        time.sleep(0.5)

    def wait(self, done: Callable[[], bool]) -> None:
        limit = time.monotonic() + 30
        while not done():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < limit, "it has not begun"
            time.sleep(0.05)

    def group(self) -> dict[int, int]:
        """Those of its group that still run, and their parents."""
        found = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent, group = status.read_text("utf-8").rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == self.process.pid and state != "Z":
                found[int(status.parent.name)] = int(parent)
        return found

    def workers(self) -> list[int]:
        return [process for process, parent in self.group().items() if parent == self.process.pid]

    def compiling(self) -> int:
        """How many have loaded NVRTC."""
        return sum("libnvrtc.so" in Path(f"/proc/{worker}/maps").read_text("utf-8") for worker in self.workers())

    def end(self) -> str:
        """What it said, once it has ended and nothing of it is left."""
        try:
            said = self.process.communicate(timeout=20)[0]
            assert self.group() == {}
            return said
        finally:
            if self.group():
                os.killpg(self.process.pid, signal.SIGKILL)

    def left(self) -> set[str]:
        """Files that should not be there."""
        partial = {path.name for path in self.folder.rglob("*.part")}
        return partial | {path.name for path in self.temporary.iterdir()} | ({"output"} & {path.name for path in self.folder.iterdir()})


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@needs_linux
@pytest.mark.parametrize("to_all", [pytest.param(True, id="terminal"), pytest.param(False, id="kill", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("where", ENDLESS)
def test_an_interruption_leaves_nothing(src: Path, where: str, to_all: bool) -> None:
    """Ctrl-C in a terminal reaches the whole group."""
    running = Running(src, where)
    start = time.monotonic()
    (os.killpg if to_all else os.kill)(running.process.pid, signal.SIGINT)
    assert running.end().endswith("\ninterrupted\n")
    assert running.process.returncode == 130
    assert time.monotonic() - start < 10
    assert running.left() == set()


@needs_linux
@pytest.mark.parametrize("where", ENDLESS)
def test_a_killed_worker_is_told(src: Path, where: str) -> None:
    running = Running(src, where)
    killed = running.workers()[0]
    children = [process for process, parent in running.group().items() if parent == killed]
    os.kill(killed, signal.SIGKILL)
    for child in children:
        os.kill(child, signal.SIGKILL)  # what the kernel does when memory runs out, it does to one process; nothing else could end this one
    said = running.end()
    assert running.process.returncode == 1
    assert re.search(
        r"\nerror: a compiler's process was ended from outside \(.*first\.cu .*\); with less memory, CMAKE_BUILD_PARALLEL_LEVEL=1\n$", said
    )
    assert "Traceback" not in said
    assert len(running.left()) <= len(children), "the others cleaned up"


def test_the_stores_loss_of_an_entry_is_told(src: Path, tmp_path: Path) -> None:
    """Another process may prune what this one needs."""
    (source, _) = plan.sources(["90"], src)
    step = steps(source)[1]
    with pytest.raises(CiError, match=r"first\.cu sm_90a: the store .* has lost an entry while it was in use; build again"):
        perform(step, compilers.tools(), store.Store(tmp_path / "empty"))
