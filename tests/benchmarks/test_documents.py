"""Documents: their examples run, and what programs fill them with is made of committed results, of rules and of parsers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import mlx_cuda
import pytest
from mlx_cuda._attention import rules
from mlx_cuda._common.choice import EngineName, MatmulEngine
from mlx_cuda._common.limits import HOPPERS, KINDS, PLAIN, as_json

from benchmarks import commands, table
from benchmarks.__main__ import main
from benchmarks.decoding import decoding_tables
from benchmarks.models import SHAPES
from benchmarks.parallel import parallel_tables
from benchmarks.record import Results
from benchmarks.result_file import read, write
from benchmarks.table import fill_blocks

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
DOCUMENT = DOCS / "reference/attention.md"

complete = pytest.mark.skipif(
    not hasattr(mlx_cuda, "attention_varlen") or "bool" not in get_args(rules.MaskKind),
    reason="this mlx_cuda is older than the document",
)


NEEDS_GPU = "# needs a GPU\n"


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


PAGES = [path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if examples(path)]


@complete
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_run(page: Path) -> None:
    """Each builds on those before it; what needs a GPU, a model or a network is compiled."""
    code = ["" if each.startswith(NEEDS_GPU) else each for each in examples(page)]
    for each in examples(page):
        compile(each, str(page), "exec")
    try:
        exec(compile("\n".join(code), str(page), "exec"), {})  # noqa: S102  (ours)
    finally:
        mlx_cuda.unpatch()


def committed(folder: str) -> list[str]:
    """All results of a folder."""
    return [str(path.relative_to(RESULTS)) for path in sorted((RESULTS / folder).glob("*.jsonl"))]


COMMANDS: tuple[tuple[str, ...], ...] = (  # documents, which block of theirs is filled by which command, and from what
    ("results/performance.md", "models", "models", "models/nvidia-h200-cu13.jsonl"),
    *(("internals/decoding.md", f"decoding_{Path(file).stem.split('-')[1].upper()}", "decoding", file) for file in committed("decoding")),
    ("guides/serving.md", "serving_H200", "serving", *committed("serving")),
    *(("results/models.md", "families_quiet" if "quiet" in file else "families_speed", "families", file) for file in committed("families")),
    ("guides/tensor-parallel.md", "parallel", "parallel", *committed("several-gpus")),
    ("results/platforms.md", "stages", "platforms"),
    ("results/gpus.md", "limits", "gpus"),
    ("guides/check.md", "check", "check", "check/nvidia-h100-cu13-smollm2-135m-4bit.txt"),
    ("guides/batch-invariance.md", "invariance", "invariance", "invariance/nvidia-h100-cu13.jsonl"),
    ("results/models.md", "decoding_H100", "decoding", "real/nvidia-h100-cu13-decoding.jsonl"),
    ("guides/linear-attention.md", "linear_attention", "table", "linear-attention/nvidia-h200-cu13.jsonl"),
    ("guides/linear-attention.md", "decoding_H100", "decoding", "linear-attention/models/nvidia-h100-cu13.jsonl"),
    ("guides/quantized-cache.md", "quantized_cache", "table", "quantized-cache/nvidia-h200-cu13.jsonl"),
    ("guides/quantized-cache.md", "decoding_H200", "decoding", "quantized-cache/models/nvidia-h200-cu13.jsonl"),
    ("guides/quantized-cache.md", "decoding_H100", "decoding", "quantized-cache/models/nvidia-h100-cu13.jsonl"),
)


@pytest.mark.parametrize(
    ("name", "block", "command", "files"),
    [*((*each[:3], each[3:]) for each in COMMANDS), pytest.param("reference/attention.md", "gallery", "gallery", (), marks=complete)],
)
def test_what_commands_put_into_documents_is_committed(
    name: str, block: str, command: str, files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, copy = (DOCS / name).read_text("utf-8"), tmp_path / Path(name).name
    copy.write_text(fill_blocks(text, {block: "old"}), "utf-8")
    assert copy.read_text("utf-8") != text
    lacking: set[str] = set()

    def fill(document: str, blocks: Mapping[str, str]) -> str:
        lacking.update(each for each in blocks if f"<!-- results: {each} -->" not in document)
        return fill_blocks(document, blocks)

    monkeypatch.setattr(table, "fill_blocks", fill)
    assert main([command, *(str(RESULTS / file) for file in files), "--update", str(copy)]) == 0
    assert copy.read_text("utf-8") == text, f"run: python -m benchmarks {command} … --update docs/{name}"
    assert command in ("table", "platforms") or all(each.startswith("profile_") for each in lacking), "the document has no place for them"


def test_results_of_several_gpus_alone_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", str(RESULTS / "several-gpus" / "nvidia-h100-cu13-2.jsonl")]) == 2
    assert "error: no results of one GPU for Qwen 3 32B, Qwen 3 32B, 4 bit\n  fix: " in capsys.readouterr().err


def test_a_model_that_one_gpu_did_not_run_says_so() -> None:
    one, two = (read(RESULTS / "several-gpus" / f"nvidia-h100-cu13-{count}.jsonl") for count in (1, 2))
    rows = parallel_tables([one, two])["parallel"].splitlines()[2:]
    missing = [row for row in rows if "one GPU was not measured" in row]
    assert len(rows) == 3
    assert [("4 bit" in row, "x)" in row) for row in missing] == [(True, False)]


def test_models_of_an_earlier_build_join_those_of_a_newer_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed = read(RESULTS / "decoding" / "nvidia-h200-cu13.jsonl")
    models = [{key: value for key, value in each.items() if key != "commit"} for each in committed["cases"]]  # as of one build
    path, earlier = tmp_path / "new.jsonl", tmp_path / "earlier.jsonl"
    own = {**committed["provenance"], "commit": "abcdef0123"}
    write(path, {**committed, "provenance": own, "cases": [models[2]]})
    write(earlier, {**committed, "cases": models[:4]})
    assert main(["join", str(path), str(earlier)]) == 0
    joined = read(path)
    assert [each["model"] for each in joined["cases"]] == [each["model"] for each in models[:4]]
    commit = committed["provenance"]["commit"]
    assert [each.get("commit") for each in joined["cases"]] == [commit, commit, None, commit]
    (table, *_) = decoding_tables(joined, SHAPES).values()
    assert table.partition("\n\n")[0].count(f"(`{commit[:7]}`)") == 3
    write(earlier, {**committed, "provenance": own, "cases": [models[4]]})  # another run of the same build
    assert main(["join", str(path), str(earlier)]) == 0
    joined = read(path)
    assert [each.get("commit") for each in joined["cases"] if each["model"] == models[4]["model"]] == [None]
    for change, reason in (({"device": "NVIDIA A100"}, "of another device: NVIDIA A100"), ({"commit": None}, "name no commit")):
        write(earlier, {**committed, "provenance": {**own, **change}})
        assert main(["join", str(path), str(earlier)]) == 2
        assert reason in capsys.readouterr().err
        assert read(path) == joined


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_no_committed_case_is_slower_than_mlx(gpu: str) -> None:
    """FP8, which MLX does not have, is compared with nothing, and no document counts it."""
    cases = Results.load(RESULTS / f"nvidia-{gpu}-cu13.jsonl").cases
    assert not [case.name for case in cases if case.behind()]
    comparable = len([case for case in cases if case.group != "fp8"])
    documents = [path.read_text("utf-8") for path in (ROOT / "README.md", *DOCS.rglob("*.md"))]
    counted = [int(count) for text in documents for count in re.findall(r"(?:Of|none of) (\d+)(?: benchmark)? cases", text)]
    assert comparable in counted
    assert len(cases) not in counted


def test_the_command_line_is_that_of_the_parsers() -> None:
    text = commands.DOCUMENT.read_text("utf-8")
    assert fill_blocks(text, dict.fromkeys(commands.blocks(), "old")) != text
    assert fill_blocks(text, commands.blocks()) == text, "run: python -m benchmarks.commands"


def rows(section: str, page: str = "reference/engines.md") -> list[list[str]]:
    """The rows of a section's table, without their header."""
    text = (DOCS / page).read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


def test_the_engines_are_those_of_the_code() -> None:
    engines = [name for group in get_args(EngineName) for name in (get_args(group) or [group])]
    listed = [name for name, *_ in rows("Engines")]
    assert (set(listed), len(listed)) == (set(engines), len(set(engines)))
    matmul = (DOCS / "reference" / "matmul.md").read_text("utf-8")
    for name in (*get_args(MatmulEngine), *("quantized_matmul", "gather_mm", "gather_qmm", "grouped_matmul", "fp8_matmul")):
        assert f"`{name}" in matmul


def test_the_thresholds_are_those_of_the_code() -> None:
    sides = [as_json(each) for each in (PLAIN, HOPPERS)]
    matmul = [next(iter(side["matmul"].values())) for side in sides]
    assert all([*side["matmul"].values()] == [first] * len(KINDS) for side, first in zip(sides, matmul, strict=True))
    groups = {"matmul": matmul, "attention": [side["attention"] for side in sides]}
    expected = [[f"{group}.{name}", *(str(side[name]) for side in both)] for group, both in groups.items() for name in both[0]]
    assert [row[:3] for row in rows("Dispatch thresholds")] == expected


@pytest.mark.parametrize(("name", "value"), [row[:2] for row in rows("Fixed limits")])
def test_the_fixed_limits_are_those_of_the_code(name: str, value: str) -> None:
    module, _, constant = name.rpartition(".")
    assert str(getattr(importlib.import_module(f"mlx_cuda.{module}"), constant)) == value
