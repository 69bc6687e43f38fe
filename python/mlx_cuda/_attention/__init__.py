"""Attention: its options, its rules, and what calls each engine."""
