"""Tests of the benchmark program."""
