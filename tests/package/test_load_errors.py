"""What helps against what the system's loader says."""

from __future__ import annotations

import pytest
from mlx_cuda._loader import load_errors
from mlx_cuda._loader.loaded import SEARCH

from .environments import healthy, with_slashes

OLD = "ImportError: {}: version `GLIBCXX_3.4.30' not found (required by /site-packages/mlx/lib/libmlx.so)"
ENV = healthy(search=("/opt/gcc-9/lib64", "/old"), conda="/opt/conda", shadows=("/old/libcudnn_graph.so.9",))
UPGRADE = "apt-get install --only-upgrade libstdc++6  (Fedora, RHEL: dnf upgrade libstdc++), or move /usr/lib/libstdc++.so.6 away"

FIXES = {
    "in LD_LIBRARY_PATH": (
        OLD.format("/opt/gcc-9/lib64/libstdc++.so.6"),
        f"take /opt/gcc-9/lib64 out of {SEARCH}: its libstdc++.so.6",
    ),
    "of conda": (OLD.format("/opt/conda/bin/../lib/libstdc++.so.6"), "conda install -c conda-forge 'libstdcxx>=12'"),
    "of the system": (OLD.format("/usr/lib/libstdc++.so.6"), UPGRADE),
    "an old libgomp": ("/usr/lib/libgomp.so.1: version `GOMP_5.0' not found", "apt-get install --only-upgrade libgomp1  (Fedora"),
    "an old library of others": ("/srv/libfoo.so.1: version `FOO_2' not found", "reinstall the package of /srv/libfoo.so.1"),
    "no libstdc++": (
        "libstdc++.so.6: cannot open shared object file: No such file or directory",
        "apt-get install libstdc++6  (Fedora, RHEL: dnf install libstdc++)",
    ),
    "no libgomp": ("libgomp.so.1: cannot open shared object file", "apt-get install libgomp1"),
    "another cuDNN's part": ("Could not load /old/libcudnn_graph.so.9: undefined symbol: x", f"take /old out of {SEARCH}"),
    "a crash beside another cuDNN": ("the process that ran one operation ended with -6: terminate", f"take /old out of {SEARCH}"),
    "the same on Windows": ("the process that ran one operation ended with 3221226505: Invalid handle", f"take /old out of {SEARCH}"),
    "an end that is no crash": ("the process that ran one operation ended with 1: ValueError", ""),
    "glibc": ("/lib/libc.so.6: version `GLIBC_2.38' not found", ""),
    "the driver": ("libcuda.so.1: cannot open shared object file", ""),
    "a wrong result": ("swiglu gave a wrong result on the GPU", ""),
}


@pytest.mark.parametrize(("text", "fix"), FIXES.values(), ids=FIXES)
def test_fixes(text: str, fix: str) -> None:
    found = with_slashes(load_errors.fix(text, ENV))
    assert found.startswith(fix)
    assert bool(found) is bool(fix)
