"""Matmul: dispatch rules, and the calls of each kernel."""
