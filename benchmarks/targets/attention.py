"""The targets of attention."""

from __future__ import annotations

from .judge import Number, Share, Speedup, Target, TimeOver, cases

PREFILL = "prefill D=64/128 none and causal, 2k-32k"
WIDE = "prefill D=80, 96, 192, 256 causal 4k-32k"
MASKS = "bool mask 8k D=128"
WINDOW = "window 1024 at 8k and 32k"
EXTRAS = "softcap; sinks and lse"
DECODE = "decode B=8 and 64, H 32/8, S 1k-32k"
RAGGED = "ragged batched decode"
SHORT = "decode D=256; decode with 2-16 queries"
BACKWARD = "fwd+bwd 4k-16k, D=128 and 256"
PAGED = "paged KV cache, pages of 16 and 64 tokens"
SMALL = "small cases"
GROWING = "growing KV cache of 1,000 steps"

NARROW = cases("attention", head_dim=(64, 128), kv_heads=16, window=None)
CAUSAL_8K = cases("attention", head_dim=128, mask="causal", length=8192, kv_heads=16, window=None)
LONG = {"mask": "causal", "length": (4096, 8192, 32768), "window": None}
WINDOWS = cases("window", head_dim=128, length=(8192, 32768))
PLAIN = {"head_dim": 128, "queries": 1, "ragged": None}
ROWS = cases("decode", ragged=("padded", "lengths"), length=8192)
ALL_LENGTHS = cases("decode", batch=64, length=8192, **PLAIN)

ATTENTION = (
    Target(PREFILL, ">= 1.0 x MLX at every point", NARROW, Speedup("upstream"), at_least=1.0),
    Target(PREFILL, ">= 0.97 x torch cuDNN", NARROW, Speedup("torch cuDNN"), at_least=0.97),
    Target(WIDE, ">= 0.95 x torch cuDNN", cases("attention", head_dim=(80, 96, 192, 256), **LONG), Speedup("torch cuDNN"), at_least=0.95),
    Target(
        WIDE, "D=192 and 256 >= 10 x MLX", cases("attention", head_dim=(192, 256), **LONG), Speedup("upstream"), at_least=10.0,
        why="at least as fast as torch's cuDNN; the time of MLX's unfused attention varies between runs",
    ),
    Target(
        MASKS, "causal and documents: <= 2 x the causal time", cases("masks", head_dim=128, mask=("bool causal", "documents")),
        TimeOver(base=CAUSAL_8K), at_most=2.0,
    ),
    Target(MASKS, "random: not slower than torch cuDNN", cases("masks", head_dim=128, mask="random"), Speedup("torch cuDNN"), at_least=1.0),
    Target(MASKS, "random: >= 4.5 x MLX", cases("masks", head_dim=128, mask="random"), Speedup("upstream"), at_least=4.5),
    Target(
        WINDOW, "linear in T: at 32k <= 1.1 x the time per key at 8k", cases("window", head_dim=128, length=32768),
        TimeOver(base=cases("window", head_dim=128, length=8192), per_work=True), at_most=1.1,
    ),
    Target(WINDOW, "<= 0.35 x causal at 8k", cases("window", head_dim=128, length=8192), TimeOver(base=CAUSAL_8K), at_most=0.35),
    Target(WINDOW, ">= 40 x MLX", WINDOWS, Speedup("upstream"), at_least=40.0),
    Target(EXTRAS, "softcap >= 2 x FlexAttention", cases("softcap", flex=True), Speedup("torch flex"), at_least=2.0),
    Target(EXTRAS, "sinks and return_lse <= 1.15 x the same case without", cases("sinks"), TimeOver("ours, without"), at_most=1.15),
    Target(DECODE, ">= 85 % of bandwidth at B=64", cases("decode", batch=64, **PLAIN), Share(), at_least=0.85),
    Target(DECODE, ">= 70 % of bandwidth at B=8 S=8192", cases("decode", batch=8, length=8192, heads=32, **PLAIN), Share(), at_least=0.70),
    Target(
        DECODE, "never slower than torch cuDNN", cases("decode", batch=(8, 64), **PLAIN), Speedup("torch cuDNN"), at_least=1.0,
        why="MLX's launch overhead; replayed as a CUDA graph, the kernel is faster from 3072 keys on",
    ),
    Target(DECODE, "never slower than torch flash", cases("decode", batch=(8, 64), **PLAIN), Speedup("torch flash"), at_least=1.0),
    Target(RAGGED, ">= 7 x MLX", ROWS, Speedup("upstream"), at_least=7.0),
    Target(RAGGED, "not slower than torch cuDNN", ROWS, Speedup("torch cuDNN"), at_least=1.0),
    Target(
        RAGGED, "time per key <= 1.2 x that of a full batch of 64",
        cases("decode", ragged=("padded", "lengths"), batch=64), TimeOver(base=ALL_LENGTHS, per_work=True), at_most=1.2,
    ),
    Target(SHORT, "D=256 >= 5 x MLX", cases("decode", head_dim=256, heads=32), Speedup("upstream"), at_least=5.0),
    Target(SHORT, "2-16 queries >= 2.5 x MLX", cases("decode", queries=(2, 4, 8, 16)), Speedup("upstream"), at_least=2.5),
    Target(BACKWARD, ">= 1.0 x torch cuDNN", cases("backward"), Speedup("torch cuDNN"), at_least=1.0, why="both run cuDNN's kernel"),
    Target(
        BACKWARD, "T=4100 >= 10 x MLX", cases("backward", length=4100), Speedup("upstream"), at_least=10.0,
        why="both run cuDNN's kernel; the target would be faster than torch",
    ),
    Target(PAGED, "<= 1.1 x the contiguous cache", cases("paged"), TimeOver("ours, contiguous"), at_most=1.1),
    Target(SMALL, "launch overhead per call not above MLX's", cases("small"), Speedup("upstream"), at_least=1.0),
    Target(GROWING, "<= 16 cuDNN plans", cases("growing", steps=1000), Number("ours: plans"), at_most=16),
    Target(GROWING, "all steps finish within the time limit", cases("growing", steps=1000), Number("ours: steps"), at_least=1000),
)  # fmt: skip
