"""All that knows mlx-lm, and packages with copies of its code, by name: caches, models, and what takes the place of functions."""
