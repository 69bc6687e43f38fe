"""Provision the toolkits inside a cibuildwheel build: the ``before-all`` hook.

Arguments go on to ``python -m ci toolkit install``, whose exit code is this script's.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it is run as a script

from wheel_hooks import factory


def main(arguments: list[str]) -> int:
    return factory.main(["toolkit", "install", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
