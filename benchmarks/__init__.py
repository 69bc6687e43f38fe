"""Benchmarks: the operations against MLX's own and torch's, on one machine in one run.

``python -m benchmarks run`` measures, checks every result before it times it, and writes one file; ``table`` and ``chart`` make
docs/results/performance.md and its pictures from it, ``readme`` the numbers and the picture of the README from all committed ones.
"""
