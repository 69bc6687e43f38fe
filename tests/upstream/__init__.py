"""MLX's and mlx-lm's own tests, with and without ``patch()`` (docs/upstream-tests.md)."""
