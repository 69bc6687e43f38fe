"""Maintenance of the factory: builds in a container, reproducible builds, updates of MLX and tools, mutation tests."""
