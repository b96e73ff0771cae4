"""Methods, comparisons, NumPy's functions, einsum and promotion of tensors: what NumPy gives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg

A = (np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7) / 3
SPECIAL = np.array([[np.nan, np.inf, -np.inf, 0], [-0.0, 1, 1e30, -2]], np.float32)
I = np.array([[3, -2, 0, 7], [2**40, -1, 5, -(2**63)]], np.int64)  # noqa: E741
VALUES = {"a": A, "s": SPECIAL, "i": I, "j": I.astype(np.int32), "h": A.astype(np.float16), "v": A[1, 2]}

EXPRESSIONS = """a.reshape(4, -1); a.reshape((6, 4)); a.reshape(-1); a.T.reshape(3, 8); a.flatten()
a[:1, :1, :1].reshape(()); a.transpose(); a.transpose(0, 2, 1); a.transpose((-1, 0, 1)); a.sum(); a.sum(0)
a.sum(axis=(0, -1)); h.sum(1); i.sum(); j.sum(0); a.mean(axis=-1, keepdims=True); a.mean(); j.mean(1); a.max()
s.max(1); s.min(0); i.max(axis=0); i.min(); h.max((0, 2)); a.var(); a.var(0, ddof=1)
a.var(axis=(1, 2), keepdims=True); a.sum(axis=(0, 2), keepdims=True); a[1, 2, 3]; a[1, 2, 3] * 2 + a[0, 0, 0]; v @ v
a > 0; a >= a[:, :1]; s == s; s != s; s < 1; s <= 0; 1 < a; i == 7; i > j; j <= 2.5; a == np.float32(0)
(a > 0).sum(axis=1); a * (a == 2); np.maximum(s, 0); np.minimum(a, a[0]); np.where(True, 1, 2) * a; np.add(a, 1)
np.exp(a); np.sqrt(abs(a)); i * i; i + 1; i - j; j * i; -i; i[:1] - 2**40; np.isnan(s); np.isinf(s); np.isfinite(s)
np.sign(s); np.square(j); np.absolute(a); np.negative(i); np.logical_and(a > 0, a < 2)
np.logical_or(a > 0, ~np.bool_(True)); np.logical_not(a > 0); np.reciprocal(a + 9); np.power(a, 2)
np.matmul(a, a[0].T); np.arange(4) > v; np.sum(a, axis=1); np.mean(a, axis=0); np.max(a, axis=2)
np.reshape(a, (4, 6)); np.transpose(a); a.astype(np.float16); a.astype("float32")
np.concatenate([a, a[:1]]); np.concatenate([a, a + 1, a], axis=-1); np.concatenate((i, j))
np.concatenate([a, v], axis=None); np.concatenate([h, a, np.ones((2, 3, 4))], 1); np.stack([v, v + 1])
np.stack([v, v], -1); np.stack([a[0], a[1]], axis=1); np.vstack([v, a[0]]); np.hstack([v, v]); np.hstack([a[0], a[1]])
np.clip(s, -1, 2.5); np.clip(a, a[0], None)
np.clip(i, None, 3); np.argmax(a); np.argmax(s, axis=1); np.argmax(a, 0); np.argmin(h, axis=1)
np.argsort(a, axis=1); np.argsort(s); np.cumsum(a); np.cumsum(a, axis=1); np.where(a > 1, a, 0); np.std(a); np.std(a, 1)
np.squeeze(a[:1]); np.squeeze(a[:1, :, :1], axis=0); np.expand_dims(v, 0); np.expand_dims(a[0], (1, -1)); np.ravel(a.T)
np.swapaxes(a, 0, -1); np.moveaxis(a, 0, 2); np.moveaxis(a, (0, 1), (-1, 0)); np.broadcast_to(v, (2, 3, 4)); np.amax(a)
np.broadcast_to(a[:, :1], (2, 3, 4)); np.dot(v, v); np.dot(a[0], a[1].T); np.dot(a[0], v); np.einsum("ijk,k->ij", a, v)
(a > -1) & (a < 1); (a > 0) | (v > 0); (a > 0) ^ (a < 1); ~(a > 0); ((a > -1) & (a < 1) | (a == 2))[0].T & True
~((i > 0) & (j < 4)); (v > 0) & np.array([True, False, True, True]) & (v < 1); np.bitwise_and(a > 0, a < 1)
i.astype(np.int32) if False else j.astype(np.int64); np.var(a, axis=1, ddof=1)"""


def as_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32) if x.dtype == bool else x


@pytest.mark.parametrize("text", [e.strip() for e in EXPRESSIONS.replace("\n", ";").split(";")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_as_numpy(text: str) -> None:
    ctx, names = gg.Context(), {"np": np, "abs": abs}
    node = eval(text, names | {k: ctx.from_numpy(v) for k, v in VALUES.items()})
    want = as_bits(np.asarray(eval(text, names | VALUES)))
    for backend in ("cpu", "ref"):
        got = gg.eval(node, backend=backend)
        assert got.shape == want.shape == node.shape and got.dtype.kind == want.dtype.kind
        rtol = 1e-3 if got.dtype == np.float16 else 2e-5
        np.testing.assert_allclose(
            got, want, rtol=rtol, atol=1e-6
        ) if want.dtype.kind == "f" else np.testing.assert_array_equal(got, want)


# -- types ------------------------------------------------------------------------------------------------------------

FLOATS = (gg.F32, gg.F16, gg.BF16)
INTEGERS = (gg.I32, gg.I64)
SYMBOLS: list[Callable[[Any, Any], Any]] = [operator.add, operator.sub, operator.mul, gg.maximum, gg.minimum]


def promoted(a: gg.DType, b: gg.DType) -> gg.DType:
    return a if a is b else gg.I64 if a in INTEGERS and b in INTEGERS else gg.F32


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SYMBOLS),
    st.sampled_from(FLOATS + INTEGERS),
    st.sampled_from(FLOATS + INTEGERS),
    st.sampled_from([(2, 3), (3,), (1, 3), (2, 1), (1,), ()]),
    st.sampled_from([(2, 3), (3,), (1, 3), (2, 1), (1,), ()]),
    st.integers(0, 99),
)
def test_promotion_is_symmetric(
    symbol: Callable[[Any, Any], Any], ta: gg.DType, tb: gg.DType, sa: tuple[int, ...], sb: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ctx = gg.Context()

    def tensor(t: gg.DType, shape: tuple[int, ...]) -> gg.Tensor:
        whole = np.asarray(rng.integers(-99, 99, (1, *shape)))
        return ctx.from_numpy(whole / (4 if t in FLOATS else 1), t).reshape(shape)

    a, b = tensor(ta, sa), tensor(tb, sb)
    x, y = symbol(a, b), symbol(b, a)
    want = np.asarray(
        {gg.maximum: np.maximum, gg.minimum: np.minimum}.get(symbol, symbol)(
            a.numpy().astype(np.float64), b.numpy().astype(np.float64)
        )
    )
    assert x.dtype is y.dtype is promoted(ta, tb) and x.shape == y.shape == want.shape
    got, other = gg.eval(x, y)
    limit = {gg.F16: 1e-3, gg.BF16: 1e-2}.get(x.dtype, 1e-6)
    np.testing.assert_allclose(got, want, rtol=limit, atol=limit)
    np.testing.assert_array_equal(other, -got if symbol is operator.sub else got)


def test_what_a_wide_type_has_is_not_lost() -> None:
    ctx = gg.Context()
    one, large = ctx.from_numpy(np.ones(3), gg.F16), ctx.from_numpy(np.full(3, 1e5, np.float32))
    assert [gg.eval(t).tolist() for t in (one + large, large + one)] == [[100001.0] * 3] * 2
    assert (one + np.ones(3, np.float16)).dtype is gg.F16 and (one * 0.5).dtype is gg.F16
    assert (one + np.ones(3)).dtype is gg.F32 and (np.ones(3) + one).dtype is gg.F32
    assert gg.add(one, large).dtype is gg.F16  # ggml's: the type of the first


# -- axes -------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["sum", "mean", "max", "min", "var"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.data(),
)
def test_axes(name: str, shape: list[int], data: st.DataObject) -> None:
    x = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    n = len(shape)
    order = data.draw(st.permutations(range(n)))
    axis = data.draw(st.none() | st.integers(-n, n - 1) | st.lists(st.integers(0, n - 1), unique=True).map(tuple))
    keepdims = data.draw(st.booleans())
    t = gg.Context().from_numpy(x).transpose(*order)
    node = getattr(t, name)(axis=axis, keepdims=keepdims)
    want = getattr(x.astype(np.float64).transpose(order), name)(axis=axis, keepdims=keepdims)
    assert node.shape == np.shape(want)
    np.testing.assert_allclose(gg.eval(node), want, rtol=1e-5, atol=1e-6)


def test_named_functions_stay_ggmls_without_axes() -> None:
    t = gg.Context().from_numpy(A)
    assert gg.sum(t).shape == (1,) and gg.mean(t).shape == (2, 3, 1)
    np.testing.assert_allclose(gg.eval(gg.sum(t, axis=0)), A.sum(0), rtol=1e-6)
    np.testing.assert_allclose(
        gg.eval(gg.mean(t, axis=(0, 2), keepdims=True)), A.mean((0, 2), keepdims=True), rtol=1e-6
    )
    for bad in (3, -4, (0, 0), "x", 1.5, True):
        with pytest.raises(gg.ShapeError, match="axis must name axes"):
            t.sum(axis=bad)
    for shape in ((5, -1), (-1, -1), (7,), (0,), (1.5,), (1, 1, 1, 1, 24)):
        with pytest.raises(gg.ShapeError):
            t.reshape(shape)
    with pytest.raises(gg.ShapeError, match="the axes must be"):
        t.permute(0, 1)
    with pytest.raises(gg.DTypeError, match="no type of tensors"):
        t.astype("complex64")
    assert (t.astype("F16").dtype, t.astype(gg.BF16).dtype) == (gg.F16, gg.BF16)
    with pytest.raises(gg.DTypeError, match="dtype and out must be None"):
        t.sum(dtype=np.float64)  # pyright: ignore[reportArgumentType]


# -- einsum -----------------------------------------------------------------------------------------------------------

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 2}
EINSUMS = """ab,bc->ac; ab,cb->ca; ba,bc->ac; ab,ab->; a,b->ab; a,a->a; a,a; ab,b; bac,bdc->bad; bca,bcd->bad
abcd,abed->abce; aa->a; aba->b; aa; abc->cab; abc->b; abc; ab,bc,cd->ad; ab,bc,cd->da; abc,abc->b; a,b,c->cab
ab,cd->; abce,ad->dcb; abcd,cd->ab; ab, ->ab; ,->; acb,dcb->ad; abc,abd->abcd; abce,abde->abcd; baad,ae->bed
b,cab->ac"""


@pytest.mark.parametrize("text", [e.strip() for e in EINSUMS.replace("\n", ";").split(";")])
def test_einsum(text: str) -> None:
    rng, ctx = np.random.default_rng(0), gg.Context()
    names = text.replace(" ", "").partition("->")[0].split(",")
    arrays = [rng.standard_normal([SIZES[name] for name in axes]).astype(np.float32) for axes in names]
    tensors = [ctx.from_numpy(x).reshape(x.shape) for x in arrays]
    node, want = gg.einsum(text, *tensors), np.asarray(np.einsum(text, *arrays))
    assert node.shape == want.shape
    np.testing.assert_allclose(gg.eval(node), want, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=4), st.lists(st.sampled_from("abcd"), max_size=4), st.data()
)
def test_einsum_of_any_two(left: list[str], right: list[str], data: st.DataObject) -> None:
    all_of = sorted({*left, *right})
    result = data.draw(st.lists(st.sampled_from(all_of), unique=True, max_size=4))
    text = f"{''.join(left)},{''.join(right)}->{''.join(result)}"
    rng, ctx = np.random.default_rng(1), gg.Context()
    arrays = [rng.standard_normal([SIZES[name] for name in axes]).astype(np.float32) for axes in (left, right)]
    node = gg.einsum(text, *[ctx.from_numpy(x).reshape(x.shape) for x in arrays])
    want = np.asarray(np.einsum(text, *arrays))
    assert node.shape == want.shape
    np.testing.assert_allclose(gg.eval(node), want, rtol=1e-4, atol=1e-4)


def test_einsum_of_blocks_and_what_it_refuses() -> None:
    rng, ctx = np.random.default_rng(0), gg.Context()
    w = ctx.from_numpy(rng.standard_normal((3, 64)).astype(np.float32), gg.Q8_0)
    x = ctx.from_numpy(rng.standard_normal((2, 64)).astype(np.float32))
    want = np.einsum("od,bd->ob", w.numpy(), x.numpy())
    for text, srcs in (("od,bd->ob", (w, x)), ("bd,od->ob", (x, w))):
        np.testing.assert_allclose(gg.eval(gg.einsum(text, *srcs)), want, rtol=2e-2, atol=5e-2)
    refused = {"...a->a": "name every axis", "ab,a->b": "2 operands, and 1", "ab->c": "names 'c'", "ab->aa": "twice"}
    refused |= {"a->a": "1 axes of operand 0, which has 2", "aa->a": "64 in operand 0", "a1->a": "letters"}
    for text, why in refused.items():
        with pytest.raises(gg.ShapeError, match=why):
            gg.einsum(text, x)
    with pytest.raises(gg.ShapeError, match="has 5 axes"):
        gg.einsum("abc,de->abcde", x.reshape(2, 8, 8), x)
    with pytest.raises(gg.DTypeError, match="as a string"):
        gg.einsum(x, "ab")  # pyright: ignore[reportArgumentType]


# -- truth ------------------------------------------------------------------------------------------------------------


def test_truth_and_identity() -> None:
    ctx = gg.Context()
    a, b = ctx.from_numpy(A), ctx.from_numpy(A)
    with pytest.raises(gg.GraphError, match=r"bool: values are not known(.|\n)*at "):
        bool(a)
    with pytest.raises(gg.GraphError, match="bool"):
        assert a in [b]
    assert a in [a, b] and {a: 1, b: 2}[b] == 2 and len({a, b, a}) == 2
    assert (a == None) is False and (a != "x") is True  # noqa: E711
    assert (a == b).dtype is gg.I32
    x = ctx.from_numpy(np.float32([1, 2, 3]))
    assert gg.eval(x * (x == 2)).tolist() == [0, 2, 0]


def test_where() -> None:
    ctx = gg.Context()
    a, m = ctx.from_numpy(A), A > 1
    for node, want in (
        (gg.where(a > 1, a, 0), np.where(m, A, 0)),
        (gg.where(m, a, -a), np.where(m, A, -A)),
        (gg.where(a, 1, 2.5), np.where(A, 1, 2.5)),
        (gg.where(a > 1, 1, 2), np.where(m, 1, 2)),
        (gg.where(True, a, a[0]), A),
        (gg.where(a[0] > 1, a[:, :1], np.float32([1, 2, 3, 4])), np.where(m[0], A[:, :1], [1, 2, 3, 4])),
    ):
        got = gg.eval(node)
        assert got.dtype.kind == want.dtype.kind
        np.testing.assert_array_equal(got, want.astype(got.dtype))


def test_item() -> None:
    ctx = gg.Context()
    t = ctx.from_numpy(A)
    assert t[1, 2, 3].item() == A[1, 2, 3].item() and isinstance(ctx.from_numpy([3]).item(), int)
    with pytest.raises(gg.ShapeError, match="24 elements"):
        t.item()
    with pytest.raises(gg.AllocError, match=r"pyggml\.eval"):
        t.sum().item()
    for f in (len, list):
        with pytest.raises(gg.ShapeError, match="no entries"):
            f(t[0, 0, 0])


def test_functions_that_no_op_records() -> None:
    t = gg.Context().from_numpy(A)
    out = np.zeros_like(A)
    for f, text in (
        (lambda: np.arctan(t), r"np.arctan: no op records it.*t.numpy\(\)"),
        (lambda: np.add.reduce(t), r"reductions are methods"),
        (lambda: np.add(out, t, out=out), r"a = a \+ t"),
    ):
        with pytest.raises(gg.DTypeError, match=text):
            f()
    with pytest.raises(gg.DTypeError, match="no tensor, array or number"):
        gg.maximum(t, "x")
    with pytest.raises(gg.DTypeError, match="needs a tensor"):
        gg.equal(1, 2)
    with pytest.raises(TypeError):
        t < "x"  # noqa: B015


# -- functions that are no ufuncs -------------------------------------------------------------------------------------


def test_options_that_a_reduction_does_not_have() -> None:
    t = gg.Context().from_numpy(A)
    with pytest.raises(gg.OptionError, match=r"t.sum has no option 'where'; it has axis, dtype, out, keepdims"):
        np.sum(t, where=A > 0)


def test_functions_that_look_at_values(tmp_path: Path) -> None:
    """They read a tensor that has values, as np.asarray does, and record nothing."""
    ctx = gg.Context()
    t, q = ctx.from_numpy(A), ctx.from_numpy(np.ones((2, 32)), gg.Q8_0)
    assert np.array_equal(t, A) and np.allclose(t, A + 1e-9) and not np.array_equal(A, q) and np.isclose(t, A).all()
    np.testing.assert_array_equal(t, A)
    np.testing.assert_allclose(A, t)
    np.testing.assert_equal(t, A)
    assert np.linalg.norm(t) == np.linalg.norm(A) and np.unique(q).size == 1 and np.copy(t) is not t
    assert (np.shape(t + 1), np.ndim(t), np.size(t)) == ((2, 3, 4), 3, 24) and np.zeros_like(t).shape == A.shape
    assert np.array_repr(t) == np.array_repr(A) and np.result_type(t) == np.float32 and np.asarray(t, np.float64).sum()
    np.save(tmp_path / "t.npy", t)
    np.savez(tmp_path / "t.npz", t=t)
    assert np.array_equal(np.load(tmp_path / "t.npy"), t) and np.array_equal(np.load(tmp_path / "t.npz")["t"], A)
    with pytest.raises(gg.AllocError, match="has no memory"):
        np.array_equal(t + 1, A)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "np.sort(a)",
            "np.sort: no op records it. Of computed values it is np.sort(t.numpy()); in a graph there is gg.argsort",
        ),
        ("np.median(a)", "in a graph gg.map_custom calls it"),
        ("np.take(a, [0])", "gg.get_rows(table, ids)"),
        ("np.any(a > 1)", "(t != 0).max()"),
        ("np.concatenate([a, a], out=a)", "unexpected keyword argument 'out'"),
        ("np.concatenate([a, v])", "np.concatenate: arrays must have as many dimensions as each other"),
        ("np.stack([a, a], axis=4)", "axis must be a whole number from -4 to 3, not 4"),
        ("np.squeeze(a, 0)", "np.squeeze: axis 0 has more than one element"),
        ("np.broadcast_to(a, (4,))", "np.broadcast_to: it does not broadcast to (4,)"),
        ("np.dot(a, a)", "a @ b and gg.einsum take more"),
        ("a % 2", "%: no op records it: write a - gg.floor(a / b) * b"),
        ("7 // a", "//: no op records it: write gg.floor(a / b)"),
        ("divmod(a, 2)", "//: no op records it"),
        ("1 << j", "<< and >>: no op records it: write a product with a power of 2"),
        ("j & j", "&: it combines comparisons; no op records bits. np.logical_and(a, b) takes numbers"),
        ("(a > 1) | a", "|: it combines comparisons"),
        ("~j", "np.logical_not(a) takes numbers"),
    ],
)
def test_what_no_op_records(text: str, says: str) -> None:
    ctx = gg.Context()
    with pytest.raises(gg.GGMLError) as e:
        eval(text, {"np": np} | {k: ctx.from_numpy(v) for k, v in VALUES.items()})
    assert says in str(e.value) and __file__ not in str(e.value) and "at <string>:1" in str(e.value)


def test_a_list_is_no_array() -> None:
    """`t == [1, 2]` was False for Python, whatever t had."""
    t = gg.Context().from_numpy(np.ones(2), gg.F32)
    for f in (lambda: t == [1, 2], lambda: t - [1, 2], lambda: np.add(t, (1, 2)), lambda: range(2) != t):
        with pytest.raises(gg.DTypeError, match=r"np\.array\("):
            f()
    assert (t == None, t != "x") == (False, True)  # noqa: E711


def test_functions_of_one_array_copy_it() -> None:
    t = gg.Context().from_numpy(np.ones((2, 2)), gg.F32)
    for f in (lambda: np.concatenate([t]), lambda: np.vstack([t]), lambda: np.clip(t, None, None)):
        b = f()
        gg.eval(gg.scale_inplace(b, 100.0))
        assert t.numpy().tolist() == [[1, 1], [1, 1]]
