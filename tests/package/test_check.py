"""``python -m mlx_cuda check``: what counts as rounding and what as wrong, what it prints, and its errors."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import mlx_cuda
import pytest
from mlx_cuda.__main__ import main
from mlx_cuda._check import check as checking
from mlx_cuda._check import judge, processes, show
from mlx_cuda._check.forms import ModelCheck, Passage, Row, Side, Task
from mlx_cuda._check.plan import FULL, PROMPTS, QUICK, plan_for, text

POSITIONS, LEADING = 400, 8
chance = random.Random(3)  # noqa: S311
RIGHT = [sorted((chance.gauss(0, 2) for _ in range(LEADING)), reverse=True) for _ in range(POSITIONS)]
NLL = [chance.expovariate(0.4) for _ in range(POSITIONS)]


def passage(error: float, *, shift: float = 0.0, seed: int = 1) -> Passage:
    """Logits with errors of this size, and log-likelihoods that are off by as much, and by a shift."""
    noise = random.Random(seed)  # noqa: S311
    return {
        "nll": [each + noise.gauss(0, error) + shift for each in NLL],
        "ids": [list(range(LEADING))] * POSITIONS,
        "values": [[each + noise.gauss(0, error) for each in row] for row in RIGHT],
    }


FLOAT32, THEIRS = passage(0.0), passage(0.05, seed=2)


@pytest.mark.parametrize(("ours", "status"), [
    (THEIRS, "ok"),
    (passage(0.05), "ok"),
    (passage(0.05, shift=0.002), "ok"),
    (passage(0.05, shift=0.03), "fail"),
    (passage(0.05, shift=-0.03), "fail"),  # as where a token sees those after it
    (FLOAT32, "ok"),
    ({**THEIRS, "nll": [float("nan"), *THEIRS["nll"][1:]]}, "fail"),
    ({**THEIRS, "values": [[float("inf")] * LEADING, *THEIRS["values"][1:]]}, "fail"),
])  # fmt: skip
@pytest.mark.parametrize("float32", [FLOAT32, None])
def test_perplexity(ours: Passage, status: str, float32: Passage | None) -> None:
    row = judge.judge_perplexity("perplexity", THEIRS, ours, float32)
    assert row.status == status
    assert ("WRONG" in row.note) is (status == "fail")


def test_the_side_that_is_nearer_to_float32_is_not_wrong() -> None:
    off = passage(0.05, shift=0.2)
    assert judge.judge_perplexity("perplexity", off, THEIRS, FLOAT32).status == "ok"
    assert judge.judge_perplexity("perplexity", off, THEIRS, None).status == "fail"  # nobody says which


def test_what_mlx_itself_cannot_compute_is_not_judged() -> None:
    broken: Passage = {**THEIRS, "nll": [float("nan")] * POSITIONS}
    assert judge.judge_perplexity("perplexity", broken, THEIRS, FLOAT32).status == "skip"


@pytest.mark.parametrize(("error", "status"), [(0.0, "ok"), (0.05, "ok"), (0.053, "ok"), (0.065, "warn"), (0.1, "fail")])
def test_errors_of_logits(error: float, status: str) -> None:
    row = judge.judge_errors("errors", THEIRS, passage(error), FLOAT32)
    assert row.status == status
    assert row.patched == pytest.approx(error * (7 / 8) ** 0.5, rel=0.1)


def test_a_few_wrong_positions_are_wrong() -> None:
    """However much they differ from each other."""
    broken: Passage = {**THEIRS, "values": [*THEIRS["values"][:-2], *(row[::-1] for row in RIGHT[-2:])]}
    assert judge.judge_errors("errors", THEIRS, broken, FLOAT32).status == "fail"
    surprised: Passage = {**THEIRS, "nll": [*THEIRS["nll"][:-2], 12.0, 12.0]}
    assert judge.judge_perplexity("perplexity", THEIRS, surprised, FLOAT32).status == "fail"


def test_an_error_that_all_logits_share_is_none() -> None:
    shifted: Passage = {**THEIRS, "values": [[each + 3 for each in row] for row in THEIRS["values"]]}
    row = judge.judge_errors("errors", THEIRS, shifted, FLOAT32)
    assert row.patched == pytest.approx(row.upstream)
    assert judge.largest_error(shifted["values"], FLOAT32["values"]) == pytest.approx(judge.largest_error(THEIRS["values"], RIGHT))


def test_float32_s_own_rounding_is_no_error() -> None:
    assert judge.judge_errors("errors", FLOAT32, passage(1e-5), FLOAT32).status == "ok"


# ------------------------------------------------------------------------------------------------------------ greedy tokens

TOKENS = [5, 6, 7, 8]


def answers(*tokens: list[int]) -> list[Any]:
    return [{"prompt": [1], "tokens": each, "ids": [], "values": []} for each in tokens]


def judged(upstream: list[float], patched: list[float] | None) -> Any:
    return {"values": [], "upstream": upstream, "patched": patched}


NONE = judged([0.0] * 4, None)


@pytest.mark.parametrize(("below", "status", "words"), [
    ([0.0, 0.0, 0.02, 0.0], "ok", "tie: 1 of 2 answers differ, first at token 3, by 0.02 at most in float32, and rounding explains 0.1"),
    ([0.0, 0.0, 0.3, 0.0], "fail", "WRONG: token 3 of answer 2 is 0.3 below float32's best, and rounding explains 0.1; 1 of"),
    ([0.0, 0.0, 0.02, 4.0], "fail", "WRONG: token 4 of answer 2 is 4 below float32's best, "),  # after a tie
    ([0.0, 0.0, float("nan"), 0.0], "fail", "WRONG: token 3 "),
])  # fmt: skip
def test_a_tie_or_wrong(below: list[float], status: str, words: str) -> None:
    row = judge.judge_answers("tokens", answers(TOKENS, TOKENS), answers(TOKENS, [5, 6, 9, 9]), [NONE, judged([0.0] * 4, below)], 0.1)
    assert (row.status, row.upstream, row.patched) == (status, 8, 6)
    assert row.note.startswith(words)


def test_a_token_that_is_float32_s_own_is_right_however_far_away() -> None:
    """As where MLX's logits are wrong."""
    row = judge.judge_answers("tokens", answers(TOKENS), answers([9, 9, 9, 9]), [judged([3.0] * 4, [0.0] * 4)], 0.1)
    assert row.status == "ok"
    assert "by 3 at most in float32" in row.note


def test_equal_tokens_need_no_judge() -> None:
    row = judge.judge_answers("tokens", answers(TOKENS), answers(TOKENS), None, None)
    assert (row.status, row.note) == ("ok", "all equal")
    row = judge.judge_answers("tokens", answers(TOKENS), answers([5, 6, 7, 9]), None, None)
    assert (row.status, row.patched) == ("warn", 3)
    assert row.note == "not judged, because float32 could not be computed: 1 of 1 answers differ, first at token 4"


def test_ties_are_as_wide_as_the_errors_of_mlx() -> None:
    right = [[2.0, 1.0]]
    upstream: Any = {
        "passages": {"prompt": {"values": [[2.1, 0.9]]}, "cache": {"values": [[9.0, 1.0]]}},
        "answers": {"answers": [{"values": [[2.3, 1.0]]}, {"values": [[float("nan"), 1.0]]}]},
    }
    float32: Any = {"passages": {name: {"values": right} for name in ("prompt", "cache")}}
    assert judge.tie_of(upstream, float32) == pytest.approx(judge.TIE * 0.2)
    float32["judged"] = {"answers": [{"values": right}] * 2}
    assert judge.tie_of(upstream, float32) == pytest.approx(judge.TIE * 0.3)
    assert judge.tie_of(upstream, {}) is None


# ------------------------------------------------------------------------------------------------------------ the whole

SPEEDS = {"prompt": 900.0, "one request": 100.0, "at once": 400.0, "cache": 90.0}


def side(**changed: Any) -> Side:
    found: Any = {
        "about": {"mlx": "1", "device": "a GPU", "model type": "llama", "weights": "bfloat16"},
        "tokens": [1, 2], "prompts": [[1]] * 8, "passages": dict.fromkeys(("prompt", "steps", "cache"), THEIRS),
        "answers": {"answers": answers(TOKENS), "at once": answers(*[TOKENS] * 8)}, "speeds": SPEEDS,
        "memory": {"one request": 5 << 20, "at once": 9 << 20}, "errors": {}, "steps": [], "calls": [], "unused": "", "broken": False,
    }  # fmt: skip
    return {**found, **changed}  # type: ignore[typeddict-item]


REFERENCE: Any = {
    "passages": dict.fromkeys(("prompt", "steps", "cache"), FLOAT32),
    "judged": {"answers": [judged([0.0] * 4, None) | {"values": []}], "at once": [NONE] * 8},
    "errors": {},
}


def judge_all(patched: Side, float32: Any = REFERENCE, crashes: Any = None) -> ModelCheck:
    return judge.judge("a/model", side(), patched, float32, quick=False, seconds=1.0, crashes=crashes or {})


def statuses(found: ModelCheck) -> dict[str, str]:
    return {row.name: row.status for row in found.rows if row.status != "ok"}


def test_equal_sides() -> None:
    found = judge_all(side())
    assert found.ok
    assert statuses(found) == {}
    assert len(found.rows) == 14


@pytest.mark.parametrize(("changed", "expected", "ok"), [
    ({"unused": "MLX offers no CUDA GPU here"}, {"kernels": "skip"}, True),
    ({"unused": "libcudnn.so.9 is missing", "broken": True}, {"kernels": "fail"}, False),
    ({"errors": {"steps": "ValueError: x"}, "passages": {"prompt": THEIRS, "cache": THEIRS}}, {"perplexity, decode steps": "fail"}, False),
    ({"errors": {"at once": "ValueError: x"}}, {"greedy tokens, 8 requests at once": "fail", "decode, 8 requests at once": "fail"}, False),
    ({"errors": {"engines": "ValueError: x"}}, {"engines": "warn"}, True),
    ({"speeds": SPEEDS | {"one request": 80.0}}, {"decode": "warn"}, True),
    ({"speeds": SPEEDS | {"one request": 80.0}, "unused": "no GPU"}, {"kernels": "skip"}, True),
])  # fmt: skip
def test_what_is_not_as_it_should_be(changed: dict[str, Any], expected: dict[str, str], ok: bool) -> None:
    found = judge_all(side(**changed))
    assert statuses(found) == expected
    assert found.ok is ok


def test_what_fails_by_mlx_itself_is_no_fault() -> None:
    wrong = {"cache": "NotImplementedError: RotatingKVCache Quantization NYI"}
    wrong["cache speed"] = wrong["cache"]
    passages = dict.fromkeys(("prompt", "steps"), THEIRS)
    found = judge.judge("m", side(errors=wrong, passages=passages), side(errors=wrong, passages=passages), REFERENCE,
                        quick=True, seconds=1.0, crashes={})  # fmt: skip
    assert found.ok
    assert statuses(found) == {"perplexity, 8-bit KV cache": "skip", "decode, 8-bit KV cache": "skip"}


@pytest.mark.parametrize(("ours", "status"), [("RuntimeError: No kernel", "skip"), ("RuntimeError: another", "fail")])
def test_a_cache_that_mlx_judges_in_16_bits_may_fail_as_mlx_s_alone(ours: str, status: str) -> None:
    passages: Any = {"prompt": THEIRS, "steps": THEIRS}
    upstream = side(errors={"cache": "RuntimeError: No kernel"}, passages={**passages, "cache": THEIRS})
    found = judge.judge("m", upstream, side(errors={"cache": ours}, passages=passages), REFERENCE, quick=False, seconds=1.0, crashes={})
    assert statuses(found)["perplexity, 8-bit KV cache"] == status
    assert found.ok is (status == "skip")


def test_processes_that_crash() -> None:
    found = judge_all({}, {}, {"patched": "the process ended with -11: x", "float32": "the process ended with -9: y"})
    assert not found.ok
    assert statuses(found) == {"patch()": "fail", "float32": "warn"}
    found = judge_all(side(), {}, {"float32": "the process ended with -9: y"})
    assert found.ok
    assert statuses(found) == {"float32": "warn"}
    assert "WRONG" not in show.render(found)


def test_a_reference_that_is_not_finite_judges_nothing() -> None:
    broken: Passage = {**FLOAT32, "nll": [float("nan")] * POSITIONS}
    found = judge_all(side(), {**REFERENCE, "passages": dict.fromkeys(("prompt", "steps", "cache"), broken)})
    assert found.ok
    assert not [row for row in found.rows if row.float32 is not None]


# ------------------------------------------------------------------------------------------------------------ what is printed


def test_the_table() -> None:
    rows = [
        Row("perplexity", "ok", 16.1982, 16.1979, 16.2),
        Row("decode", "ok", 233.4, 635.1, unit="tokens/s"),
        Row("error of the logits", "fail", 0.0131, float("nan"), note="WRONG"),
        Row("greedy tokens", "ok", 512, 480, unit="tokens", note="tie"),
    ]
    assert show.table(rows) == [
        "                                 MLX  patch()         float32",
        "[ ok ] perplexity             16.198   16.198          16.200",
        "[ ok ] decode, tokens/s          233      635  2.72x",
        "[fail] error of the logits  1.31e-02      NaN                  WRONG",
        "[ ok ] greedy tokens             512      480                  tie",
    ]


def found(**changed: Any) -> ModelCheck:
    calls: Any = [{"function": "quantized_matmul", "engine": "small_m", "count": 3, "ours": True, "reason": "few rows"}]
    steps: Any = [{"where": "one request", "taken": 129, "replayed": 128, "reason": "182 nodes in one launch: 36 router"}]
    made = ModelCheck("a/model", True, False, 40.2, {"mlx": "0.32.4", "device": "H100"}, (Row("x", "ok", float("nan")),), calls, steps)
    return ModelCheck(**{**vars(made), **changed})


def test_the_text() -> None:
    shown = show.render(found())
    assert "  one request: 128 of 129; 182 nodes in one launch: 36 router\n" in shown
    assert "  3 quantized_matmul: small_m, few rows\n" in shown
    assert shown.endswith("\nresults agree (40 s)")
    unjudged = Row("x", "warn", note=f"{judge.NOT_JUDGED}: 1 of 4 answers differ")
    assert show.render(found(rows=(unjudged, Row("y", "ok")))).endswith("no result is wrong, 1 of 2 rows are not judged (40 s)")
    assert show.render(found(rows=(Row("x", "fail"), Row("y", "ok")))).endswith("1 of 2 rows are wrong (40 s)")


def test_json_has_no_nan() -> None:
    report = json.loads(show.as_json(found()))
    assert report["rows"][0]["upstream"] is None
    assert report["ok"] is True


@pytest.mark.parametrize(("ok", "options"), [(True, []), (False, ["--json"]), (False, ["--quick"])])
def test_the_command(ok: bool, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def check(model: str, *, quick: bool, progress: Any) -> ModelCheck:
        assert (model, quick) == ("a/model", "--quick" in options)
        progress(0.5, "half")
        return found(ok=ok)

    monkeypatch.setattr("mlx_cuda._check.command.check", check)
    assert main(["check", "a/model", *options]) == int(not ok)
    out, error = capsys.readouterr()
    assert error == " 50%  half\n"
    assert (json.loads(out)["ok"] is ok) if "--json" in options else out.startswith("a/model: ")


# ------------------------------------------------------------------------------------------------------------ errors


def test_without_mlx_lm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["check", "a/model"]) == 2
    assert capsys.readouterr().err == "mlx-lm is not installed.\n  fix: pip install mlx-lm\n"
    with pytest.raises(ImportError, match="pip install mlx-lm"):
        mlx_cuda.check("a/model")


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/models/x", "a/folder/that/is/not"])
def test_no_such_folder(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(processes, "require_mlx_lm", lambda: None)
    assert main(["check", name]) == 2
    assert capsys.readouterr().err.startswith(f"There is no folder {name}.\n  fix: give a folder with config.json")


def test_a_folder_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "require_mlx_lm", lambda: None)
    with pytest.raises(ValueError, match=r"has no config\.json\.\n  fix: give a folder"):
        mlx_cuda.check(tmp_path)


@pytest.mark.parametrize(("error", "fix"), [
    ("ValueError: Model type newest not supported.", "pip install -U mlx-lm"),
    ("RepositoryNotFoundError: 404 Client Error.", "check the name and the permission to download it, or give a folder"),
    ("LocalEntryNotFoundError: outgoing traffic has been disabled", "check the name"),
    ("RuntimeError: [malloc] Unable to allocate 9 bytes.", "end other programs on this GPU"),
    ("KeyError: 'rope'", "check whether this works: python -m mlx_lm generate --model a/model"),
])  # fmt: skip
def test_a_model_that_is_not_loaded(error: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(task: Task, begin: Any) -> Side:
        raise processes.CannotLoad(error)

    monkeypatch.setattr(processes, "require_mlx_lm", lambda: None)
    monkeypatch.setattr(processes, "run", run)
    with pytest.raises(ValueError, match=r"mlx-lm does not load a/model") as raised:
        mlx_cuda.check("a/model")
    assert f"{error}\n  fix: {fix}" in str(raised.value)


def use(monkeypatch: pytest.MonkeyPatch, **sides: Any) -> list[Task]:
    """Sides in the place of processes: what they find, or the error that they end with; the tasks that they are given."""
    tasks = []

    def run(task: Task, begin: Any) -> Side:
        tasks.append(task)
        for part in range(processes.PARTS[task["side"]]):
            begin(str(part))
        found = sides[task["side"]]
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(processes, "require_mlx_lm", lambda: None)
    monkeypatch.setattr(processes, "run", run)
    return tasks


def test_the_sides_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = side(), side()
    tasks = use(monkeypatch, upstream=theirs, patched=ours, float32=REFERENCE)
    shares: list[float] = []
    found = mlx_cuda.check("a/model", quick=True, progress=lambda share, _: shares.append(share))
    assert isinstance(found, mlx_cuda.ModelCheck)
    assert found.ok
    assert found.quick
    assert [task["side"] for task in tasks] == ["upstream", "patched", "float32"]
    assert tasks[2]["upstream"] is theirs
    assert tasks[2]["patched"] is ours
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("error", [processes.SideFailed("the process ended with -11: x"), processes.CannotLoad("memory")])
def test_a_crash_of_the_patched_side_is_a_finding(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, upstream=side(), patched=error, float32=REFERENCE)
    found = mlx_cuda.check("a/model")
    assert not found.ok
    assert str(error) in found.rows[0].note


@pytest.mark.parametrize("upstream", [processes.SideFailed("the process ended with 1: x"), side(errors={"prompt": "x"}, passages={})])
def test_a_model_that_mlx_itself_does_not_run(upstream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, upstream=upstream)
    assert main(["check", "a/model"]) == 2
    assert "The model does not run on MLX alone: " in capsys.readouterr().err


CHILDREN = {
    "says": "import json; print(json.dumps({'part': 'load'})); print(json.dumps({'found': {'tokens': [task['quick']]}}))",
    "does not load": "import json; print(json.dumps({'cannot_load': 'KeyError: x'}))",
    "raises": "raise ValueError('not this one')",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "ends": "",
}
ENDINGS = {
    "raises": "the process ended with 1: ValueError: not this one",
    "dies": "the process ended with -9 (probably out of memory): without a message",
    "ends": "the process ended with 0: without a message",
}
TASK: Task = {"side": "float32", "model": "m", "quick": True, "upstream": {}, "patched": {}}


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(processes, "CODE", f"import json, sys; task = json.load(sys.stdin)\n{code}")


def test_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, CHILDREN["says"])
    parts: list[str] = []
    assert processes.run(TASK, parts.append) == {"tokens": [True]}
    assert parts == ["load"]
    child(monkeypatch, CHILDREN["does not load"])
    with pytest.raises(processes.CannotLoad, match=r"^KeyError: x$"):
        processes.run(TASK, parts.append)


@pytest.mark.parametrize("name", [name for name in ENDINGS if name != "dies" or sys.platform != "win32"])
def test_a_process_that_ends_without_a_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, CHILDREN[name])
    with pytest.raises(processes.SideFailed) as raised:
        processes.run(TASK, lambda _: None)
    assert str(raised.value) == ENDINGS[name]


@pytest.mark.parametrize(("name", "tf32"), [("float32", "0"), ("upstream", "1"), ("patched", "1")])
def test_the_reference_alone_has_no_tf32(name: Any, tf32: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    child(monkeypatch, "import os; print(json.dumps({'found': {'unused': os.environ['MLX_ENABLE_TF32']}}))")
    assert processes.run({**TASK, "side": name}, lambda _: None)["unused"] == tf32


def test_an_interrupt_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "import time; print(json.dumps({'part': 'load'}), flush=True); time.sleep(600)")

    def begin(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.run(TASK, begin)


# ------------------------------------------------------------------------------------------------------------ the plan


def test_the_text_is_long_enough() -> None:
    words = text().split()
    assert 1500 <= len(words) <= 2500
    assert text().isascii()
    assert len(PROMPTS) == FULL.batch == QUICK.batch


@pytest.mark.parametrize("room", [64, 300, 2048, 1 << 17])
def test_a_plan_fits_a_model(room: int) -> None:
    class Model:
        class args:  # noqa: N801  (as mlx-lm's)
            max_position_embeddings = room

    for quick in (False, True):
        plan = plan_for(Model, quick=quick)
        assert plan.text < room
        assert plan.context + plan.steps < room
        assert plan.prompt + max(plan.answer, plan.timed) < room
    assert plan_for(Model, quick=False) == FULL or room < 4096
    assert plan_for(object(), quick=True) == QUICK


def test_the_function_and_its_module() -> None:
    assert mlx_cuda.check is checking.check
