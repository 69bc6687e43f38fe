"""Which file or folder this package was installed from, so that the pip lines of fixes work without a package index."""

from __future__ import annotations

import json
from importlib import metadata
from urllib.parse import urlsplit

from .._common.errors import quote
from .._version import __version__

PACKAGE = "mlx-cuda"


def origin() -> str:
    """Return the wheel or checkout that pip installed (PEP 610), or an empty string if it came from a package index."""
    try:
        text = metadata.distribution(PACKAGE).read_text("direct_url.json")
        url = urlsplit(json.loads(text)["url"]) if text else None
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return ""
    if not url or url.scheme != "file":
        return ""
    from urllib.request import url2pathname  # slow to import

    return url2pathname(url.path)


def requirement(source: str, extra: str = "") -> str:
    """Return what pip installs this version from: ``source``, as :func:`origin` returns it, or the package index."""
    chosen = f"[{extra}]" if extra else ""
    return quote(f"{source}{chosen}" if source else f"{PACKAGE}{chosen}=={__version__}")


def reinstall(source: str) -> str:
    """Return the pip line that restores the files of this package."""
    return f"pip install --force-reinstall --no-deps {requirement(source)}"
