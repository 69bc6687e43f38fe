"""The software bill of materials of a wheel: CycloneDX, in ``.dist-info/sboms/`` (PEP 770). docs/factory/sbom.md says what is in it.

``python -m ci repair`` embeds it, the audit checks it. Its contents come from the wheel itself, from the locks, and from
``mlx_cuda/_build.json``, in which CMake tells what only the build knows; so any machine can write it, for a wheel of any platform.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckFailed, CiError
from ...matrix import Matrix


def embed(path: Path, *, epoch: int | None = None, matrix: Matrix | None = None) -> None:
    """Write the SBOM of a wheel into it, replacing an older one. `epoch` is its time: left out, the wheel's own."""
    from ...audit.sbom.document import render
    from ...wheelfile.wheel import read
    from .archive import insert, source_date_epoch

    wheel = read(path)
    wheel.readable()
    time = int(source_date_epoch(path)) if epoch is None else epoch
    try:
        data = render(wheel, epoch=time, matrix=matrix).encode()
    except CiError:
        raise
    except Exception as error:  # of METADATA, _build.json or the manifest, which are only read here
        raise CheckFailed(f"{path.name}: its contents do not make an SBOM: {type(error).__name__}: {error}") from error
    insert(path, wheel.sbom, data, dist_info=wheel.dist_info, epoch=time)
