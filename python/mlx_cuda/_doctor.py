"""``python -m mlx_cuda doctor``: the checks as a checklist. It needs no driver, backend or MLX."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ._loader import checks
from ._loader.checks import Check
from ._loader.environment import Probe, take
from ._loader.loaded import Loaded
from ._loader.table import FRONTEND
from ._version import __version__

PROBE_SECONDS = 180  # the first use may compile and load kernels

# In a separate process: a wrong driver or library can crash it, and importing MLX allocates GPU memory.
_IMPORT = """\
import json
import mlx.core as mx
print(json.dumps({"details": "mlx.core is imported"}))
"""
_PROBE = """\
import json, os
import mlx.core as mx
from mlx_cuda._loader import loaded, native
from mlx_cuda._loader.environment import take
from mlx_cuda import swiglu
gpu = mx.default_stream(mx.gpu)
engine = native.engine(gpu)
if isinstance(engine, str):
    print(json.dumps({"error": engine}))
else:
    x = mx.arange(-8, 8, 0.125).astype(mx.float16)
    wide = x.astype(mx.float32)
    right = mx.allclose(swiglu(x, x, stream=gpu).astype(mx.float32), wide * mx.sigmoid(wide) * wide, rtol=1e-2, atol=1e-3).item()
    versions = engine.module.library_versions() | {"built with CUDA": engine.module.build_info()["cuda"]}
    details = ", ".join(f"{name} {version}" for name, version in versions.items())
    roots = take(ask_driver=False).roots.values()
    error = "" if right else "swiglu gave a wrong result on the GPU"
    error = error or loaded.mixed_cudnn(loaded.libraries(roots, os.environ))  # which loads more of cuDNN
    libraries = loaded.libraries(roots, os.environ)
    answer = {"details": details, "error": error, "capture": engine.module.capture_refusal(gpu), "libraries": libraries}
    print(json.dumps(answer))
"""
# Interpreter options that change which modules a process finds.
_OPTIONS = {"isolated": "-I", "no_site": "-S", "ignore_environment": "-E", "no_user_site": "-s", "safe_path": "-P"}


def interpreter_options() -> list[str]:
    """Return those of this process, so that a child process finds the same modules."""
    return [option for name, option in _OPTIONS.items() if getattr(sys.flags, name, False)]


def probe(*, on_cuda: bool = True) -> Probe:
    """Load the native module and run one operation, or import MLX only, in a separate process."""
    command = [sys.executable, *interpreter_options(), "-W", "ignore", "-c", _PROBE if on_cuda else _IMPORT]
    try:
        # Libraries write to stderr too, in whatever encoding.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Probe(error=f"loading the native module and running one operation took more than {PROBE_SECONDS} s")
    return read_probe(done.returncode, done.stdout, done.stderr)


def read_probe(returncode: int, stdout: str, stderr: str) -> Probe:
    """Return the result of the probe process."""
    if returncode == 0 and stdout.strip():
        answer = json.loads(stdout.strip().splitlines()[-1])
        return Probe(**answer | {"libraries": tuple(Loaded(*each) for each in answer.get("libraries", ()))})
    last = (stderr.strip().splitlines() or ["without a message"])[-1]
    return Probe(error=f"the process that ran one operation ended with {returncode}: {last}")


def examine() -> list[Check]:
    """Run every check. The native module is loaded only if no other check failed."""
    env = take(ask_driver=True)
    if FRONTEND in env.distributions and checks.first_failure(env) is None:
        env = replace(env, probe=probe(on_cuda=env.cuda is not None))
    return checks.run(env)


def render(found: Sequence[Check]) -> str:
    """Return the checklist as text."""
    width = max(len(check.name) for check in found)
    lines = [f"mlx-cuda {__version__}"]
    for check in found:
        lines.append(f"[{check.status:^4}] {check.name:<{width}}  {check.summary}")
        if check.fix and check.status in ("fail", "warn"):
            lines.append(f"{'fix:':>{width + 7}}  {check.fix}")
    failed = sum(check.status == "fail" for check in found)
    lines.append(f"{failed} of {len(found)} checks failed; the first often causes the others" if failed else "no check failed")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Print the checklist as text or JSON; return 1 if a check failed."""
    found = examine()
    ok = all(check.status != "fail" for check in found)
    report = {
        "mlx_cuda": __version__,
        "ok": ok,
        "checks": [asdict(check) | {"cure": check.fix} for check in found],
    }  # until 0.33
    print(json.dumps(report, indent=2) if args.json else render(found))
    return int(not ok)


def add_to(subparsers: Any) -> None:
    """Add the command to the package's command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this installation",
        description="Check the interpreter, MLX, its backend, the libraries, the driver and the GPU. Print a fix for each problem.",
        epilog="Exit codes: 0 no check failed, 1 a check failed, 2 usage error.",
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.set_defaults(run=run)
