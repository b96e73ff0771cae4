"""Vars and Sizes: their arithmetic, what is known of all their values, and where they are refused."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Context, Tensor
from pyggml.var import Size, Var, Varies, below_zero, bounds, divides, is_count, largest

Expression = tuple[str, Any, Any]  # an operator and its operands: expressions, numbers, names of Vars


def expressions() -> st.SearchStrategy[Any]:
    leafs = st.sampled_from(["n", "k"]) | st.integers(-4, 9)
    return st.recursive(leafs, lambda e: st.tuples(st.sampled_from("+-*"), e, e), max_leaves=8)


def value(e: Any, names: dict[str, Any]) -> Any:
    if isinstance(e, tuple):
        op, a, b = e
        return {"+": operator.add, "-": operator.sub, "*": operator.mul}[op](value(a, names), value(b, names))
    return names[e] if isinstance(e, str) else e


@settings(max_examples=150, deadline=None)
@given(expressions(), expressions(), st.integers(0, 3), st.integers(0, 4), st.integers(0, 2), st.integers(0, 4))
def test_a_size_is_what_its_expression_is(e: Any, f: Any, lo_n: int, more_n: int, lo_k: int, more_k: int) -> None:
    n, k = Var("n", lo_n + more_n, lo=lo_n), Var("k", lo_k + more_k, lo=lo_k)
    size, other = (value(x, {"n": n, "k": k}) for x in (e, f))
    of: list[tuple[int, int]] = []
    for i, j in product(range(n.lo, n.hi + 1), range(k.lo, k.hi + 1)):
        n.bind(i)
        k.bind(j)
        of.append((value(e, {"n": i, "k": j}), value(f, {"n": i, "k": j})))
        assert int(size) == eval(str(size), {"n": i, "k": j}) == of[-1][0]
    assert bounds(size) == (min(x for x, _ in of), max(x for x, _ in of)) and largest(size) == bounds(size)[1]
    assert (below_zero(size) == "") == all(x >= 0 for x, _ in of)
    assert is_count(size) == all(x >= 1 for x, _ in of)
    if isinstance(size, Size) or isinstance(other, Size):
        for holds in (operator.lt, operator.le, operator.gt, operator.ge):
            answers = {holds(x, y) for x, y in of}
            try:
                assert answers == {holds(size, other)}
            except Varies:
                assert len(answers) == 2 or bounds(size - other)[0] <= 0 <= bounds(size - other)[1]
    assert (size == other) <= all(x == y for x, y in of) and (size - other == 0) == (size == other)
    assert hash(size) == hash(value(e, {"n": n, "k": k}))
    if isinstance(size, Size) and (isinstance(other, Size) or other):
        assert (size * other) // other == size and (size * other) % other == 0 and divides(other, size * other)


def test_numbers_of_numpy_are_numbers() -> None:
    n = Var("n", 8)
    assert np.int64(4) * n == n * np.int32(4) == 4 * n and np.int64(7) - n == 7 - n and (np.int8(9) > n) is True
    for bad in (lambda: np.exp(n), lambda: np.ones(3) * n, lambda: n * np.float32(1.5), lambda: np.zeros((n, 2))):
        with pytest.raises(Varies):
            bad()


def test_a_size_is_no_number_before_the_graph_runs() -> None:
    n = Var("n", 8, lo=1)
    for f in (
        range,
        float,
        [0].__getitem__,
        bytes,
        lambda n: "x" * n,
        lambda n: n / 2,
        lambda n: 2**n,
        lambda n: n < 4,
    ):
        with pytest.raises(Varies, match=r"n \(1\.\.8\)"):
            f(n)
    assert bool(n) and int(n + 1) == 2
    with pytest.raises(Varies, match="whether n is 0"):
        bool(Var("n", 8))


def test_no_tensor_has_no_elements() -> None:
    """A Var without `lo` is at least 1 from then on; one that may be 0 says so."""
    ctx = Context()
    n, head = Var("n", 8), Var("head", 3)
    assert n.lo == 0 and (ctx.new_tensor(gg.F32, (4, 2 * n)).shape, n.lo, n.value) == ((2 * n, 4), 1, 1)
    with pytest.raises(gg.GraphError, match=r"n = 0 is outside 1\.\.8"):
        n.bind(0)
    cache = ctx.from_numpy(np.zeros((8, 4), np.float32))
    for t in (cache[head], cache[head : head + 4], cache[3 - head]):
        assert t.ne[0] == 4 and head.lo == 0
    for var in (Var("n", 8, lo=0), Var("n", 8, 0)):
        with pytest.raises(gg.ShapeError, match="n is not positive for n = 0"):
            ctx.new_tensor(gg.F32, (4, var))
        with pytest.raises(gg.ShapeError, match=r":n leaves nothing of the 8 elements of axis 0 when n = 0"):
            cache[:var]
    with pytest.raises(gg.ShapeError, match="n - 3 is not positive for n = 0"):
        ctx.new_tensor(gg.F32, (Var("n", 8) - 3,))


HEAD = Var("head", 500, lo=4)
N = Var("n", 9, lo=2)
CACHE = Context().from_numpy(np.arange(2048, dtype=np.float32).reshape(512, 4), name="cache")
X = Context().new_tensor(gg.F32, (4, N), "x")
VIEWS: dict[str, Callable[[int, Any], Any]] = {  # of tensors and of arrays
    "[head]": lambda h, x: x[h],
    "[-head]": lambda h, x: x[-h],
    "[511 - head]": lambda h, x: x[511 - h],
    "[head - 4:head]": lambda h, x: x[h - 4 : h],
    "[head:head + 12]": lambda h, x: x[h : h + 12],
    "[(head + 1):]": lambda h, x: x[h + 1 :],
    "[-head:]": lambda h, x: x[-h:],
    "[:-head]": lambda h, x: x[:-h],
    "[:head:1, 1:3]": lambda h, x: x[:h, 1:3],
    "[:head][head - 1]": lambda h, x: x[:h][h - 1],
    "[head:][:12][-1]": lambda h, x: x[h:][:12][-1],
    "[:, 1:][head, 2]": lambda h, x: x[:, 1:][h, 2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_the_one_of_its_value(name: str) -> None:
    t = VIEWS[name](HEAD, CACHE)
    for head in (4, 5, 250, 500):
        HEAD.bind(head)
        assert np.array_equal(t.numpy(), VIEWS[name](head, CACHE.numpy()))


def test_steps_and_negative_strides() -> None:
    half = Var("half", 200, lo=1)
    every_other, backwards = CACHE[: 2 * half : 2], gg.view_1d(CACHE, 4, (511 - 2 * half) * 16)
    two = CACHE[half][Var("column", 3, 2)]
    for value in (1, 7, 200):
        half.bind(value)
        assert np.array_equal(every_other.numpy(), CACHE.numpy()[: 2 * value : 2])
        assert np.array_equal(backwards.numpy(), CACHE.numpy()[511 - 2 * value])
        assert two.numpy() == CACHE.numpy()[value, 2]


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: CACHE[HEAD + 12],
        gg.ShapeError,
        r"head \+ 12 is out of range for axis 0 with 512 elements when head = 500",
    ),
    (lambda: CACHE[HEAD - 5], gg.ShapeError, "head - 5 is out of range for axis 0 with 512 elements when head = 4"),
    (lambda: CACHE[HEAD : HEAD + 13], gg.ShapeError, r"head \+ 13 is out of range for a slice .* when head = 500"),
    (lambda: CACHE[HEAD - 5 : HEAD], gg.ShapeError, "when head = 4"),
    (lambda: CACHE[4:HEAD], gg.ShapeError, "4:head leaves nothing of the 512 elements of axis 0 when head = 4"),
    (lambda: CACHE[:HEAD:2], Varies, r"head \+ 1\) // 2 is no size"),
    (lambda: CACHE[::HEAD], gg.ShapeError, "head is no number before the graph runs"),
    (lambda: CACHE[:, HEAD], gg.ShapeError, "axis 1 with 4 elements when head = 4|when head = 500"),
    (lambda: X[5], gg.ShapeError, "5 is out of range for axis 0 with n elements when n = 2"),
    (lambda: X[:3], gg.ShapeError, "3 is out of range for a slice of axis 0 with n elements when n = 2"),
    (lambda: X[N], gg.ShapeError, "n is out of range for axis 0 with n elements"),
    (lambda: X[-N - 1], gg.ShapeError, "out of range"),
    (lambda: X[HEAD], gg.ShapeError, "axis 0 with n elements when n = 2, head = 4"),
    (lambda: gg.view_1d(CACHE, 4, 16 * HEAD + 192), gg.ShapeError, "outside the 8192 bytes .* for head = 500"),
    (lambda: gg.view_1d(CACHE, 4, 16 * HEAD - 80), gg.ShapeError, r"16\*head - 80 is negative for head = 4"),
    (lambda: gg.view_1d(CACHE, 4, 2 * HEAD), gg.ShapeError, "multiples of F32's 4 bytes"),
    (lambda: gg.view_1d(CACHE, HEAD - 4, 0), gg.ShapeError, "head - 4 is not positive for head = 4"),
    (lambda: gg.view_2d(CACHE, 4, 3, HEAD * 16, 0), gg.ShapeError, "for head = 500"),
    (lambda: X.reshape(3, -1), gg.ShapeError, r"shape \(3, -1\) does not divide the 4\*n elements of a"),
    (lambda: X.reshape(8), gg.ShapeError, "must have as many elements as a"),
    (lambda: len(X), gg.ShapeError, r"a tensor of shape \(n, 4\) has as many entries as its Var says"),
    (lambda: [*X], gg.ShapeError, "len: "),
    (lambda: X * N, Varies, r"\*: n follows from a Var"),
    (lambda: N - X, Varies, "-: n follows from a Var"),
    (lambda: X == N, Varies, "==: n follows from a Var"),
    (lambda: N == X, Varies, "==: n follows from a Var"),
    (lambda: N != X, Varies, "!=: n follows from a Var"),
    (lambda: N < X, Varies, ">: n follows from a Var"),
    (lambda: np.add(X, N), Varies, r"\+: n follows from a Var"),
    (lambda: gg.maximum(X, N), Varies, "maximum: n follows from a Var"),
    (lambda: gg.scale(X, N), Varies, "scale: s = n follows from a Var"),
    (lambda: X + np.ones((5, 1), np.float32), Varies, "whether n < 5 depends on n"),
    (lambda: gg.add(X, CACHE[:4]), Varies, r"add: whether 4 divides n depends on n \(2\.\.9\)"),
    (lambda: X.var(axis=0, ddof=1), Varies, "ddof must be 0 where n elements"),
    (lambda: X.sum(axis=N), gg.ShapeError, "axis must name axes"),
    (lambda: gg.top_k(X.T, 3), Varies, "top_k: whether n >= 3"),
    (lambda: gg.argsort_top_k(X.T, 3), Varies, "argsort: whether n >= 3"),
    (lambda: gg.soft_max_ext(X, CACHE[:4], 1.0, 0.0), Varies, "soft_max: .*n"),
    (lambda: Context().new_tensor(gg.Q8_0, (N,)), Varies, "new_tensor: whether 32 divides n"),
    (lambda: Context().new_tensor(gg.F32, (1 << 40, Var("much", 1 << 60))), gg.ShapeError, "much.* bytes, more than"),
    (lambda: gg.einsum("ij,ij->j", X, CACHE[:4]), gg.ShapeError, "axis 'i' has n elements, and 4 in operand 1"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_when_it_is_recorded(number: int) -> None:
    f, error, text = REFUSED[number]
    with pytest.raises(error, match=text) as e:
        f()
    assert __file__ in str(e.value)


def test_what_it_looks_like() -> None:
    n, k = Var("n", 9, 3), Var("k", 4)
    sizes = (n + 0, 2 * n - 1, 8 - n, -n, n * k * 4 + n, n * n, (n + 1) * (k - 2), 3 - 2 * n * k)
    text = "n, 2*n - 1, 8 - n, -n, 4*n*k + n, n*n, n*k + k - 2*n - 2, 3 - 2*n*k"
    assert ", ".join(map(str, sizes)) == text and f"{n}" == "n" and repr([n + 0]) == "[n]"
    assert repr(n) == "<Var n = 3 of 0..9>" and (n + k).vars == (n, k)
    x = Context().new_tensor(gg.F32, (8, n, 2 * k), "x")
    assert repr(x) == "<Tensor x: F32 ne [8, n, 2*k, 1] op none>" and x.shape == (2 * k, n, 8)
    assert x.nb == (4, 32, 32 * n, 64 * n * k) and x.layout == ((8, 3, 2, 1), (4, 32, 96, 192))


def test_a_largest_value_that_follows_from_another_var() -> None:
    n, k = Var("n", 8, lo=2), Var("k", 3)
    head = Var("head", 10 - n)
    assert (head.lo, head.hi) == (0, 8) and bounds(head + n) == (2, 10) and bounds(3 * head + 3 * n - k) == (3, 30)
    assert bounds(10 - n - head) == (0, 8) and bounds(n - head) == (-6, 8) and bounds(head * k) == (0, 24)
    assert gg.view_1d(Context().new_tensor(gg.F32, (10,)), n, 4 * head).ne[0] == n  # the last rows of 10
    with pytest.raises(gg.ShapeError, match="outside the 36 bytes"):
        gg.view_1d(Context().new_tensor(gg.F32, (9,)), n, 4 * head)
    n.bind(6)
    head.bind(4)
    with pytest.raises(gg.GraphError, match=r"head = 5 is outside 0\.\.4"):
        head.bind(5)
    copy = pickle.loads(pickle.dumps((head, head + n)))
    assert bounds(copy[0]) == (0, 8) and int(copy[1]) == 10


def test_two_vars_are_two() -> None:
    n, m = Var("n", 4), Var("n", 4)
    assert n != m and {n: 1, m: 2}[n] == 1 and n + 0 == n and {n + 0: 1}[n] == 1 and n + m != 2 * n
    assert not isinstance(n + m - m - n, Size) and isinstance(n, int) is False


def wrong(name: Any) -> Tensor:
    return Context().new_tensor(gg.F32, (gg.Var(name, 3),))


@pytest.mark.parametrize("name", [None, 3, b"n"])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(gg.GraphError, match="the name of a Var must be a string"):
        wrong(name)
