"""What is aimed at, as data, and what a run says to it."""

from .attention import ATTENTION
from .judge import Aim, aims_table, behind_table, judge
from .matmul import MATMUL

__all__ = ["ATTENTION", "MATMUL", "Aim", "aims_table", "behind_table", "judge"]
