"""Decoding steps of mlx-lm's models, recorded once and launched for each token."""
