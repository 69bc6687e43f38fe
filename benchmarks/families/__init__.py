"""Every model of ``mlx_lm.models``, small and with random weights, with and without ``mlx_cuda.patch()``: docs/results/models.md."""
