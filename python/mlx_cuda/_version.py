"""The version: that of MLX, which is pinned exactly, and the number of this package's release for it."""

__version__ = "0.32.4.1"
