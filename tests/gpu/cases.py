"""Random calls of attention in all its forms: a seed gives a case, a case its inputs and what is right.

Nothing but numpy is imported: worker processes compute the references (tests/gpu/soak.py) while MLX computes in one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import reference

Floats: TypeAlias = "NDArray[np.float32]"

Kind = Literal["dense", "varlen", "paged"]
MaskName = Literal["none", "causal", "bool", "additive"]
DTypeName = Literal["float16", "bfloat16", "float32"]

LENGTHS = (1, 1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 160, 200, 255, 256, 257, 300, 511, 513)
LONG = (1000, 1024, 2049, 4100)
DIMS = (64, 64, 64, 128, 128, 128, 8, 16, 24, 40, 72, 80, 96, 104, 136, 160, 192, 200, 256, 256)
LAYOUTS = ("contiguous",) * 2 + ("rows first", "heads last", "cache", "unaligned", "every other", "backwards", "one batch", "one head")
PATTERNS = ("random", "lower", "documents", "blocks", "columns", "all", "few")
SCORES = 1_200_000  # of one case, most; the reference takes some 20 ns for each, and five times as much for gradients


@dataclass(frozen=True)
class Case:
    """One call."""

    seed: int
    kind: Kind
    dtype: DTypeName
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    dim: int
    v_dim: int
    scale: float | None
    size: float  # of the scores, about
    mask: MaskName = "none"
    mask_shape: tuple[int, ...] = ()
    pattern: str = ""
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    starts: tuple[int, ...] | None = None
    ends: tuple[int, ...] | None = None
    lse: bool = False
    gradient: bool = False
    spoilt: bool = False  # what no query may read is NaN
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    q_lens: tuple[int, ...] = ()  # varlen
    k_lens: tuple[int, ...] = ()
    page_size: int = 16
    written: int = 0  # paged: the last so many keys come through paged_cache_update

    @property
    def factor(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def sides(self) -> tuple[int, int]:
        """The window, with the causal mask in it."""
        return self.window[0], 0 if self.mask == "causal" or self.kind == "paged" else self.window[1]


def draw(seed: int, *, most: int = SCORES) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)  # noqa: S311
    kind: Kind = chance.choices(("dense", "varlen", "paged"), (84, 8, 8))[0]
    dim, v_dim = _dims(chance)
    kv_heads, groups = chance.choice((1, 1, 2, 3, 4, 8)), chance.choice((1, 1, 1, 2, 3, 4, 7, 8))
    case = Case(
        seed,
        kind,
        dtype=chance.choices(("float16", "bfloat16", "float32"), (40, 45, 15))[0],
        batch=chance.choice((1, 1, 2, 3, 5)),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        q_len=chance.choice(LENGTHS + LONG if chance.random() < 0.3 else LENGTHS),
        k_len=chance.choice(LENGTHS + LONG if chance.random() < 0.6 else LENGTHS),
        dim=dim,
        v_dim=v_dim,
        scale=chance.choice((None, None, None, 0.3, 1.0, -0.2, 0.0)),
        size=chance.choice((1.0, 1.0, 1.0, 1.0, 0.1, 4.0, 30.0, 300.0)),
        lse=chance.random() < 0.3,
        sinks=chance.random() < 0.25,
        softcap=chance.choice((0.0, 0.0, 0.0, 0.0, 1.0, 20.0, 50.0)),
        gradient=kind != "paged" and chance.random() < 0.12,
        layouts=(chance.choice(LAYOUTS), chance.choice(LAYOUTS), chance.choice(LAYOUTS)),
    )
    if chance.random() < 0.25:
        case = replace(case, k_len=case.q_len)
    case = _shrunk(case, most // 3 if case.gradient else most)
    if chance.random() < 0.3:
        case = replace(case, window=(chance.choice((-1, 0, 5, 64, 100)), chance.choice((-1, -1, 0, 3, 40))))
    return {"dense": _dense, "varlen": _varlen, "paged": _paged}[kind](case, chance)


def dense(
    seed: int, dtype: DTypeName, dims: Sequence[tuple[int, int]], lengths: tuple[Sequence[int], Sequence[int]], layouts: Sequence[str],
    *, rows: int = 1 << 31, **fields: Any,
) -> Case:  # fmt: skip
    """A case for an engine that takes these sizes: lengths are of queries and keys, and ``rows`` the most queries that share a kv head,
    of heads up to 128; of wider ones half as many. All else is as in the case of the seed, but for the fields.
    """
    own, chance = draw(seed), random.Random(seed)  # noqa: S311
    (dim, v_dim), q_len, k_len = chance.choice(dims), chance.choice(lengths[0]), chance.choice(lengths[1])
    while q_len * own.heads // own.kv_heads > rows // (1 if dim <= 128 else 2):
        q_len = max(q_len // 2, 1)
    sizes: dict[str, Any] = {"dim": dim, "v_dim": v_dim, "q_len": q_len, "k_len": k_len}
    laid = (chance.choice(layouts), chance.choice(layouts), chance.choice(layouts))
    case = replace(own, kind="dense", dtype=dtype, mask_shape=(), pattern="", gradient=False, layouts=laid, **sizes | fields)
    return _masked(_shrunk(case, SCORES), chance)


def _dims(chance: random.Random) -> tuple[int, int]:
    rare = chance.random()
    if rare < 0.03:
        return chance.choice(((512, 512), (576, 512), (264, 264)))
    if rare < 0.05:
        return chance.choice(((12, 12), (100, 100), (64, 20), (1, 3)))
    dim = chance.choice(DIMS)
    return dim, dim if chance.random() < 0.85 else chance.choice(DIMS)


def _shrunk(case: Case, most: int) -> Case:
    """The case with as few scores as the references can take."""
    while case.batch * case.heads * case.q_len * case.k_len * max(1, (case.dim + case.v_dim) // 256) > most:
        if case.batch > 1:
            case = replace(case, batch=case.batch // 2)
        elif case.heads > 2 * case.kv_heads:
            case = replace(case, heads=2 * case.kv_heads)
        elif case.kv_heads > 2:
            case = replace(case, heads=case.heads // case.kv_heads * 2, kv_heads=2)
        elif case.q_len > case.k_len // 2:
            case = replace(case, q_len=case.q_len // 2)
        else:
            case = replace(case, k_len=case.k_len // 2)
    return case


def _bounds(chance: random.Random, case: Case) -> tuple[int, ...]:
    return tuple(chance.choice((0, case.k_len, chance.randint(0, case.k_len), chance.randint(0, case.k_len))) for _ in range(case.batch))


def _dense(case: Case, chance: random.Random) -> Case:
    if chance.random() < 0.12 and max(case.dim, case.v_dim) <= 256:  # as cuDNN takes it
        length = max(case.q_len, 33)
        while length > 66 and case.batch * case.heads * length * length > SCORES:
            length //= 2
        left = case.window[0] if chance.random() < 0.5 else -1
        mask: MaskName = "causal" if left >= 0 or chance.random() < 0.5 else "none"
        half: DTypeName = chance.choice(("float16", "bfloat16"))
        return replace(case, dtype=half, q_len=length, k_len=length, window=(left, -1), softcap=0.0, mask=mask)
    return _masked(case, chance)


def _masked(case: Case, chance: random.Random) -> Case:
    mask: MaskName = chance.choices(("none", "causal", "bool", "additive"), (3, 4, 4, 2))[0]
    full = (case.batch, case.heads, case.q_len, case.k_len)
    if mask in {"bool", "additive"}:
        shape = tuple(size if chance.random() < 0.6 else 1 for size in full)
        shape = shape if chance.random() < 0.8 else shape[chance.randint(1, 3) :]
        case = replace(case, mask_shape=shape, pattern=chance.choice(PATTERNS))
    ends = _bounds(chance, case) if chance.random() < 0.2 else None
    starts = _bounds(chance, case) if chance.random() < 0.12 else None
    spoilt = not case.gradient and chance.random() < 0.5
    return replace(case, mask=mask, starts=starts, ends=ends, spoilt=spoilt)


def _varlen(case: Case, chance: random.Random) -> Case:
    count = chance.choice((1, 2, 3, 5))

    def lengths(most: int) -> tuple[int, ...]:
        return tuple(chance.choice((0, 1, most, chance.randint(0, most), chance.randint(0, most))) for _ in range(count))

    q_lens, k_lens = lengths(case.q_len), lengths(case.k_len)
    if chance.random() < 0.4:
        k_lens = tuple(max(q, k) for q, k in zip(q_lens, k_lens, strict=True))
    mask: MaskName = chance.choice(("none", "causal", "causal"))
    return replace(case, batch=count, mask=mask, q_lens=q_lens, k_lens=k_lens, spoilt=not case.gradient and chance.random() < 0.5)


def _paged(case: Case, chance: random.Random) -> Case:
    q_len = min(case.q_len, chance.choice((1, 1, 1, 2, 4, 16, 33)))
    case = replace(case, q_len=q_len, page_size=chance.choice((16, 16, 64, 64, 128, 48, 8)), layouts=("contiguous",) * 3)
    written = chance.choice((0, 1, q_len, 20)) if chance.random() < 0.5 else 0
    return replace(case, mask="causal", window=(case.window[0], 0), ends=_bounds(chance, case), spoilt=True, written=written)


# ------------------------------------------------------------------------------------------------------------------- inputs
def rounded(values: Floats, dtype: str) -> Floats:
    """The nearest numbers of the dtype, ties to even."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values.astype(np.float32)


def inputs(case: Case) -> dict[str, Any]:
    """Arrays in float32 that the dtype holds exactly: q, k, v and, where the case has them, mask, sinks and cotangents."""
    rng = np.random.default_rng(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> Floats:
        return rounded((rng.standard_normal(shape, np.float32) * scale).astype(np.float32), case.dtype)

    def laid(layout: str, *shape: int, scale: float = 1.0) -> Floats:
        """Equal where the layout repeats a batch entry or a head."""
        one = {"one batch": (1, *shape[1:]), "one head": (shape[0], 1, *shape[2:]), "one for all": (1, 1, *shape[2:])}
        sizes = one.get(layout, shape)
        return np.broadcast_to(normal(*sizes, scale=scale), shape)

    size = case.size / max(abs(case.factor) * case.dim**0.5, 0.1)
    if case.kind == "varlen":
        total_q, total_k = sum(case.q_lens) + case.seed % 3, sum(case.k_lens) + case.seed % 4
        q = normal(total_q, case.heads, case.dim, scale=size)
        k, v = normal(total_k, case.kv_heads, case.dim), normal(total_k, case.kv_heads, case.v_dim)
        out: tuple[int, ...] = (total_q, case.heads, case.v_dim)
    else:
        q = laid(case.layouts[0], case.batch, case.heads, case.q_len, case.dim, scale=size)
        k = laid(case.layouts[1], case.batch, case.kv_heads, case.k_len, case.dim)
        v = laid(case.layouts[2], case.batch, case.kv_heads, case.k_len, case.v_dim)
        out = (case.batch, case.heads, case.q_len, case.v_dim)
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
    if case.mask in {"bool", "additive"}:
        seen = _pattern(case, rng)
        arrays["mask"] = seen if case.mask == "bool" else np.where(seen, normal(*seen.shape, scale=2.0), -np.inf).astype(np.float32)
    if case.sinks:
        arrays["sinks"] = normal(case.heads, scale=2.0)
    if case.gradient:
        arrays["cotangent"] = normal(*out)
        if case.lse:
            arrays["lse_cotangent"] = rng.standard_normal((*out[:-1],), np.float32)
    return arrays


def _pattern(case: Case, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A bool mask of the shape of the case's, often in blocks, with some rows that see nothing."""
    shape = case.mask_shape
    rows, columns = (*(1,) * (4 - len(shape)), *shape)[2:]
    row, column = np.arange(rows)[:, None], np.arange(columns)
    patterns: dict[str, Callable[[], NDArray[np.bool_]]] = {
        "random": lambda: rng.random(shape) < 0.7,
        "few": lambda: rng.random(shape) < 0.02,
        "all": lambda: np.ones(shape, np.bool_),
        "lower": lambda: column <= row + columns - rows,
        "documents": lambda: np.sort(rng.integers(0, 3, rows))[:, None] == np.sort(rng.integers(0, 3, columns)),
        "blocks": lambda: (rng.random((rows // 64 + 1, columns // 64 + 1)) < 0.4).repeat(64, 0).repeat(64, 1)[:rows, :columns],
        "columns": lambda: np.broadcast_to(rng.random(columns) < 0.5, (rows, columns)),
    }
    two = patterns[case.pattern]()
    seen: NDArray[np.bool_] = np.broadcast_to(two.reshape(two.shape[-len(shape) :]) if two.ndim > len(shape) else two, shape).copy()
    if len(shape) > 1:
        seen[..., rng.random(rows) < 0.1, :] = False
    return seen


# -------------------------------------------------------------------------------------------------------------- what is right
@dataclass(frozen=True)
class Expected:
    """The right values, each with the size that rounding errors are relative to."""

    values: dict[str, tuple[reference.Array, reference.Array]]
    peak: float  # the largest score
    steep: Steepness


@dataclass
class Steepness:
    """How far the scores after a softcap move for each relative error of q's and k's numbers.

    A score is a sum of products that may cancel, and has errors of the size of ``sqrt(sum (q k)^2)``. Without a softcap the largest score
    is about as large as that; a softcap of 1 hides that scores of 300 are behind it, but lets through what moves those about 0.
    """

    moves: float = 0.0  # sums of squares: of what moves a query's weights, and of the weights
    weights: float = 0.0
    gradients: float = 0.0  # likewise of what moves the gradient of a score, and of its size
    sizes: float = 0.0

    def add(self, done: reference.Attended, softcap: float) -> None:
        assert done.steep is not None
        tangent = np.abs(done.scores) / softcap
        derivative = 1 - tangent**2
        self.moves += float(((done.weights * done.steep) ** 2).sum())
        self.weights += float((done.weights**2).sum())
        # A gradient is that of the weight times the slope, whose own change is 2 tanh / softcap for each of the score's.
        self.gradients += float(((done.weights * done.steep * (derivative + 2 * tangent / softcap)) ** 2).sum())
        self.sizes += float(((done.weights * (derivative + 1 / 8)) ** 2).sum())  # as reference.attend_vjp has it

    @property
    def of_weights(self) -> float:
        """Relatively, and so of the results."""
        return float(np.sqrt(self.moves / self.weights)) if self.weights else 0.0

    @property
    def of_gradients(self) -> float:
        return max(float(np.sqrt(self.gradients / self.sizes)) if self.sizes else 0.0, self.of_weights)


def expected(case: Case, arrays: dict[str, Any]) -> Expected:
    wide = {name: values.astype(np.float64) for name, values in arrays.items() if values.dtype != np.bool_}
    if case.kind == "varlen":
        return _expected_packed(case, wide)
    starts, ends = (None if bounds is None else np.array(bounds) for bounds in (case.starts, case.ends))
    bias = reference.bias_of(case.q_len, case.k_len, window=case.sides, starts=starts, ends=ends)
    if case.mask == "bool":
        bias = np.where(arrays["mask"], bias, -np.inf)
    if case.mask == "additive":
        bias = bias + wide["mask"]
    steep = Steepness()
    values, peak = _one(case, wide, bias, steep)
    if "bias" in values:
        gradient, size = values.pop("bias")
        if case.mask == "additive":
            values["mask"] = _folded(gradient, case.mask_shape), np.sqrt(_folded(size**2, case.mask_shape))
    return Expected(values, peak, steep)


def _one(case: Case, wide: dict[str, reference.Array], bias: reference.Array, steep: Steepness) -> tuple[dict[str, Any], float]:
    """The values of one batch; the size of the logarithms is how far they move for each relative error of q's and k's numbers."""
    q, k, v, sinks = wide["q"], wide["k"], wide["v"], wide.get("sinks")
    done = reference.attend(q, k, v, scale=case.factor, bias=bias, softcap=case.softcap, sinks=sinks)
    values: dict[str, Any] = {"out": (done.out, done.size)}
    if done.steep is not None:
        steep.add(done, case.softcap)
    if case.lse:
        values["lse"] = done.lse, np.zeros_like(done.lse) if done.steep is None else (done.weights * done.steep).sum(axis=-1)
    if case.gradient:
        values |= reference.attend_vjp(
            q, k, v, done, wide["cotangent"], scale=case.factor, softcap=case.softcap, lse_cotangent=wide.get("lse_cotangent")
        )  # fmt: skip
        if sinks is None:
            del values["sinks"]
    return values, float(np.abs(done.scores).max(initial=0.0))


def _expected_packed(case: Case, wide: dict[str, reference.Array]) -> Expected:
    """Sequence by sequence."""
    names = {"out": "q", "q": "q", "k": "k", "v": "v"} if case.gradient else {"out": "q"}
    values: dict[str, Any] = {}
    for name, like in names.items():
        width = case.v_dim if name == "out" else wide[like].shape[2]
        values[name] = tuple(np.zeros((*wide[like].shape[:2], width)) for _ in range(2))
    if case.lse:
        values["lse"] = tuple(np.full(wide["q"].shape[1::-1], start) for start in (-np.inf, 0.0))
    if case.gradient and case.sinks:
        values["sinks"] = (np.zeros(case.heads), np.zeros(case.heads))
    steep, peak, q_end, k_end = Steepness(), 0.0, 0, 0
    for q_len, k_len in zip(case.q_lens, case.k_lens, strict=True):
        rows, keys = slice(q_end, q_end + q_len), slice(k_end, k_end + k_len)
        q_end, k_end = rows.stop, keys.stop
        if not q_len:
            continue
        part = {name: wide[name][rows if name == "q" else keys].swapaxes(0, 1)[None] for name in ("q", "k", "v")}
        part |= {name: wide[name] for name in ("sinks",) if name in wide}
        if case.gradient:
            part["cotangent"] = wide["cotangent"][rows].swapaxes(0, 1)[None]
            if case.lse:
                part["lse_cotangent"] = wide["lse_cotangent"][rows].swapaxes(0, 1)[None]
        found, top = _one(case, part, reference.bias_of(q_len, k_len, window=case.sides), steep)
        peak = max(peak, top)
        for name, pair in values.items():
            for whole, piece in zip(pair, found[name], strict=True):
                if name == "sinks":
                    np.add(whole, piece, out=whole)
                elif name == "lse":
                    whole[:, rows] = piece[0]
                else:
                    whole[keys if name in {"k", "v"} else rows] = piece[0].swapaxes(0, 1)
    return Expected(values, peak, steep)


def _folded(a: reference.Array, shape: Sequence[int]) -> reference.Array:
    """The sum over the axes along which an array of this shape was broadcast."""
    padded = (1,) * (a.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return np.asarray(a.sum(axis=axes, keepdims=True).reshape(shape))


# ------------------------------------------------------------------------------------------------------------------ the verdict
ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}
TF32_ROUNDOFF = 2**-11  # of each operand
FLOAT32_SUMS = 2**-21  # of products, which are exact for 16 bits: some roundings in float32
EXACT = ("decode", "cudnn", "flash")  # their scores are such sums; MLX may round them to the dtype
TANH_FIT = 7.4e-6  # relative error of the Hopper kernel's polynomial (src/attention/flash/launch.cpp), for scores that the softcap exceeds
# What a result may be off by whatever its size. float16 has steps of 2^-24 at its lower end, so rounding is half of that; everything
# else has float32's range, and kernels flush what is below its normal numbers, weights of keys and sinks among them.
FLOOR = {"float16": 2**-25, "bfloat16": 2**-126, "float32": 2**-126}


@dataclass(frozen=True)
class Bounds:
    """How far from the right values a result may be: relative norms, and for the logarithms absolute."""

    out: float
    gradient: float
    lse: float
    lse_moves: float  # times the size that the right logarithms come with


def bounds(case: Case, engine: str, right: Expected, *, gpu: bool) -> Bounds:
    unit = max(ROUNDOFF[case.dtype], FLOAT32_SUMS)
    own = engine.split(maxsplit=1)[0] in EXACT
    score = FLOAT32_SUMS
    if gpu and (case.dtype == "float32" or not own):
        unit, score = max(unit, TF32_ROUNDOFF), 2 * TF32_ROUNDOFF
    unfused = score  # behind a softcap, which is never composed in fewer than float32's bits
    if not own and case.dtype != "float32":
        score = max(score, 2 * unit)
    composed = 2 * TF32_ROUNDOFF if gpu and engine != "cudnn" else 0.0  # gradients of our own kernels compute the scores anew, in TF32
    peak = max(right.peak, 1.0)
    moved = score * peak  # how far a score is off, and so its weight, relatively
    fitted = 0.0
    if gpu and case.softcap and engine.startswith("flash") and case.dtype != "float32":
        fitted = TANH_FIT * min(right.peak, case.softcap * math.tanh(1))
    # Rounding to nearest is off by 0.41 roundoffs in the root mean square, and two independent ones by 0.58, or 0.29 of their sum: what
    # is 1.5 or 2 times as much as the roundoffs is 3.7 to 7 standard deviations. 16 bits are exact in TF32, so that with them only
    # q * scale is rounded on the way to a gradient.
    steep = right.steep
    again = composed if case.dtype == "float32" else composed / 2
    return Bounds(
        out=1.5 * (2 * unit + max(moved, unfused * steep.of_weights)),
        gradient=10 * unit + max(4 * max(moved, composed * peak), 1.5 * max(unfused, again) * steep.of_gradients),
        lse=1e-4 + 2 * moved + fitted,
        lse_moves=2 * unfused,
    )


def judge(case: Case, engine: str, results: dict[str, Any], *, gpu: bool) -> list[str]:
    """What is wrong with the results, each in one line."""
    right = expected(case, inputs(case))
    allowed = bounds(case, engine, right, gpu=gpu)
    if set(results) != set(right.values):
        return [f"gives {sorted(results)} instead of {sorted(right.values)}"]
    wrong = []
    for name, (values, size) in right.values.items():
        actual = results[name].astype(np.float64)
        if actual.shape != values.shape:
            wrong.append(f"{name} has the shape {actual.shape} instead of {values.shape}")
        elif name == "lse":
            seen = values > -np.inf
            errors = np.abs(np.where(seen, actual, 0) - np.where(seen, values, 0))
            most = np.maximum(allowed.lse, allowed.lse_moves * size)
            if not (np.array_equal(actual > -np.inf, seen) and (errors <= most).all()):
                worst = np.argmax(errors / most)
                off = f"{errors.flat[worst]:.2e}, more than {most.flat[worst]:.2e}"
                wrong.append(f"lse is off by {off}, or not -inf just where no key is seen")
        elif not np.isfinite(actual).all():
            wrong.append(f"{name} is not finite in {np.count_nonzero(~np.isfinite(actual))} places of {actual.size}")
        else:
            norm = max(float(np.linalg.norm(values)), float(np.linalg.norm(size)))
            floor = FLOOR[case.dtype] * values.size**0.5
            error, bound = float(np.linalg.norm(actual - values)), allowed.out if name == "out" else allowed.gradient
            if not error <= bound * norm + floor:
                wrong.append(f"{name} is off by {error / (norm or 1.0):.2e}, more than {bound:.2e}")
            if name == "out" and np.any(actual[~size.any(axis=-1)]):
                wrong.append("a query that sees no key does not give zeros")
    return wrong
