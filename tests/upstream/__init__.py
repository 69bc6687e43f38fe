"""MLX's and mlx-lm's own tests, with and without ``patch()`` (docs/results/upstream-tests.md)."""
