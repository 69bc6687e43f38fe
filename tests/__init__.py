"""Tests of mlx-cuda."""
