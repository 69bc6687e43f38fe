"""``patch(batch_invariant=True)``: a token's result does not depend on the tokens beside it.

Every token goes through the same sums: matmuls in one kernel for any M (`grouped.py`) or in calls of a fixed number of tokens (`rows.py`),
attention in one kernel that counts keys from the first of the sequence (`attention.py`, `masks.py`). Calls that cannot be batch-invariant
raise an error (`refused.py`, `mlx_lm.py`).
"""
