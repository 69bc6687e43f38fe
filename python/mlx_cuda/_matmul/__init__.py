"""Matmul: their rules, and what calls each kernel."""
