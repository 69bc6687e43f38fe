"""GitHub's API, by ``gh``, its own command line: who is logged in, and which server sees a token, is its matter."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from . import process
from .errors import EnvironmentProblem

_FIXES = {  # by what gh says; where a person can do without it, `otherwise` is added
    "HTTP 401": ("gh auth login, or another GH_TOKEN", False),
    "HTTP 403": ("a token that may read Actions in this repository", True),
    "HTTP 404": ("check the id and the repository; for a private one the token needs access to it", False),
    "HTTP 410": ("run the workflow again: artifacts are kept 30 days", False),
    "gh auth login": ("gh auth login, set GH_TOKEN", True),
    "GH_TOKEN": ("set GH_TOKEN", True),
}


def api(host: str, path: str, *options: str, into: Path | None = None, what: str, otherwise: str = "") -> str:
    """Get a path of the API; into a file, if one is given. `what` is queried, and `otherwise` is what to do without gh."""
    more = f", {otherwise}" if otherwise else ""
    command = ["gh", "api", "--hostname", host, path, *options]
    if into is None:
        done = process.run(command, fix=f"https://cli.github.com{more}")
    else:
        with into.open("wb") as sink:
            done = process.run(command, fix=f"https://cli.github.com{more}", stdout=sink, stderr=subprocess.PIPE)
    if done.returncode:
        # Without the queries of addresses: those of a storage hold a signature, which is a credential.
        said = re.sub(r"\?[^\s\"']+", "?…", done.stderr.strip())
        known = ((fix, more if alone else "") for sign, (fix, alone) in _FIXES.items() if sign in said)
        raise EnvironmentProblem(f"{what}: {said}", fix="".join(next(known, ("check the network, and githubstatus.com", ""))))
    return done.stdout if into is None else ""
