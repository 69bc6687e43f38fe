"""Tests that run the installed package's kernels on a GPU."""
