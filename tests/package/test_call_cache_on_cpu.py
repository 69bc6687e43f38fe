"""The cache of calls, compiled for MLX's CPU backend. What operations have it keep: test_graph_cache.py."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._loader.replacing import in_shapeless_trace

from .compiled import compiles
from .references import host, random
from .threads import in_threads

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), compiles]


def preparing(function: Callable[..., Any], sizes: tuple[int, int] | None) -> Callable[..., Any]:
    """Calls of a function that say these sizes."""
    return lambda *arguments, **options: SimpleNamespace(result=lambda: function(*arguments, **options), sizes=sizes)


class Counted:
    """A cached function, the plain one, and how often the former called Python. ``sizes``: those that a call says."""

    def __init__(self, native: Any, function: Callable[..., Any], sizes: tuple[int, int] | None = None, **axes: int) -> None:
        self.plain, self.calls = function, 0
        places = list(inspect.signature(function).parameters)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return function(*arguments, **options)

        growing = [(places.index(name), name, axis) for name, axis in axes.items()]
        self.cached = native.cached(counted, growing, prepare=preparing(counted, sizes) if sizes else None)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.cached(*arguments, **options)

    def check(self, *arguments: Any, **options: Any) -> int:
        """The same bits as by the plain function; returns how often Python was called for them."""
        before = self.calls
        assert_same(self(*arguments, **options), self.plain(*arguments, **options))
        return self.calls - before


def listed(results: Any) -> list[mx.array]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def assert_same(actual: Any, expected: Any) -> None:
    for one, other in zip(listed(actual), listed(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert mx.array_equal(one, other).item()


def gated(a: mx.array, b: mx.array, scale: float = 1.0) -> mx.array:
    return mx.where(a > 0, a * scale, mx.exp(b)) + mx.arange(a.shape[-1])


A, B = random((3, 4), seed=1), random((3, 4), seed=2)


# ------------------------------------------------------------------------------------------------------------------------- keys
def test_other_values_and_strides_get_the_same_graph(native: Any) -> None:
    call = Counted(native, gated)
    assert call.check(A, B) == 1
    wide = random((4, 6), seed=3)
    for a, b in ((B, A), (wide.T[::2], wide[:3, ::-1][:, :4]), (A[::-1], mx.broadcast_to(B[:1], (3, 4)))):
        assert call.check(a, b) == 0


def test_no_call_is_taken_for_another(native: Any) -> None:
    def function(a: mx.array, b: Any = None, *, named: Any = None, other: Any = None) -> mx.array:
        text = " ".join(str(value.shape) if isinstance(value, mx.array) else repr(value) for value in (b, named, other))
        arrays = [value for value in (b, named, other) if isinstance(value, mx.array)]
        return sum((each.sum() for each in arrays), start=a * float(sum(map(ord, text)) % 1009))

    call = Counted(native, function)
    values: list[Any] = [
        None, True, False, 1, 0, 1.0, 0.0, -1, 2**40, "", "a", "1", "None", (), (1,), (1, None), (None, 1), ((1,), None), mx.float32,
        mx.float16, mx.new_stream(mx.cpu), mx.cpu, A, B, mx.zeros((4, 3)), A.astype(mx.float16),
    ]  # fmt: skip
    calls = [partial(call.check, A)]
    calls += [partial(call.check, A, value) for value in values]
    calls += [partial(call.check, A, **{name: value}) for name in ("b", "named", "other") for value in values]
    calls += [partial(call.check, each) for each in (A[:2], A[None], A.T, A.astype(mx.bfloat16), A.astype(mx.int32))]
    calls += [partial(call.check, A, named=1, other=2), partial(call.check, A, other=1, named=2)]
    assert [each() for each in calls] == [1] * len(calls)
    assert [each() for each in calls] == [0] * len(calls)


def test_one_array_twice_is_a_call_of_its_own(native: Any) -> None:
    call = Counted(native, lambda a, b, c: (a - 2 * b) / c)
    assert [call.check(*each) for each in ((A, B, A), (A, A, B), (A, B, B), (A, A, A), (A, B, A + 1))] == [1] * 5
    assert [call.check(*each) for each in ((B, A, B), (B, B, A), (B, A, A), (B, B, B), (B, A, B + 1))] == [0] * 5


def test_the_stream_is_part_of_a_call(native: Any) -> None:
    call = Counted(native, lambda a, stream=None: mx.exp(a, stream=stream))
    stream = mx.new_stream(mx.cpu)
    assert call.check(A) == 1
    with mx.stream(stream):
        assert [call.check(each) for each in (A, B)] == [1, 0]
    assert call.check(A, stream=mx.default_stream(mx.cpu)) == 1
    assert call.check(A, stream=stream) == 1
    assert call.check(A, stream=mx.cpu) == 0  # a device stands for its default stream
    assert call.check(A, stream=mx.Device(mx.cpu)) == 0


def test_what_the_key_does_not_tell_apart_is_not_cached(native: Any) -> None:
    call = Counted(native, lambda a, option=None: a + len(str(option)))
    for option in (2**70, "\ud800", [1], np.float32(1), {"a": 1}, (1, [2])):
        assert [call.check(A, option) for _ in range(2)] == [1, 1]
    assert [call.check(*each) for each in ((A, 5), (B, 5))] == [1, 0]


def test_results_that_are_no_graph_of_the_arguments_are_not_cached(native: Any) -> None:
    ready = mx.array([1.0, 2.0])

    def deep(a: mx.array) -> mx.array:
        return sum((a * n for n in range(50)), start=a)

    def deeper_than_a_stack(a: mx.array) -> mx.array:
        for _ in range(40_000):
            a = a + 1
        return a

    def evaluated(a: mx.array) -> mx.array:
        mx.eval(result := a + 1)
        return result

    functions: list[Callable[[mx.array], Any]] = [lambda a: [a + 1], lambda a: a, lambda a: (a + 1, a), lambda _: ready]
    functions += [deep, deeper_than_a_stack, evaluated]
    for function in functions:
        call = Counted(native, function)
        assert [call.check(random((2,), seed=seed)) for seed in range(2)] == [1, 1]


def test_an_array_whose_numbers_python_may_have_read_is_not_cached(native: Any) -> None:
    """One that no step reads, as an option that MLX's functions take as a number."""
    call = Counted(native, lambda a, factor: a * factor.item())
    assert [call.check(A, mx.array(factor)) for factor in (2.0, 3.0, 2.0)] == [1, 1, 1]
    call = Counted(native, lambda a, b, c: (a + 1, mx.divmod(b, c)[0]))
    assert [call.check(*each) for each in ((A, B, A + 1), (B, A, B + 1))] == [1, 0]


def test_a_function_has_the_names_and_the_text_of_its_own(native: Any) -> None:
    cached = native.cached(gated, [])
    assert [getattr(cached, name) for name in ("__name__", "__module__", "__doc__")] == ["gated", __name__, None]
    upstream: Any = mx.fast.scaled_dot_product_attention
    cached = native.cached(wraps(upstream)(lambda *_: None), [])
    assert [getattr(cached, name) for name in ("__name__", "__doc__")] == ["scaled_dot_product_attention", upstream.__doc__]


def test_a_trace_for_any_shape_is_told_from_all_others(native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module, and without it."""
    file, told = str(tmp_path / "function.mlxfn"), []

    def function(a: mx.array) -> mx.array:
        monkeypatch.setattr(_native, "loaded", None)
        told.append((native.in_shapeless_trace(), in_shapeless_trace()))
        return a * 2

    def twice(a: mx.array) -> mx.array:
        return (function(a) * a).sum()

    shapeless = [
        mx.compile(partial(function), shapeless=True),
        mx.compile(mx.vmap(function), shapeless=True),
        mx.compile(mx.grad(twice), shapeless=True),
        lambda a: mx.export_function(file, function, a, shapeless=True),
    ]
    others = [
        function,
        mx.compile(partial(function)),
        mx.grad(twice),
        mx.vmap(function),
        mx.checkpoint(function),
        mx.grad(mx.compile(twice, shapeless=True)),  # which traces the gradient alone
        lambda a: mx.export_function(file, function, a),
    ]
    groups: list[tuple[list[Any], bool]] = [(shapeless, True), (others, False)]
    for calls, expected in groups:
        for call in calls:
            told.clear()
            call(A)
            assert set(told) == {(expected, expected)}


def test_calls_of_such_a_trace_go_to_another_function(native: Any) -> None:
    call = native.cached(lambda a: a + 1, [], None, lambda a: a + 2)
    assert_same(call(A), A + 1)
    assert_same(mx.compile(partial(call), shapeless=True)(A), A + 2)
    assert_same(mx.compile(lambda a: call(a) * call(B), shapeless=True)(A), (A + 2) * (B + 2))  # of arrays that are not traced, too
    assert_same(mx.compile(partial(call))(A), A + 1)
    assert_same(call(A), A + 1)


def test_functions_do_not_share(native: Any) -> None:
    one, other = Counted(native, lambda a: a + 1), Counted(native, lambda a: a - 1)
    assert [call.check(A) for call in (one, other, one, other)] == [1, 1, 0, 0]


def test_keys_are_forgotten(native: Any) -> None:
    call = Counted(native, lambda a, n: a + n)
    for n in range(4097):
        call(A, n)
    assert call.check(A, 4096) == 0
    assert call.check(A, 0) == 1


def test_batches_go_to_the_other_function(native: Any) -> None:
    """Where the second argument is a batch of matrices; whatever else it is goes the ordinary way."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def function(*arguments: Any, **options: Any) -> mx.array:
        calls.append(("function", arguments, options))
        return A + 1

    def other(*arguments: Any, **options: Any) -> mx.array:
        calls.append(("other", arguments, options))
        if options.get("fail"):
            raise KeyError("failed")
        return B

    call = native.cached(function, [], other)
    for shape in ((2, 3, 4), (1, 2, 1, 1), (2, 1, 1, 3, 4), (2, 3, 4)):
        batch = mx.zeros(shape)
        assert mx.array_equal(call(A, batch, 3, more="text"), B).item()
        name, arguments, options = calls.pop()
        assert (name, arguments[1:], options) == ("other", (batch, 3), {"more": "text"})
        assert not calls
    with pytest.raises(KeyError, match="failed"):
        call(A, mx.zeros((2, 3, 4)), fail=True)
    calls.clear()
    for second in (mx.zeros((3, 4)), mx.zeros((1, 1, 3, 4)), mx.zeros(4), mx.zeros(()), 2, None):
        assert mx.array_equal(call(A, second), A + 1).item()
    call()
    call(mx.zeros((2, 3, 4)))
    call(A, w=mx.zeros((2, 3, 4)))
    assert [name for name, *_ in calls] == 9 * ["function"]
    assert native.cached(function, [], None)(A, mx.zeros((2, 3, 4))).shape == A.shape


def test_errors_pass_and_change_nothing(native: Any) -> None:
    def function(a: mx.array, *, fail: bool = False) -> mx.array:
        """What it does."""
        if fail:
            raise KeyError("failed")
        return a + 1

    call = native.cached(function, [])
    assert (call.__name__, call.__doc__) == ("function", "What it does.")
    for _ in range(2):
        with pytest.raises(KeyError, match="failed"):
            call(A, fail=True)
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            call(A, other=1)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            call()


def test_arguments_and_results_are_let_go(native: Any) -> None:
    call = Counted(native, lambda a, b, **_: (a + b, *mx.divmod(a, b)))
    options = ("text", 2.5, None)
    mx.eval(call(A, B, options=options))

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(each) for each in (A, B, options, *options[:2])]

    before, memory = counts(), mx.get_active_memory()
    for _ in range(20):
        mx.eval(call(A, B, options=options))
        call(A, B, options=options)  # and never evaluated
    assert call.calls == 1
    assert counts() == before
    assert mx.get_active_memory() == memory


def test_threads_cache_for_themselves(native: Any) -> None:
    call = Counted(native, gated)
    expected = np.array(gated(A, B))

    def work() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(50):
                np.testing.assert_array_equal(np.array(call(A, B)), expected)

    in_threads(3, work)
    assert call.calls == 3


# ------------------------------------------------------------------------------------------------------------- several results
def test_tuples_of_results(native: Any) -> None:
    def function(a: mx.array, b: mx.array) -> tuple[mx.array, ...]:
        quotient, rest = mx.divmod(a * 3, mx.abs(b) + 1)  # two outputs of one primitive
        return rest, quotient + mx.split(a, 2, axis=1)[1].sum(), rest, mx.exp(rest)

    call = Counted(native, function)
    assert [call.check(*each) for each in ((A, B), (B, A))] == [1, 0]
    assert isinstance(call(A, B), tuple)
    single = Counted(native, lambda a, b: mx.divmod(a, b)[1])
    assert [single.check(*each) for each in ((A, B), (B, A))] == [1, 0]
    alone = Counted(native, lambda a: (a + 1,))
    for _ in range(2):
        assert isinstance(alone(A), tuple)
    assert alone.calls == 1


def test_custom_functions_are_left_out_where_nothing_is_transformed(native: Any) -> None:
    pair: Any = mx.custom_function(lambda a, b: (a + b, a - b))

    @pair.vjp  # type: ignore[untyped-decorator]
    def gradients(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return [mx.ones_like(each) * 7 for each in primals]

    call = Counted(native, lambda a, b: tuple(pair(a, b)[::-1]))
    assert [call.check(*each) for each in ((A, B), (B, A))] == [1, 0]
    for _ in range(2):
        before = call.calls
        assert (mx.grad(lambda a: call(a, B)[0].sum())(A) == 7).all()
        assert call.calls == before + 1
    stopped = Counted(native, lambda a: mx.stop_gradient(a * 2) * a)
    assert [stopped.check(each) for each in (A, B)] == [1, 0]
    np.testing.assert_allclose(host(mx.grad(lambda a: stopped(a).sum())(A)), 2 * host(A), rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------- transformations
TRANSFORMED: dict[str, Callable[[Any], Callable[[mx.array, mx.array], Any]]] = {
    "grad": lambda f: mx.grad(lambda a, b: f(a, b).sum(), argnums=(0, 1)),
    "vjp": lambda f: lambda a, b: mx.vjp(f, [a, b], [a + b])[1],
    "jvp": lambda f: lambda a, b: mx.jvp(f, [a, b], [b, a])[1],
    "vmap": lambda f: mx.vmap(f, in_axes=(0, 0)),
    "compile": mx.compile,
    "compiled grad": lambda f: lambda a, b: mx.compile(mx.grad(lambda a: f(a, b).sum()))(a),
    "second derivative": lambda f: mx.grad(lambda a, b: mx.grad(lambda b: f(a, b).sum())(b).sum(), argnums=1),
}


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_transformed_calls_are_cached_apart(native: Any, transform: str) -> None:
    call = Counted(native, gated)
    call.check(A, B)
    for a, b in ((A, B), (B, A), (A, B + 1)):
        actual, expected = (listed(TRANSFORMED[transform](function)(a, b)) for function in (call, gated))
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(host(one), host(other), rtol=1e-5, atol=1e-6)
    assert call.calls == 2  # once for plain arrays, once for those that are transformed
    assert call.check(A, B) == 0


def test_what_mlx_builds_by_the_transformation_is_not_cached_under_one(native: Any) -> None:
    call = Counted(native, lambda a: mx.tanh(a) * 2)
    assert [call.check(each) for each in (A, B)] == [1, 0]
    for _ in range(2):
        before = call.calls
        assert_same(*(mx.grad(lambda a, f=f: f(a).sum())(A) for f in (call, call.plain)))
        assert call.calls == before + 1


def test_each_argument_says_whether_it_is_transformed(native: Any) -> None:
    call = Counted(native, lambda a, b: mx.exp(a) * b)
    for which in ("a", "b", "ab"):
        for _ in range(2):
            actual, expected = (
                mx.grad(lambda t, f=f: f(t if "a" in which else A, t * 2 if "b" in which else B).sum())(A)  # noqa: B023
                for f in (call, call.plain)
            )
            assert_same(actual, expected)
    assert call.calls == 3


# --------------------------------------------------------------------------------------------------------------------- growing axes
def matmul(native: Any, fewest: int = 0, most: int = 0, *, cast: bool = False) -> Counted:
    """``c + a @ b``, one primitive whose result does not depend on how many columns a and rows b have."""

    def function(c: mx.array, a: mx.array, b: mx.array, factor: float = 1.0) -> mx.array:
        return mx.addmm(c, a.astype(c.dtype), b.astype(c.dtype), factor) if cast else mx.addmm(c, a, b, factor)

    return Counted(native, function, (fewest, most) if most else None, a=1, b=0)


def operands(size: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    return random((3, 5), seed=size), random((3, size), dtype, seed=size), random((size, 5), dtype, seed=size + 100)


def test_growing_axes_share_a_graph_within_the_range_that_python_names(native: Any) -> None:
    call = matmul(native, 4, 7)
    assert call.check(*operands(5)) == 1
    assert [call.check(*operands(size)) for size in (4, 5, 6, 7)] == [0] * 4
    assert [call.check(*operands(size)) for size in (3, 8, 3, 8)] == [1, 1, 0, 0]  # each for itself: the range is another's
    c, a, b = operands(6)
    assert call.check(c, b=b, a=a) == 1  # by name
    assert call.check(c, b=b[:4], a=a[:, :4]) == 0
    assert call.check(c, a, b, 2.0) == 1
    assert call.check(c[:1], a, b) == 1
    assert call.check(*(each.astype(mx.float16) for each in (c, a, b))) == 1


def test_without_a_word_of_python_a_graph_holds_for_one_size(native: Any) -> None:
    call = matmul(native)
    assert [call.check(*operands(size)) for size in (5, 6, 5, 6, 7)] == [1, 1, 0, 0, 1]


def test_sizes_are_forgotten(native: Any) -> None:
    call = matmul(native)
    for size in range(1, 10):
        call.check(*operands(size))
    assert [call.check(*operands(size)) for size in range(2, 10)] == [0] * 8
    assert call.check(*operands(1)) == 1


def test_a_step_that_has_the_size_makes_a_range_one_size(native: Any) -> None:
    call = matmul(native, 1, 100, cast=True)
    assert [call.check(*operands(size, mx.float16)) for size in (5, 6, 5)] == [1, 1, 0]
    assert [call.check(*operands(size)) for size in (5, 6, 60)] == [1, 0, 0]  # nothing to cast
    alone = Counted(native, lambda a: mx.exp(a), (1, 100), a=0)  # noqa: PLW0108  (whose argument has a name)
    assert [alone.check(random((size,))) for size in (5, 6, 5)] == [1, 1, 0]


def test_axes_that_do_not_agree_are_pythons(native: Any) -> None:
    call = matmul(native, 1, 100)
    c, a, b = operands(5)
    assert call.check(c, a, b) == 1
    for rest in ((a, b[:4]), (a[:, :4], b)):
        with pytest.raises(ValueError, match="addmm"):
            call(c, *rest)
    assert call.calls == 3
    x = random((4, 4))
    square = matmul(native, 1, 100)
    assert [square.check(*each) for each in ((x, x, x), (x + 1, x, x), (x, x + 1, x), (x, x, x))] == [1, 1, 1, 0]
    with pytest.raises(ValueError, match="addmm"):
        square(x, (x + 1)[:, :3], x)


def test_a_word_of_python_is_for_its_own_call(native: Any) -> None:
    inner, plain = matmul(native, 1, 100), matmul(native)

    def failing(c: mx.array, a: mx.array, b: mx.array) -> mx.array:
        raise RuntimeError("failed")

    def function(c: mx.array, a: mx.array, b: mx.array) -> mx.array:
        with pytest.raises(RuntimeError, match="failed"):
            native.cached(failing, [(1, "a", 1), (2, "b", 0)], prepare=preparing(failing, (1, 100)))(c, a, b)
        assert plain(c, a, b).shape == c.shape
        result: mx.array = inner(c, a, b)
        return result

    for sizes, looks in ((None, [1, 1, 0]), ((4, 6), [1, 0, 0])):
        call = Counted(native, function, sizes, a=1, b=0)
        assert [call.check(*operands(size)) for size in (5, 6, 5)] == looks
    assert call.check(*operands(7)) == 1
    assert [plain.check(*operands(size)) for size in (15, 16)] == [1, 1]


def test_growing_axes_under_transformations(native: Any) -> None:
    call = matmul(native, 2, 50)
    for size in (5, 9, 20):
        c, a, b = operands(size)
        assert_same(*(mx.grad(lambda a, b, f=f, c=c: f(c, a, b).square().sum(), argnums=(0, 1))(a, b) for f in (call, call.plain)))
    assert call.calls == 1
