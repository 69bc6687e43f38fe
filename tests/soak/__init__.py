"""mlx-lm's server over HTTP for minutes: whether it grows, hangs, answers wrongly or does not end."""
