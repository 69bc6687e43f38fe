"""The picture of one token: every kernel where it runs, a layer of MLX's, and the builds by their commits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import timeline
from benchmarks.__main__ import RESULTS, main
from benchmarks.result_file import read, write

MLX = {"sdpa_vector": [[at, 1000] for at in (0, 10000, 20000, 30000)], "qmv": [[at + 2000, 6000] for at in (0, 10000, 20000, 30000)]}
OURS = {"persistent_bfloat16": [[1000, 19000]], "step_begin": [[0, 500]]}


def test_each_build_has_a_lane_below_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    earlier, now, picture = (tmp_path / name for name in ("earlier.jsonl", "now.jsonl", "one.svg"))
    monkeypatch.setattr(timeline, "import_torch", lambda *_, **__: "torch")
    monkeypatch.setattr(timeline, "collect", lambda *_, **known: {"device": "NVIDIA H200", "commit": known["commit_name"]})
    monkeypatch.setattr(timeline, "measure", lambda _: {"upstream": MLX, "patched": OURS})
    assert timeline.main(["--sides", "patched", "--commit", "abcdef0123", "-o", str(earlier)]) == 0
    assert timeline.main(["--commit", "0123abcdef", "-o", str(now)]) == 0
    assert "mlx-cuda (0123abc): 2 kernels in 20 us, at least one of them running for 20 us" in capsys.readouterr().err  # 19.5
    assert main(["timeline", str(earlier), str(now), "-o", str(picture)]) == 0
    text = picture.read_text("utf-8")
    assert re.findall(r">([^<]+)(?:: \d+ kernels)[^<]*<", text) == ["MLX", "mlx-cuda (abcdef0)", "mlx-cuda (0123abc)"]
    scale = timeline.LENGTH / 38  # pixels a us, until the last kernel of MLX ends
    persistent = re.findall(rf'fill="{next(iter(timeline.COLOURS.values()))}" d="M([\d.]+) \S+?h([\d.]+)v', text)
    assert persistent == [(f"{10 + scale:.2f}", f"{19 * scale:.2f}"), (f"{10:.2f}", f"{timeline.LENGTH:.2f}")] * 2
    write(now, {**read(now), "provenance": {"device": "NVIDIA H100", "commit": "0123abcdef"}})
    assert main(["timeline", str(earlier), str(now), "-o", str(picture)]) == 2
    assert "error: the results are of several GPUs" in capsys.readouterr().err


def test_the_picture_is_of_the_committed_results(tmp_path: Path) -> None:
    files = sorted((RESULTS / "timeline").glob("*.jsonl"))  # the file of the earlier build comes first
    picture = tmp_path / "one-token.svg"
    assert main(["timeline", *map(str, files), "-o", str(picture)]) == 0
    committed = RESULTS.parents[1] / "docs" / "img" / picture.name
    take = f"run: python -m benchmarks timeline benchmarks/results/timeline/* -o docs/img/{picture.name}"
    assert committed.read_text("utf-8") == picture.read_text("utf-8"), take


def test_a_layer_is_from_one_attention_to_the_next() -> None:
    def spans(kernels: dict[str, Any]) -> list[timeline.Span]:
        (found,) = timeline.lanes([{"provenance": {}, "cases": [{"side": "upstream", "kernels, ns": kernels}]}]).values()
        return found

    assert timeline.layer(spans(MLX)) == (10, 20)
    assert timeline.layer(spans(OURS)) == (1, 20)  # which has all layers in a kernel
