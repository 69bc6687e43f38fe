"""Timing the algorithms of matrix products on this GPU."""
