"""Everything that is specific to mlx-lm, and to packages with copies of its code: caches, models, and replaced functions."""
