"""A process that decodes with the persistent kernel, and prints a digest of the logits of each run."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import numpy as np

from .decoding_checks import FOUR, fresh, make, replayed, run, words
from .support import host

RUNS = 6
SIZES = {"size": 1024, "hidden": 768, "layers": 6, "words": 800, "dim": 64, "heads": 16, "kv_heads": 4}


def main() -> None:
    rng = np.random.default_rng(0)
    model = make(rng, mx.bfloat16, FOUR, **SIZES, mixture=(32, 4, "qwen3_moe"))
    tokens = words(rng, 1, 150)
    for _ in range(RUNS):
        print(hashlib.sha256(host(run(model, fresh(model), tokens, replayed(model))).tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
