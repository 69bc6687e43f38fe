"""Random matmuls: a seed gives a case, a case its operands and what is right. Like cases.py, with nothing but numpy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import formats
from .cases import ROUNDOFF, TF32_ROUNDOFF, DTypeName, rounded
from .formats import FORMS, Form
from .reference import Array

Kind = Literal["quantised", "experts", "pairs", "groups", "fp8"]

ROWS = (1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 100, 127, 128, 129, 255, 300, 512, 1000)
SIZES = (1, 2, 7, 8, 16, 31, 32, 33, 40, 63, 64, 65, 72, 100, 128, 136, 200, 255, 256, 257, 264, 300, 512, 700, 1030)
GROUPS = (1, 1, 2, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 64)
PAIRS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 100, 300)
X_LAYOUTS = ("contiguous", "contiguous", "wide", "unaligned", "every other", "backwards", "columns", "one row")
W_LAYOUTS = ("contiguous", "contiguous", "rows of more", "every other", "backwards")
AXES = ((None, None), (-1, -1), ("block128", "block128x128"), (-1, None), (None, -1), ("block128", -1), (None, "block128x128"))
MULTIPLICATIONS = 40_000_000  # of two numbers, in one case; the reference does each of them twice
# What MLX computes after compiling a kernel for each kind of operands, half a minute long, is not drawn: more rows of experts than FEW
# in float32 or with another k, some of their gradients, and dense ones in float32 or with another k.
FEW = 64
MULTIPLE = 8


@dataclass(frozen=True)
class Case:
    """One call. ``leading`` is what x has in front of its last dimension."""

    seed: int
    kind: Kind
    dtype: DTypeName
    leading: tuple[int, ...]
    n: int
    k: int
    form: Form | None = None
    transpose: bool = True
    x_layout: str = "contiguous"
    w_layout: str = "contiguous"
    experts: int = 0
    indices: tuple[int, ...] = ()  # shape of the experts' numbers
    lhs: bool = False  # which matrix of x each takes is given as well
    ordered: bool = False
    offsets: tuple[int, ...] = ()
    axes: tuple[Any, Any] = (None, None)  # what shares a scale of 8-bit numbers
    bias: bool = False
    gradient: bool = False

    @property
    def w_shape(self) -> tuple[int, ...]:
        stack = (self.experts,) if self.experts else ()
        return (*stack, self.n, self.k) if self.transpose else (*stack, self.k, self.n)


def draw(seed: int, *, most: int = MULTIPLICATIONS) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)  # noqa: S311
    kinds: dict[Kind, tuple[int, Callable[[Case, random.Random], Case]]] = {
        "quantised": (45, _quantised), "experts": (22, _experts), "pairs": (11, _pairs), "groups": (12, _groups), "fp8": (10, _fp8),
    }  # fmt: skip
    kind = chance.choices(list(kinds), [share for share, _ in kinds.values()])[0]
    case = Case(
        seed,
        kind,
        dtype=chance.choices(("float16", "bfloat16", "float32"), (40, 45, 15))[0],
        leading=(chance.choice(ROWS),),
        n=chance.choice(SIZES),
        k=chance.choice(SIZES),
        transpose=kind == "fp8" or chance.random() < 0.7,
        x_layout=chance.choice(X_LAYOUTS),
        w_layout=chance.choice(W_LAYOUTS),
        gradient=kind != "fp8" and chance.random() < 0.2,
    )
    if kind in {"pairs", "groups"}:
        half: DTypeName = "bfloat16" if case.dtype == "float32" else case.dtype
        case = replace(case, dtype=half, k=-(-case.k // MULTIPLE) * MULTIPLE)
    case = _shrunk(kinds[kind][1](_formed(case, chance), chance), most)
    return case if len(case.leading) else replace(case, x_layout="contiguous")


def _formed(case: Case, chance: random.Random) -> Case:
    if case.kind not in {"quantised", "experts"}:
        return case
    form = chance.choice(FORMS)
    size = chance.choice(GROUPS) * form.group_size
    return replace(case, form=form, k=size) if case.transpose else replace(case, form=form, n=size)


def _shrunk(case: Case, most: int) -> Case:
    """The case with as few multiplications as the reference can take, as far as its rows and groups let it be."""
    grouped = ("k" if case.transpose else "n") if case.form else ""
    steps = {name: case.form.group_size if case.form and name == grouped else 1 for name in "nk"}
    steps["k"] = MULTIPLE if case.kind in {"pairs", "groups"} or _is_many_turned(case) else steps["k"]
    while _count(case) * case.n * case.k > most:
        name = max("nk", key=lambda name: getattr(case, name) // steps[name])
        size, step = getattr(case, name), steps[name]
        if size == step:
            break
        case = replace(case, **{name: max(size // 2 // step, 1) * step})
    return case


def _count(case: Case) -> int:
    """Rows of the result."""
    return int(np.prod(case.indices)) * case.leading[-1] if case.indices else int(np.prod(case.leading))


def _quantised(case: Case, chance: random.Random) -> Case:
    (rows,) = case.leading
    divisor = chance.choice((2, 3, 4))
    if rows == 1 and chance.random() < 0.3:
        return replace(case, leading=())
    if rows % divisor == 0 and chance.random() < 0.4:
        return replace(case, leading=(divisor, rows // divisor))
    return replace(case, leading=(1, rows, 1)) if chance.random() < 0.1 else case


def _experts(case: Case, chance: random.Random) -> Case:
    case = _pairs(case, chance)
    if case.dtype == "float32" and _count(case) > FEW:
        case = replace(case, dtype="bfloat16")
    if _is_many_turned(case):
        case = replace(case, k=-(-case.k // MULTIPLE) * MULTIPLE)
    ours = case.transpose and case.dtype != "float32" and case.n % 8 == 0
    return replace(case, gradient=case.gradient and ours)


def _is_many_turned(case: Case) -> bool:
    return case.kind == "experts" and not case.transpose and _count(case) > FEW


def _pairs(case: Case, chance: random.Random) -> Case:
    """Pairs of matrices, as models name them: each token's experts, each pair's own rows, or numbers of both."""
    case = replace(case, experts=chance.choice((1, 2, 5, 8, 33)), x_layout="contiguous", w_layout="contiguous")
    rows, pairs, way = chance.choice((1, 1, 1, 1, 2, 5)), chance.choice(PAIRS), chance.choice(("tokens", "own", "numbers"))
    if way == "tokens":
        each = chance.choice((1, 2, 4))
        return replace(case, leading=(2, max(pairs // 2, 1), 1, 1), indices=(2, max(pairs // 2, 1), each))
    ordered = chance.random() < 0.5
    if way == "own":
        return replace(case, leading=(pairs, rows), indices=(pairs,), ordered=ordered)
    return replace(case, leading=(chance.choice((1, 5, 9)), rows), indices=(pairs,), lhs=True)


def _groups(case: Case, chance: random.Random) -> Case:
    (rows,), experts = case.leading, chance.choice((1, 2, 5, 8, 33, 100))
    bounds = sorted(chance.choice((0, rows, chance.randint(0, rows), chance.randint(0, rows))) for _ in range(experts - 1))
    end = rows if chance.random() < 0.8 else chance.randint(max(bounds, default=0), rows)
    return replace(case, experts=experts, offsets=(0, *bounds, end), w_layout="contiguous")


def _fp8(case: Case, chance: random.Random) -> Case:
    return replace(case, axes=chance.choice(AXES), bias=chance.random() < 0.5, x_layout="contiguous", w_layout="contiguous")


# ----------------------------------------------------------------------------------------------------------------- operands
def inputs(case: Case) -> dict[str, Any]:
    """The operands; numbers in float32, which the dtype holds exactly."""
    rng = np.random.default_rng(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return rounded(rng.standard_normal(shape, np.float32) * np.float32(scale), case.dtype)

    arrays: dict[str, Any] = {"x": normal(*case.leading, case.k)}
    if case.x_layout == "one row":
        arrays["x"] = np.broadcast_to(arrays["x"][..., :1, :], arrays["x"].shape)
    if case.form:
        scales, biases = formats.random_scales(rng, case.w_shape, case.form)
        arrays["w"] = formats.random_words(rng, case.w_shape, case.form)
        arrays["scales"] = scales if biases is None else rounded(scales.astype(np.float32), case.dtype)
        arrays["biases"] = None if biases is None else rounded(biases.astype(np.float32), case.dtype)
    else:
        arrays["w"] = normal(*case.w_shape, scale=case.k**-0.5)
    if case.indices:
        rhs = rng.integers(0, case.experts, case.indices)
        arrays["rhs"] = np.sort(rhs) if case.ordered else rhs
        if case.lhs:
            arrays["lhs"] = rng.integers(0, int(np.prod(case.leading[:-1])), case.indices)
    if case.bias:
        arrays["bias"] = normal(case.n)
    if case.gradient:
        arrays["cotangent"] = normal(*(case.indices + case.leading[-1:] if case.indices else case.leading), case.n)
    return arrays


# ------------------------------------------------------------------------------------------------------------ what is right
def expected(case: Case, results: dict[str, Any]) -> dict[str, tuple[Array, Array]]:
    """The right values, each with the size that rounding errors are relative to: of sums whose terms have random signs."""
    arrays = inputs(case)
    if case.kind == "fp8":
        return {"out": _of_codes(case, arrays, results)}
    x = arrays["x"].astype(np.float64)
    w = formats.dequantised(arrays["w"], arrays["scales"], arrays["biases"], case.form) if case.form else arrays["w"].astype(np.float64)
    w = w.swapaxes(-1, -2) if case.transpose else w
    cotangent = arrays["cotangent"].astype(np.float64) if case.gradient else None
    values = _one(case, arrays, x, w, cotangent)
    squares = _one(case, arrays, x * x, w * w, None if cotangent is None else cotangent * cotangent)
    return {name: (value, np.sqrt(squares[name])) for name, value in values.items()}


def _one(case: Case, arrays: dict[str, Any], x: Array, w: Array, cotangent: Array | None) -> dict[str, Array]:
    """The result and, with its slope, gradients: those of x and of weights that are not quantised."""
    if not case.experts:
        return {"out": x @ w} if cotangent is None else {"out": x @ w, "x": cotangent @ w.T}
    # Matrices [matmuls, rows, k], and for each expert which of them it has.
    matrices = x.reshape(-1, *x.shape[-2:])
    taken: list[Any]
    if case.offsets:
        matrices = x[:, None]
        taken = [slice(begin, max(begin, end)) for begin, end in zip(case.offsets[:-1], case.offsets[1:], strict=True)]
    else:
        rhs = arrays["rhs"].reshape(-1)
        lhs = arrays["lhs"].reshape(-1) if case.lhs else np.arange(len(rhs)) // (len(rhs) // len(matrices))
        matrices = matrices[lhs]
        taken = [rhs == expert for expert in range(case.experts)]
    values = {"out": np.zeros((*matrices.shape[:2], case.n))}
    cotangents = None if cotangent is None else cotangent.reshape(values["out"].shape)
    if cotangents is not None:
        values |= {"x": np.zeros(matrices.shape), "w": np.zeros(w.shape)}
    for expert, those in enumerate(taken):
        values["out"][those] = matrices[those] @ w[expert]
        if cotangents is not None:
            values["x"][those] = cotangents[those] @ w[expert].T
            values["w"][expert] = matrices[those].reshape(-1, case.k).T @ cotangents[those].reshape(-1, case.n)
    values["out"] = values["out"].reshape(*case.indices, -1, case.n) if case.indices else values["out"][:, 0]
    if cotangents is not None:
        if case.offsets:
            values["x"] = values["x"][:, 0]
        else:
            whole = np.zeros((int(np.prod(case.leading[:-1])), *matrices.shape[1:]))
            np.add.at(whole, lhs, values["x"])
            values["x"] = whole.reshape(x.shape)
        values["w"] = values["w"].swapaxes(1, 2) if case.transpose else values["w"]
        if case.form:
            del values["w"]
    return values


def _of_codes(case: Case, arrays: dict[str, Any], results: dict[str, Any]) -> tuple[Array, Array]:
    """The matmul of the very numbers that the codes stand for."""
    a, b = (
        formats.e4m3(results[name].astype(np.uint8))
        * formats.spread(results[f"scale_{name}"].astype(np.float64), results[name].shape, axis)
        for name, axis in zip("ab", case.axes, strict=True)
    )
    bias = arrays["bias"].astype(np.float64) if case.bias else np.zeros(case.n)
    return a @ b.T + bias, np.sqrt((a * a) @ (b * b).T + bias * bias)


# -------------------------------------------------------------------------------------------------------------- the verdict
FP8_SUMS = 2e-3  # tensor cores keep sums of products of 8-bit numbers in fewer bits than float32 has


def bound(case: Case, engine: str, name: str, *, gpu: bool) -> float:
    """How far a result may be off, in relative norm: a rounding of it, one of its weights, and of sums in float32."""
    unit = ROUNDOFF[case.dtype] * (1 if gpu else max(case.k**0.5 / 2, 4))  # on the CPU MLX sums in 16 bits
    if case.kind == "fp8":
        return max(1.5 * unit, FP8_SUMS)
    allowed = (10 if name != "out" else 2 if case.form else 1.5) * unit + 1e-5
    # TF32 may be what is left of a float32 number when bits are cut off: two roundoffs of each of two.
    return allowed + (4 * TF32_ROUNDOFF if gpu and case.dtype == "float32" and (engine != "small_m" or name != "out") else 0.0)


def judge(case: Case, engine: str, results: dict[str, Any], *, gpu: bool) -> list[str]:
    """What is wrong with the results, each in one line."""
    right = expected(case, results)
    if case.kind == "fp8":
        wrong = [each for name in "ab" if (each := _wrong_codes(case, name, results))]
    else:
        wrong = [] if set(results) == set(right) else [f"gives {sorted(results)} instead of {sorted(right)}"]
    for name, (values, size) in right.items():
        actual = results[name].astype(np.float64) if name in results else np.zeros(())
        if actual.shape != values.shape:
            wrong.append(f"{name} has the shape {actual.shape} instead of {values.shape}")
            continue
        norm = max(float(np.linalg.norm(values)), float(np.linalg.norm(size)))
        error, most = float(np.linalg.norm(actual - values)), bound(case, engine, name, gpu=gpu)
        if not error <= most * norm:  # also for NaN
            wrong.append(f"{name} is off by {error / (norm or 1.0):.2e}, more than {most:.2e}")
    return wrong


def _wrong_codes(case: Case, name: str, results: dict[str, Any]) -> str:
    """8-bit numbers are the nearest to what they are made of, but for a rounding of the quotient."""
    axis = case.axes[0 if name == "a" else 1]
    given = inputs(case)["x" if name == "a" else "w"].astype(np.float64)
    scales = formats.spread(results[f"scale_{name}"].astype(np.float64), given.shape, axis)
    off = np.abs(formats.e4m3(results[name].astype(np.uint8)) * scales - given)
    most = np.maximum(np.abs(given) * 2**-4, scales * 2**-10) * 1.01
    return "" if (off <= most).all() else f"{np.count_nonzero(~(off <= most))} numbers of {name} are not the nearest"
