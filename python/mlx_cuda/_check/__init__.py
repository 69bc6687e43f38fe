"""``python -m mlx_cuda check``: a model with and without :func:`mlx_cuda.patch`, judged by the same model in float32."""
