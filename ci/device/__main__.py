"""``python -m ci.device``: as ``python -m ci device``, for the CMake build, whose environment has few packages."""

from __future__ import annotations

import argparse
import sys

from ..errors import CiError
from . import DESCRIPTION, EPILOG, add_arguments


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.device", description=DESCRIPTION, epilog=EPILOG)
    add_arguments(parser)
    args = parser.parse_args()
    try:
        return int(args.run(args))
    except CiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
