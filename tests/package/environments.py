"""Made-up environments for the checks."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlx_cuda._loader.driver import Driver, Gpu
from mlx_cuda._loader.environment import Distribution, Environment, Probe
from mlx_cuda._loader.loaded import Loaded
from mlx_cuda._loader.table import load

TABLE = load()
ROOT = Path("/site-packages")
NO_CODE = Path("/another/site-packages/mlx_cuda")
DECLARED = {  # as ci/matrix/matrix.toml says: machine code and PTX of one source of each kind
    "decode": (("80", "90a", "100", "120"), ("80",)),
    "flash_sm90": (("90a",), ()),
    "fp8": (("89", "90a", "100", "120"), ("89",)),
    "grouped": (("80", "100", "120"), ("80",)),
    "swiglu": (("75", "80", "90a", "100", "120"), ("80",)),
    "chunk_gradients": (("90a", "100"), ("80",)),
}
H200 = Gpu("NVIDIA H200", (9, 0))
TAGS = ("py3-none-manylinux_2_35_x86_64",)
VERSIONS = {
    "mlx": TABLE.mlx,
    "nanobind-backend": "1.0.0",
    "mlx-cuda-12": TABLE.mlx,
    "nvidia-cublas-cu12": "12.9.3.13",
    "nvidia-cuda-runtime-cu12": "12.9.79",
    "nvidia-cudnn-cu12": "9.28.0.42",
    "mlx-cuda-13": TABLE.mlx,
    "nvidia-cublas": "13.10.0.20",
    "nvidia-cuda-runtime": "13.5.37",
    "nvidia-cudnn-cu13": "9.28.0.42",
    "mlx-cpu": TABLE.mlx,
    "mlx-lm": "0.32.2",
}

CUDNN = Loaded(f"{ROOT}/nvidia/cudnn/lib/libcudnn.so.9", "9.28.0")
RUN = Probe(details="right", libraries=(CUDNN, Loaded(f"{ROOT}/nvidia/cudnn/lib/libcudnn_graph.so.9")))


def distributions(*names: str, **changed: str) -> dict[str, Distribution]:
    """Installed packages at good versions; a keyword (underscores for dashes) gives another version."""
    versions = {name: VERSIONS[name] for name in names} | {name.replace("_", "-"): version for name, version in changed.items()}
    return {name: Distribution(version, ROOT, TAGS if name.startswith("mlx") else ()) for name, version in versions.items()}


def healthy(major: int = 13, **changed: Any) -> Environment:
    """A machine on which everything is right."""
    cuda = TABLE.cuda[major]
    env = Environment(
        table=TABLE,
        system="linux",
        python="3.12.1",
        glibc=(2, 39),
        package=ROOT / "mlx_cuda",
        modules=frozenset(("_cu12", "_cu13")),
        distributions=distributions("mlx", "nanobind-backend", "mlx-lm", *cuda.requires),
        libraries={library.name: f"{ROOT}/{library.files['linux']}" for library in cuda.needed},
        driver=Driver(cuda=(13, 0), gpus=(H200,)),
        measured="measured on NVIDIA H200",
    )
    return replace(env, **changed)


def with_slashes(text: str) -> str:
    """Paths as they are written here, on Windows too."""
    return text.replace("\\", "/")


def write_device_code(package: Path) -> str:
    """Put made-up device code into a package; returns its digest."""
    folder = package / "device"
    folder.mkdir(parents=True, exist_ok=True)
    fatbins = {}
    for name, (sass, ptx) in DECLARED.items():
        (folder / f"{name}.fatbin.lzma").write_bytes(name.encode())
        fatbins[name] = {"sha256": hashlib.sha256(name.encode()).hexdigest(), "size": len(name), "sass": sass, "ptx": ptx}
    text = json.dumps({"fatbins": fatbins, "inputs": "", "packages": []}).encode()
    (folder / "manifest.json").write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> Any:
    """A module of mlx-lm's, as far as it matters: with these functions."""
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module
