"""``python -m ci.device``: as ``python -m ci device``, for the CMake build, whose environment has few packages."""

from __future__ import annotations

import argparse
import sys

from ..errors import ending
from . import __doc__ as about
from . import add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.device", description=(about or "").replace("``", ""))
    add_arguments(parser)
    args = parser.parse_args()
    return ending(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
