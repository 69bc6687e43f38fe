"""``patch(batch_invariant=True)``: what a row gives does not depend on the rows beside it.

Every row always goes through the same sums: matmuls by one kernel for any number of rows (`grouped.py`) or in calls of a fixed number
of them (`rows.py`), attention by one kernel that counts keys from the sequence's first (`attention.py`, `masks.py`). What cannot have it
raises (`refused.py`, `mlx_lm.py`).
"""
