"""Timing the algorithms of matmuls on this GPU."""
