"""``python -m mlx_cuda run``: any program with ``patch()`` on."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("as_module", [False, True])
def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_module: bool) -> None:
    script = tmp_path / "program_that_is_run.py"
    script.write_text("import sys, mlx.core as mx\nprint(__name__, mx.gather_mm.__module__, sys.argv[1:])\nsys.exit(3)\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = mx.gather_mm
    try:
        with pytest.raises(SystemExit) as ended:
            main(["run", *(["-m", script.stem] if as_module else [str(script)]), "--model", "x"])
        assert mx.gather_mm is not own
    finally:
        mlx_cuda.unpatch()
    assert ended.value.code == 3
    assert capsys.readouterr().out.startswith("__main__ ")


def test_bits_hold_for_a_program_that_patches_itself(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import mlx_cuda\nmlx_cuda.patch()\nprint(mlx_cuda._decoding.pages.settings.packing)\n", "utf-8")
    command = [sys.executable, "-m", "mlx_cuda", "run", "--kv-bits", "8", str(script)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "Packing(group_size=64, bits=8)"


@pytest.mark.parametrize(("words", "message"), [([], "name a module"), (["nowhere.py"], "there is no script nowhere.py")])
def test_run_without_a_program(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
