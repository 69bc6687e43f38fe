"""Fixtures of the package's tests."""

from .products import products

__all__ = ["products"]
