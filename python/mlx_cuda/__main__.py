"""``python -m mlx_cuda``."""

from __future__ import annotations

import sys

from ._doctor import make_parser


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = make_parser().parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
