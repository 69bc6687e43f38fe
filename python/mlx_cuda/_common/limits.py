"""The numbers at which one engine passes calls on to the next: measured on such a GPU, or else careful ones by its data sheet.

They are in force for each compute capability; what follows from them is cached by :func:`by_limits` until others are put.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any, Literal, NamedTuple, TypeVar, get_args

Capability = tuple[int, int]

R = TypeVar("R")
Kind = Literal["affine 4", "affine 8", "fp4", "fp8"]  # of quantised weights: affine up to so many bits, and floats
KINDS: tuple[Kind, ...] = get_args(Kind)
HOPPER = 9


class Products(NamedTuple):
    """The most rows of x that are given to an engine, by how the weights are stored."""

    skinny: int = 64  # the kernels that read each weight once
    half_precision: int = 64  # likewise of 16-bit x and transposed weights, which other kernels take
    not_transposed: int = 4  # likewise of weights that are not transposed
    gathered: int = 64  # likewise in all, where each row names its own expert
    upstream: int = 0  # beyond those, MLX's own kernel of transposed weights, before weights are dequantised


class Attention(NamedTuple):
    """The most queries of the heads that share a kv head, and engines."""

    decode: int = 64  # of the decode kernel, where cuDNN takes the case as well
    growing: int = 64  # likewise where there are more keys than queries
    before_flash: int = 256  # likewise where our flash kernel takes the case, and cuDNN does not
    chunks: Literal["flash", "cudnn"] = "flash"  # who takes many queries to more keys; cuDNN builds a plan for each number of keys
    additive: Literal["flash", "mlx"] = "mlx"  # who takes additive masks


class DispatchThresholds(NamedTuple):
    """All of them, for one kind of GPU."""

    products: Mapping[str, Products]  # by Kind
    attention: Attention
    source: str


class Figures(NamedTuple):
    """Of a GPU's data sheet."""

    multiprocessors: int
    ghz: float
    bandwidth: float  # of its memory, bytes in a second


HOPPERS = DispatchThresholds(
    dict.fromkeys(KINDS, Products(half_precision=512)),
    Attention(growing=128, additive="flash"),
    "H200: 14336 x 4096 in every format; cases of attention in docs/performance.md",
)
PLAIN = DispatchThresholds(dict.fromkeys(KINDS, Products()), Attention(), "as the H200's, of kernels that are not Hopper's alone")

# Multiply-adds of a multiprocessor in a cycle, dense, of 16 bits with float32 sums: that of the fastest GPUs of a family.
ARITHMETIC = {(8, 0): 1024, (8, 6): 512, (8, 7): 512, (8, 9): 512, (10, 0): 4096, (10, 3): 4096, (12, 0): 512, (12, 1): 512}
# Dequantising writes and reads 16 bits for each weight beside what is stored; then a product runs at this share of the arithmetic, and
# MLX's kernel, which dequantises as it goes, at that one. On the H200 it was 0.75, and MLX's less.
EXTRA_BYTES, DENSE_SHARE, UPSTREAM_SHARE = 4.0, 0.75, 0.35


def conservative(capability: Capability, figures: Figures) -> DispatchThresholds:
    """DispatchThresholds for a GPU that nobody has measured: MLX's own kernels wherever ours are not known to be faster there.

    A product of M rows takes ``2 M / (share * arithmetic)`` for each weight, or, where weights are dequantised first, ``EXTRA_BYTES /
    bandwidth`` more at a larger share. Up to the M where these are equal, rows beyond those of our skinny kernels are MLX's. From
    Blackwell on, cuDNN has kernels of that generation and our flash kernel has not, so chunks of a prompt are cuDNN's.
    """
    if capability[0] == HOPPER:
        return HOPPERS
    arithmetic = 2 * ARITHMETIC.get(capability, 512) * figures.multiprocessors * figures.ghz * 1e9
    rows = EXTRA_BYTES / figures.bandwidth * arithmetic / 2 / (1 / UPSTREAM_SHARE - 1 / DENSE_SHARE)
    most = round(rows / 32) * 32
    products = Products(upstream=most if most > Products().half_precision else 0)
    attention = Attention(chunks="cudnn" if capability[0] > HOPPER else "flash")
    source = f"by {figures.multiprocessors} multiprocessors, {figures.ghz:.2f} GHz and {figures.bandwidth / 1e12:.2f} TB/s"
    return DispatchThresholds(dict.fromkeys(KINDS, products), attention, source)


def kind_of(mode: str, bits: int) -> Kind:
    """Which limits hold for quantised weights."""
    if mode == "affine":
        return "affine 4" if bits <= 4 else "affine 8"
    return "fp8" if bits == 8 else "fp4"


_in_force: dict[Capability, DispatchThresholds] = {}
_forget: list[Callable[[], None]] = []
_generation = 0  # how often others were put in force


def limits(capability: Capability) -> DispatchThresholds:
    """Those in force for a GPU."""
    return _in_force.get(capability) or (HOPPERS if capability[0] == HOPPER else PLAIN)


def put(capability: Capability, new: DispatchThresholds | None) -> None:
    """Put limits in force, or with None those of the family; calls choose anew."""
    global _generation  # noqa: PLW0603
    if new is None:
        _in_force.pop(capability, None)
    else:
        _in_force[capability] = new
    _generation += 1
    for forget in _forget:
        forget()


def on_change(forget: Callable[[], None]) -> None:
    """Have this called whenever other limits are put in force."""
    if forget not in _forget:
        _forget.append(forget)


def by_limits(size: int, *, typed: bool = False) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """As ``lru_cache``, of what follows from the limits in force: a result is found while those hold that its call began with."""

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
    """For :func:`from_json`."""
    return {"products": {kind: each._asdict() for kind, each in of.products.items()}, "attention": of.attention._asdict()}


def from_json(content: Any, source: str) -> DispatchThresholds:
    """DispatchThresholds by their names; a ValueError says what is wrong."""
    try:
        products: dict[str, Products] = {kind: Products(**content["products"][kind]) for kind in KINDS}
        attention = Attention(**content["attention"])
        known = attention.chunks in {"flash", "cudnn"} and attention.additive in {"flash", "mlx"}
    except (KeyError, TypeError) as error:
        raise ValueError(f"no limits: {error}") from None
    numbers = [*(number for each in products.values() for number in each), *attention[:3]]
    if not known or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("limits are numbers of rows and names of engines")
    return DispatchThresholds(products, attention, source)
