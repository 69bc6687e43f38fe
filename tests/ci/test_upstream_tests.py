"""``python -m tests.upstream``: real processes with small tests, and stubs for MLX and this package that differ where they are told."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from benchmarks.result_file import read, write
from ci import matrix
from ci.errors import CheckFailed, EnvironmentProblem
from tests.upstream import __main__ as cli
from tests.upstream import model, sources, verdict
from tests.upstream.running import Job, Machine, Outcome, Ran

from .index_support import server

CORE = """\
import types
random = types.SimpleNamespace(seed=lambda number: None)
fast = types.SimpleNamespace(scaled_dot_product_attention=len)
cuda = types.SimpleNamespace(is_available=lambda: GPU)
clear_streams = lambda: None
default_device = lambda: "a device"
patched = False
GPU = True
"""
OURS = """\
import mlx.core as mx
__version__ = "1"
def patch():
    mx.patched, mx.fast.scaled_dot_product_attention = True, max
"""
TESTS = """\
import os, random, signal, sys, time, unittest
import mlx.core as mx

class A(unittest.TestCase):
    def test_a_good(self):
        self.assertEqual(random.random(), random.Random(0).random())

    def test_b_skipped(self):
        self.skipTest("not here")

    @unittest.expectedFailure
    def test_c_expected(self):
        self.fail()

    def test_d_always_fails(self):
        self.fail("as ever")

    def test_e_mended(self):
        self.assertTrue(mx.patched)
"""
DIFFERENT = """
    def test_f_subtests(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertFalse(mx.patched and number == 1)

    def test_g_dies(self):
        if mx.patched:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_h_hangs(self):
        if mx.patched:
            time.sleep(60)

    def test_i_after_them(self):
        pass

    def test_j_is_skipped(self):
        if mx.patched:
            self.skipTest("with it")

class B(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if mx.patched:
            raise RuntimeError("no class")

    def test_one(self):
        pass
"""
FOUND = {
    "A.test_a_good": ("pass", "pass"), "A.test_b_skipped": ("skip", "skip"), "A.test_c_expected": ("xfail", "xfail"),
    "A.test_d_always_fails": ("fail", "fail"), "A.test_e_mended": ("fail", "pass"), "A.test_f_subtests": ("pass", "fail"),
    "A.test_g_dies": ("pass", "crash"), "A.test_h_hangs": ("pass", "timeout"), "A.test_i_after_them": ("pass", "pass"),
    "A.test_j_is_skipped": ("pass", "skip"), "B.test_one": ("pass", "error"),
}  # fmt: skip
DIFFER = [name for name, (without, with_) in FOUND.items() if without == "pass" and with_ != "pass"]


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tests, beside the stubs, which the processes find, and a table of known differences without rows."""
    for name, text in {"mlx/__init__.py": "", "mlx/core.py": CORE, "mlx_cuda.py": OURS}.items():
        sources.write(tmp_path / "site", {name: text.encode()})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (tmp_path / "differences.toml").touch()
    monkeypatch.setattr(verdict, "DIFFERENCES", tmp_path / "differences.toml")
    monkeypatch.setattr(model, "hub", lambda *_: {})
    return module(tmp_path / "tests", "mlx/test_small", TESTS)


def module(folder: Path, name: str, text: str) -> Path:
    sources.write(folder, {f"{name}.py": text.encode()})
    return folder


def run(tests: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    results = tests.parent / "results.jsonl"
    results.unlink(missing_ok=True)
    code = cli.main(["run", "--tests", str(tests), "--json", str(results), "--jobs", "2", *arguments])
    return code, read(results, "upstream") if results.exists() else {}


def lines(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of the tests that have one, by their names."""
    return {each["test"]: each for each in results["cases"] if "test" in each}


def number(results: dict[str, Any]) -> int:
    """Of tests, by what the modules count."""
    return sum(sum(each["with"].values()) for each in results["cases"] if "test" not in each)


def matches(results: dict[str, Any], found: dict[str, tuple[str, str]]) -> bool:
    """Whether the module has counted these outcomes, and each test has a line but what passes or is skipped on both sides."""
    (module,) = (each for each in results["cases"] if "test" not in each)
    counts = [Counter(both[side] for both in found.values()) for side in (0, 1)]
    told = {f"mlx/test_small.{name}": both for name, both in found.items() if both[0] != both[1] or both[0] == "fail"}
    said = {name: (each["without"][0], each["with"][0]) for name, each in lines(results).items()}
    return [module["without"], module["with"]] == counts and said == told


def test_nothing_differs(tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, results = run(tests)
    assert code == 0
    assert matches(results, {name: FOUND[name] for name in FOUND if name < "A.test_f"})
    out, err = capsys.readouterr()
    assert "| `mlx/test_small` | 2 passed, 2 failed, 1 skipped | 3 passed, 1 failed, 1 skipped |  |" in out
    assert "mended   mlx/test_small.A.test_e_mended: fail without patch(), passes with it" in out
    assert "[2/2] mlx/test_small" in err


@pytest.mark.nightly
def test_whatever_passes_without_and_not_with_it(tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module(tests, "mlx/test_small", TESTS + DIFFERENT)
    code, results = run(tests, "--timeout", "3")
    assert code == 1
    assert matches(results, FOUND)
    assert results["new"] == [f"mlx/test_small.{name}" for name in DIFFER]
    assert {len(lines(results)[name]["with"]) for name in results["new"]} == {1 + cli.REPETITIONS}
    out = capsys.readouterr().out
    assert "DIFFERS  mlx/test_small.A.test_f_subtests: fail with patch(), 3 of 3 times\n    (number=1): Traceback" in out
    assert "crash: SIGKILL" in out
    assert "timeout: nothing for 3 s" in out
    assert "in test_h_hangs" in out, "where it hangs"
    assert "RuntimeError: no class" in out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "name", "what"),
    [
        ("if mx.patched: import nothing_like_this", "unittest.loader._FailedTest.test_other", "error"),
        ("if mx.patched: os._exit(3)", "test_other (import)", "crash"),
        ("import atexit\nif mx.patched: atexit.register(os._exit, 4)", "test_other (exit)", "crash"),
    ],
)
def test_a_module_that_cannot_begin_or_end(tests: Path, text: str, name: str, what: str) -> None:
    code, results = run(module(tests, "mlx-lm/test_other", f"{TESTS}\n{text}\n"))
    assert code == 1
    assert lines(results)[f"mlx-lm/{name}"]["with"][0] == what
    assert f"mlx-lm/{name}" in results["new"] or "mlx-lm/test_other.A.test_a_good" in results["new"]


@pytest.mark.nightly
def test_in_parts_the_same_comes_out(tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module(tests, "mlx/test_small", TESTS + DIFFERENT.replace("time.sleep(60)", "self.fail()"))
    code, results = run(tests, "--split", "3")
    assert code == 1
    assert matches(results, FOUND | {"A.test_h_hangs": ("pass", "fail")})
    assert results["new"] == [f"mlx/test_small.{name}" for name in DIFFER]
    err = capsys.readouterr().err
    assert "[8/8] mlx/test_small" in err
    assert "mlx/test_small 4/4 with patch()" in err
    module(tests, "mlx/test_small", f"{TESTS}\nimport atexit\nif mx.patched: atexit.register(os._exit, 4)\n")
    assert run(tests, "--split", "3")[1]["new"] == ["mlx/test_small 1/2 (exit)", "mlx/test_small 2/2 (exit)"]


def test_a_module_is_compared_before_the_next_begins(tmp_path: Path) -> None:
    """The largest one first, so that what a deadline leaves is whole."""
    for name, count in {"mlx/test_few": 1, "mlx/test_many": 3}.items():
        module(tmp_path, name, "class Test:\n" + "    def test_a(self): ...\n" * count)
    jobs = [Job("mlx", name, patched=False) for name in ("test_few", "test_many")]
    planned = cli.planned(Machine(tmp_path, 1.0, 1), jobs, 2)
    assert [(job.module, job.patched, job.part) for job in planned] == [
        *(("test_many", side, (part, 2)) for side in (False, True) for part in range(2)),
        *(("test_few", side, (0, 1)) for side in (False, True)),
    ]


@pytest.mark.nightly
def test_what_was_compiled_is_handed_on(tests: Path) -> None:
    compiling = """
    def test_l(self):
        from pathlib import Path
        import tempfile
        file = Path(tempfile.gettempdir(), "mlx", "1", "kernel.ptx")
        self.assertEqual(file.exists(), mx.patched)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("compiled")
"""
    assert "mlx/test_small.A.test_l" not in lines(run(module(tests, "mlx/test_small", TESTS + compiling), "--jobs", "1")[1])


@pytest.mark.nightly
def test_what_fails_now_and_then_without_it_too_is_said_and_no_more(tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counting = """
    def test_k(self):
        with open({path!r}, "a+") as file:
            file.write("x")
            file.seek(0)
            self.assertFalse(mx.patched or len(file.read()) > 2)
"""
    module(tests, "mlx/test_small", TESTS + counting.format(path=str(tests / "count")))
    code, results = run(tests)
    assert code == 0
    assert not [test for test in verdict.tests_with_lines(results) if test.name == "mlx/test_small.A.test_k" and test.differs]
    assert "unsteady mlx/test_small.A.test_k: fails now and then without patch() too" in capsys.readouterr().out


@pytest.mark.nightly
def test_known_differences(tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tests.parent / "differences.toml"
    row = '[[difference]]\ntest = "mlx/test_small.A.{}"\nreason = "{}"\n'
    module(tests, "mlx/test_small", TESTS + DIFFERENT)
    table.write_text(row.format("test_f_subtests", "one"), "utf-8")
    assert run(tests, "-k", "test_f")[0] == 0
    assert "known    mlx/test_small.A.test_f_subtests" in capsys.readouterr().out
    assert run(tests, "-k", "test_a")[0] == 0, "a row of a test that was not to run"
    table.write_text(row.format("test_a_good", "it did"), "utf-8")
    assert run(tests, "-k", "test_a")[0] == 1
    assert "STALE    mlx/test_small.A.test_a_good: does not differ any more (it did)" in capsys.readouterr().out
    for text in (row.format("test_a", " "), row.format("test_a", "one") * 2):
        table.write_text(text, "utf-8")
        with pytest.raises(CheckFailed, match="each difference stands there once, with its reason"):
            verdict.known()


def test_a_row_without_a_test_is_stale_where_all_of_them_ran() -> None:
    rows = [verdict.Known("mlx/test_gone.A.test_it", "it was")]
    assert verdict.judge({}, rows).stale == rows
    assert verdict.judge({}, rows, whole=False).stale == []
    assert verdict.judge({}, [], ["mlx/test_slow"]).unfinished == ["mlx/test_slow"]


@pytest.mark.nightly
@pytest.mark.parametrize(("chosen", "count"), [(["mlx"], 5), (["test_sm*"], 5), (["mlx/test_small"], 5), (["mlx-lm"], 5), ([], 10)])
def test_a_part(tests: Path, chosen: list[str], count: int) -> None:
    module(tests, "mlx-lm/test_other", TESTS)
    assert number(run(tests, *chosen)[1]) == count


@pytest.mark.nightly
def test_the_time_is_over(tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module(tests, "mlx/test_small", f"{TESTS}\n    def test_z(self):\n        time.sleep(60)\n")
    code, results = run(tests, "--deadline", "2")
    assert (code, results["new"], results["unfinished"]) == (1, [], ["mlx/test_small"])
    assert "NOT RUN  mlx/test_small: the time was over" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_deadline_hides_no_difference(tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module(tests, "mlx/test_small", f"{TESTS}{DIFFERENT}\n    def test_z(self):\n        time.sleep(0 if not mx.patched else 60)\n")
    code, results = run(tests, "--deadline", "4")
    assert (code, results["unfinished"]) == (1, ["mlx/test_small"])
    assert "mlx/test_small.A.test_f_subtests" in results["new"]
    assert "mlx/test_small.A.test_z" not in results["new"]
    out = capsys.readouterr().out
    assert "DIFFERS  mlx/test_small.A.test_f_subtests" in out
    assert str(tests) not in "".join(case.get("detail", "") for case in results["cases"])


@pytest.mark.nightly
def test_a_later_run_goes_on_where_time_was_over(tests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = tmp_path / "earlier.jsonl"
    module(tests, "mlx/test_other", TESTS)
    _, results = run(tests)
    cut = results | {"unfinished": ["mlx/test_small"]}
    assert "`mlx/test_small`" not in verdict.table(cut)  # not compared
    write(earlier, cut)
    capsys.readouterr()
    code, results = run(tests, "--keep", str(earlier))
    assert (code, results["unfinished"], number(results)) == (0, [], 10)
    out, err = capsys.readouterr()
    assert "`mlx/test_small`" in out
    assert "`mlx/test_other`" in out
    assert "test_other" not in err  # which did not run again
    write(earlier, results | {"facts": {**results["facts"], "mlx": "0"}})
    assert run(tests, "--keep", str(earlier), "mlx/test_small")[0] == 2
    assert "the earlier results are of other facts" in capsys.readouterr().err
    write(earlier, results | {"new": ["mlx/test_small.A.test_e_mended"]})
    assert run(tests, "--keep", str(earlier))[0] == 0
    assert "[2/2] mlx/test_small" in capsys.readouterr().err  # what differed runs again
    earlier.write_text("{\n", "utf-8")
    assert run(tests, "--keep", str(earlier))[0] == 2
    assert f"error: {earlier} is no file of results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("core", "arguments", "said"),
    [
        ("GPU = False", [], "patch() replaces nothing here, on a device: both sides are the same\n  fix: a GPU"),
        ("import nothing_like_this", [], "mlx and mlx_cuda cannot be imported (above)"),
        ("", ["nothing"], "has no module nothing\n  fix: give names such as mlx or mlx/test_fast"),
    ],
)
def test_where_it_makes_no_sense(tests: Path, capsys: pytest.CaptureFixture[str], core: str, arguments: list[str], said: str) -> None:
    sources.write(tests.parent / "site", {"mlx/core.py": f"{CORE}{core}\n".encode()})
    assert run(tests, *arguments)[0] == 2
    assert said in capsys.readouterr().err
    if core.startswith("GPU"):
        assert run(tests, "--same")[0] == 0


def test_a_crash_at_the_end_counts_where_it_comes_each_time() -> None:
    def ran(patched: bool, again: int, *, crashed: bool) -> Ran:
        return Ran(Job("mlx", "test_a", patched, again=again), {"test_a (exit)": Outcome("crash")} if crashed else {})

    for crashes, differs in (((1, 1, 1), True), ((1, 0, 1), False)):
        found = [ran(False, number, crashed=False) for number in range(3)]
        found += [ran(True, number, crashed=bool(crash)) for number, crash in enumerate(crashes)]
        (test,) = verdict.tests_of(found).values()
        assert (len(test.without), len(test.with_), test.differs) == (3, 3, differs)


def test_the_table_goes_into_a_document(tests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "document.md"
    document.write_text("a\n<!-- results: upstream-tests -->\nold\n<!-- end of results -->\nb\n", "utf-8")
    assert run(tests, "--update", str(document))[0] == 0
    text = document.read_text("utf-8")
    assert "| mlx, all | 2 passed" in text
    assert "old" not in text
    assert cli.main(["table", str(tmp_path / "results.jsonl"), "--update", str(document)]) == 0
    assert document.read_text("utf-8") == text
    document.write_text("nothing", "utf-8")
    assert cli.main(["table", str(tmp_path / "results.jsonl"), "--update", str(document)]) == 1
    assert "has no place for the table" in capsys.readouterr().err


def test_the_table_of_the_document_is_of_the_committed_results() -> None:
    text = (matrix.REPOSITORY / "docs" / "results" / "upstream-tests.md").read_text("utf-8")
    (path,) = (matrix.REPOSITORY / "benchmarks" / "results" / "upstream").iterdir()
    assert verdict.updated(text, read(path, "upstream")) == text, (
        "run: python -m tests.upstream table … --update docs/results/upstream-tests.md"
    )


# --------------------------------------------------------------------------------------------------------------- sources


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *settings, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As MLX's: two commits, of which the first has an annotated tag and is on no branch's end."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for text in ("one", "two"):
        sources.write(folder, {"python/tests/test_a.py": text.encode(), "python/tests/more/b.txt": b"b", "python/c.py": b"c"})
        git(folder, "add", "-A")
        git(folder, "commit", "--quiet", "-m", text)
    git(folder, "tag", "-a", "-m", "it", "v1.2.3", "HEAD~1")
    return folder


def test_mlx_by_its_commit(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD~1")
    files = sources.mlx(str(repository), commit)
    assert files == {"test_a.py": b"one", "more/b.txt": b"b"}
    assert sources.mlx(str(repository), commit, sources.digest(files)) == files
    with pytest.raises(CheckFailed, match=f"have the SHA-256 {sources.digest(files)}, expected 00"):
        sources.mlx(str(repository), commit, "00")
    with pytest.raises(EnvironmentProblem, match="fix: check the network"):
        sources.mlx(str(repository), "0" * 40)


def test_the_pin_of_a_release(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "pins.toml").write_text(sources.pin("1.2.3", {"repository": str(repository)}), "utf-8")
    commit = git(repository, "rev-parse", "HEAD~1")
    digest = sources.digest({"test_a.py": b"one", "more/b.txt": b"b"})
    assert sources.pins(tmp_path / "pins.toml") == {"repository": str(repository), "tag": "v1.2.3", "commit": commit, "sha256": digest}
    with pytest.raises(EnvironmentProblem, match=r"has no tag v1\.2\.4"):
        sources.pin("1.2.4", {"repository": str(repository)})


def test_a_digest_is_of_names_and_bytes() -> None:
    files = [{"a": b"1", "b": b"2"}, {"a": b"2", "b": b"1"}, {"a": b"1"}, {"a": b"12"}]
    assert len({sources.digest(each) for each in files}) == len(files)
    assert sources.digest({"b": b"2", "a": b"1"}) == sources.digest(files[0])


def sdist(name: str, files: dict[str, bytes]) -> bytes:
    made = BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(data)
            tar.addfile(member, BytesIO(data))
    return made.getvalue()


def test_mlx_lm_by_the_hash_of_its_sdist(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    data = sdist("mlx_lm-0.9.1", {"tests/test_b.py": b"b", "tests/../../out.py": b"x", "mlx_lm/tests/c.py": b"c", "PKG-INFO": b""})
    folder, lock, filled = tmp_path / "index", tmp_path / "lock.txt", tmp_path / "filled"
    sources.write(folder, {"mlx_lm-0.9.1.tar.gz": data, "mlx_lm-0.9.2.tar.gz": data})
    monkeypatch.setattr(sources, "LOCK", lock)
    hashes = f"    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{{}}\n"
    pinned = {"repository": str(repository), "commit": git(repository, "rev-parse", "HEAD")}
    pinned["sha256"] = sources.digest(sources.mlx(str(repository), pinned["commit"]))
    with server(folder) as url:
        monkeypatch.setenv("MLX_CUDA_INDEX_PYPI_UPLOAD", url)
        monkeypatch.setenv("MLX_CUDA_INDEX_PYPI_SIMPLE", f"{url}simple/")
        lock.write_text("mlx-lm==0.9.1 ; python_full_version >= '3.11' \\\n" + hashes.format(hashlib.sha256(data).hexdigest()), "utf-8")
        sources.fetch(filled, pinned)
        assert {path.relative_to(filled).as_posix(): path.read_bytes() for path in filled.rglob("*.py")} == {
            "mlx/test_a.py": b"two",
            "mlx-lm/test_b.py": b"b",
        }
        assert sources.fetched(filled) == {"mlx": pinned["commit"], "mlx-lm": "0.9.1"}
        with pytest.raises(EnvironmentProblem, match="is not empty"):
            sources.fetch(filled, pinned)
        lock.write_text("mlx-lm==0.9.1 \\\n" + hashes.format("1" * 64), "utf-8")
        with pytest.raises(CheckFailed, match=r"of mlx-lm 0\.9\.1 the index has no sdist with a hash of lock\.txt"):
            sources.mlx_lm()


def test_what_is_committed() -> None:
    pinned = sources.pins()
    assert [len(pinned[name]) for name in ("commit", "sha256")] == [40, 64]
    version, hashes = sources.locked(sources.LOCK.read_text("utf-8"))
    assert version[0].isdigit()
    assert len(hashes) == 2, "a wheel and an sdist"
    assert isinstance(verdict.known(), list)
    with pytest.raises(CheckFailed, match="does not lock mlx-lm"):
        sources.locked("mlx==1 \\\n")


def test_a_model_stands_for_all_that_the_tests_name(tmp_path: Path) -> None:
    sources.write(tmp_path, {"tests/test_a.py": b'load("mlx-community/One-4bit")\nX = "mlx-community/Two.5"\n', "own/config.json": b"{}"})
    variables = model.hub(tmp_path / "hub", tmp_path / "tests", tmp_path / "own")
    assert variables == {"HF_HUB_CACHE": str(tmp_path / "hub")}
    for name in ("models--mlx-community--One-4bit", "models--mlx-community--Two.5"):
        place = tmp_path / "hub" / name
        assert (place / "snapshots" / (place / "refs" / "main").read_text("utf-8") / "config.json").is_file()
