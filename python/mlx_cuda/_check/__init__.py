"""``python -m mlx_cuda check``: a model with and without :func:`mlx_cuda.patch`, each in a process of its own, and in float32 to judge by."""
