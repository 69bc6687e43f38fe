"""``python -m ci.device``: as ``python -m ci device``, for the CMake build, whose environment has few packages."""

from __future__ import annotations

import argparse
import sys

from ..errors import ending
from . import DESCRIPTION, EPILOG, add_arguments


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.device", description=DESCRIPTION, epilog=EPILOG)
    add_arguments(parser)
    args = parser.parse_args()
    return ending(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
