"""Which of the caller's environment variables reach whom: the installers, which run no code of a wheel, and the wheel's code.

Both get what is allowed by name, so everything else stays out. The wheel's code gets no address of an index or a proxy, which may
hold a password, and a home folder of its own. One account allows no more: a process of the caller can read the caller's files and, on
Linux, in ``/proc`` the environment that each of the caller's processes was started with, this command's and its shell's too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

# The system, its language, its terminal, where programs and libraries are found.
_MACHINE = (
    *("PATH", "LD_LIBRARY_PATH", "TMPDIR", "TEMP", "TMP", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("TERM", "COLORTERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR"),
    *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "OS", "NUMBER_OF_PROCESSORS", "PROCESSOR_*"),
    *("PROGRAMDATA", "PROGRAMFILES*", "PROGRAMW6432", "COMMONPROGRAMFILES*", "ALLUSERSPROFILE"),
)
# Caches, settings and accounts of the user; indexes and the way to them.
_INSTALLERS = (
    *("HOME", "XDG_*_HOME", "USERPROFILE", "HOMEDRIVE", "HOMEPATH", "APPDATA", "LOCALAPPDATA"),
    *("UV_*", "PIP_*", "NETRC", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
)
_CODE = ("CUDA_*", "NVIDIA_*", "MLX_*", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# They never pass: UV_PYTHON lets another interpreter in, the others are for those who publish, or hold a secret by their name.
_NEVER = re.compile(
    r"UV_PYTHON|(UV_PUBLISH|MLX_CUDA_INDEX)_.*|.*(TOKEN|PASS|PASSWORD|PASSWD|PASSPHRASE|SECRET|KEY|CREDENTIAL|AUTH|COOKIE)S?(_.*)?"
)
_OURS = {"PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1"}


def for_installers() -> dict[str, str]:
    return _allowed((*_MACHINE, *_INSTALLERS)) | _OURS


def for_code(home: Path) -> dict[str, str]:
    """With ``home`` instead of the caller's, for every system's idea of it."""
    own = dict.fromkeys(("HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA"), str(home))
    return _allowed((*_MACHINE, *_CODE)) | own | _OURS


def _allowed(patterns: Iterable[str]) -> dict[str, str]:
    names = {name: name.upper() for name in os.environ}  # proxies are written in lower case too
    return {
        name: os.environ[name]
        for name, upper in names.items()
        if any(fnmatchcase(upper, pattern) for pattern in patterns) and not _NEVER.fullmatch(upper)
    }
