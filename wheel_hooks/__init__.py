"""Hooks that cibuildwheel calls."""
