"""Dispatch thresholds: measured on a GPU, or conservative defaults from its data sheet.

They apply to a compute capability. Results that depend on them are cached by :func:`by_limits` until the thresholds change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any, Literal, NamedTuple, TypeVar, get_args

Capability = tuple[int, int]

R = TypeVar("R")
Kind = Literal["affine 4", "affine 8", "fp4", "fp8"]  # of quantized weights: affine up to so many bits, and floats
KINDS: tuple[Kind, ...] = get_args(Kind)
HOPPER = 9


class Matmul(NamedTuple):
    """The largest M of an engine, by weight format."""

    small_m: int = 64  # the small-M kernels, which read each weight once
    half_precision: int = 64  # the same for 16-bit x and transposed weights
    not_transposed: int = 4  # the same for weights that are not transposed
    gathered: int = 64  # the same for MoE, in all tokens of a call
    upstream: int = 0  # above these, MLX's kernel of transposed weights, before weights are dequantized


class Attention(NamedTuple):
    """The most queries that share a KV head, and engines."""

    decode: int = 64  # of the decode kernel, if cuDNN supports the call too
    growing: int = 64  # the same with more keys than queries
    before_flash: int = 256  # the same if flash supports the call and cuDNN does not
    chunks: Literal["flash", "cudnn"] = "flash"  # engine of chunked prefill; cuDNN builds a plan for each number of keys
    additive: Literal["flash", "mlx"] = "mlx"  # engine of additive masks


class DispatchThresholds(NamedTuple):
    """All thresholds of one kind of GPU."""

    matmul: Mapping[str, Matmul]  # by Kind
    attention: Attention
    source: str


class Figures(NamedTuple):
    """Figures of a GPU's data sheet."""

    multiprocessors: int
    ghz: float
    bandwidth: float  # of its memory, bytes in a second


HOPPERS = DispatchThresholds(
    dict.fromkeys(KINDS, Matmul(half_precision=512)),
    Attention(growing=128, additive="flash"),
    "H200: 14336 x 4096 in every format; cases of attention in docs/results/performance.md",
)
PLAIN = DispatchThresholds(dict.fromkeys(KINDS, Matmul()), Attention(), "as the H200's, of kernels that are not Hopper's alone")

# Dense 16-bit multiply-adds with float32 accumulation, per SM and cycle, of the fastest GPUs of a family.
ARITHMETIC = {(8, 0): 1024, (8, 6): 512, (8, 7): 512, (8, 9): 512, (10, 0): 4096, (10, 3): 4096, (12, 0): 512, (12, 1): 512}
# Dequantizing writes and reads 16 bits per weight; then a GEMM reaches DENSE_SHARE of peak arithmetic, and MLX's kernel, which dequantizes
# in its main loop, UPSTREAM_SHARE. Measured on an H200.
EXTRA_BYTES, DENSE_SHARE, UPSTREAM_SHARE = 4.0, 0.75, 0.35


def conservative(capability: Capability, figures: Figures) -> DispatchThresholds:
    """Return thresholds for a GPU without measurements: MLX's kernels are used unless mlx-cuda's are known to be faster.

    A matmul of M tokens takes ``2 M / (share * arithmetic)`` per weight, or, with weights dequantized first, ``EXTRA_BYTES / bandwidth``
    more at a larger share. Above the threshold of the small-M kernels, MLX's kernel is used up to the M at which both are equal. From
    Blackwell on, chunked prefill is cuDNN's, which has kernels for that generation.
    """
    if capability[0] == HOPPER:
        return HOPPERS
    arithmetic = 2 * ARITHMETIC.get(capability, 512) * figures.multiprocessors * figures.ghz * 1e9
    rows = EXTRA_BYTES / figures.bandwidth * arithmetic / 2 / (1 / UPSTREAM_SHARE - 1 / DENSE_SHARE)
    most = round(rows / 32) * 32
    matmul = Matmul(upstream=most if most > Matmul().half_precision else 0)
    attention = Attention(chunks="cudnn" if capability[0] > HOPPER else "flash")
    source = f"by {figures.multiprocessors} multiprocessors, {figures.ghz:.2f} GHz and {figures.bandwidth / 1e12:.2f} TB/s"
    return DispatchThresholds(dict.fromkeys(KINDS, matmul), attention, source)


def kind_of(mode: str, bits: int) -> Kind:
    """Return the weight format whose thresholds apply."""
    if mode == "affine":
        return "affine 4" if bits <= 4 else "affine 8"
    return "fp8" if bits == 8 else "fp4"


_in_force: dict[Capability, DispatchThresholds] = {}
_forget: list[Callable[[], None]] = []
_generation = 0  # incremented when thresholds change


def limits(capability: Capability) -> DispatchThresholds:
    """Return the thresholds in use for a GPU."""
    return _in_force.get(capability) or (HOPPERS if capability[0] == HOPPER else PLAIN)


def put(capability: Capability, new: DispatchThresholds | None) -> None:
    """Use these thresholds, or with None those of the GPU family; cached choices are dropped."""
    global _generation  # noqa: PLW0603
    if new is None:
        _in_force.pop(capability, None)
    else:
        _in_force[capability] = new
    _generation += 1
    for forget in _forget:
        forget()


def on_change(forget: Callable[[], None]) -> None:
    """Register a function that is called when thresholds change."""
    if forget not in _forget:
        _forget.append(forget)


def by_limits(size: int, *, typed: bool = False) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Cache a function, as ``lru_cache``, until thresholds change. A call keeps the thresholds with which it began."""

    def wrap(function: Callable[..., R]) -> Callable[..., R]:
        @lru_cache(size, typed=typed)
        def of_generation(_: int, *arguments: Any) -> R:
            return function(*arguments)

        @wraps(function)
        def call(*arguments: Any) -> R:
            return of_generation(_generation, *arguments)

        return call

    return wrap


def as_json(of: DispatchThresholds) -> dict[str, Any]:
    """Return the thresholds for :func:`from_json`."""
    return {"matmul": {kind: each._asdict() for kind, each in of.matmul.items()}, "attention": of.attention._asdict()}


def _current(numbers: dict[str, int]) -> dict[str, int]:
    """Rename the fields of files that were tuned before 0.32.4.1."""
    return {"small_m" if name == "skinny" else name: number for name, number in numbers.items()}


def from_json(content: Any, source: str) -> DispatchThresholds:
    """Return thresholds from JSON; raise a ValueError that says what is wrong."""
    try:
        by_kind = content["products" if "products" in content else "matmul"]  # the name before 0.32.4.1
        matmul: dict[str, Matmul] = {kind: Matmul(**_current(by_kind[kind])) for kind in KINDS}
        attention = Attention(**content["attention"])
        known = attention.chunks in {"flash", "cudnn"} and attention.additive in {"flash", "mlx"}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no limits: {error}") from None
    numbers = [*(number for each in matmul.values() for number in each), *attention[:3]]
    if not known or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("limits are numbers of rows and names of engines")
    return DispatchThresholds(matmul, attention, source)
