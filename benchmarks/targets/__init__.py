"""The targets, as data, and what a run says to them."""

from .attention import ATTENTION
from .judge import Target, behind_table, judge, targets_table
from .matmul import MATMUL

__all__ = ["ATTENTION", "MATMUL", "Target", "behind_table", "judge", "targets_table"]
