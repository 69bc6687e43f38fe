"""Maintenance: wheels by cibuildwheel in a container, comparison of builds, another MLX; whether the tests notice a change."""
