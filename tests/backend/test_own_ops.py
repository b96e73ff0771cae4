"""Ops in Python, ops and backends of other packages."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.errors import user_site
from pyggml.native import ffi
from pyggml.opdef import OPS

from . import device

X = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_a_function_is_a_node(backend: str) -> None:
    def f(dst: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        assert a.shape == (8, 3) and b.shape == (3,) and not a.flags.writeable
        dst[:] = np.sort(a @ b)

    x = gg.Context().from_numpy(X)
    b = np.arange(3, dtype=np.float32)
    y = gg.map_custom(f, gg.cont(x.T), x.ctx.from_numpy(b, gg.BF16), ne=8) * 2
    np.testing.assert_allclose(gg.eval(y, backend=backend, n_threads=2), 2 * np.sort(X.T @ b), rtol=1e-5)
    for dtype in (gg.I32, gg.F16, gg.BF16, gg.Q8_0):  # results that NumPy has, and that it has not
        z = gg.map_custom(lambda dst: dst.fill(3), ne=(32, 2), dtype=dtype, ctx=x.ctx)
        np.testing.assert_allclose(gg.eval(z, backend=backend), np.full((2, 32), 3.0), rtol=0.01)


def test_tasks_share_the_work() -> None:
    seen: set[tuple[int, int, int]] = set()
    meet = threading.Barrier(2, timeout=200)

    def f(dst: np.ndarray, a: np.ndarray, ith: int, nth: int) -> None:
        if nth == 2:
            meet.wait()
        seen.add((ith, nth, threading.get_ident()))
        dst[ith::nth] = -a[ith::nth]

    y = gg.map_custom(f, gg.Context().from_numpy(X), n_tasks=None)
    sched = gg.Scheduler(("cpu",), n_threads=2)
    graph = gg.Graph().build_forward_expand(y)
    n = sched.backends["cpu"].n_threads
    for _ in range(1000):  # a thread whose CPU is taken is done without
        seen.clear()
        sched.compute(graph)
        np.testing.assert_array_equal(y.numpy(), -X)
        if len(seen) == n:
            break
        time.sleep(0.1)
    assert {(i, k) for i, k, _ in seen} == {(i, n) for i in range(n)} and len({t for *_, t in seen}) == n


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("n_tasks", [1, None])
def test_an_exception_comes_out_of_the_run(backend: str, n_tasks: int | None) -> None:
    def f(*arrays: np.ndarray, **task: int) -> None:
        raise KeyError("no such thing")

    x = gg.Context().from_numpy(X, name="x")
    site = user_site()
    y = gg.map_custom(f, x, n_tasks=n_tasks) + 1
    with pytest.raises(gg.BackendError) as e:
        gg.eval(y, backend=backend, n_threads=2)
    assert isinstance(e.value.__cause__, KeyError)
    text = str(e.value)
    assert "map_custom" in text and "no such thing" in text and f"{site[0]}:{site[1] + 1}" in text and "x: F32" in text


def test_ctrl_c_in_a_function_is_ctrl_c() -> None:
    def f(dst: np.ndarray) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gg.eval(gg.map_custom(f, ne=1, ctx=gg.Context()))


def test_a_function_may_compute_another_graph_but_not_its_own() -> None:
    x = gg.Context().from_numpy(X)
    inner = gg.Graph().build_forward_expand(gg.sqr(x))

    def f(dst: np.ndarray, a: np.ndarray) -> None:
        gg.compute(inner, n_threads=2)
        dst[:] = inner.nodes[-1].numpy()

    y = gg.map_custom(f, x)
    np.testing.assert_allclose(gg.eval(y, n_threads=2), X * X, rtol=1e-6)
    own = gg.Graph()

    def again(dst: np.ndarray) -> None:
        gg.compute(own, n_threads=2)

    own.build_forward_expand(gg.map_custom(again, ne=1, ctx=x.ctx))
    with pytest.raises(gg.BackendError, match="by one of its own nodes"):
        gg.compute(own, n_threads=2)


def test_wrong_arguments_of_map_custom() -> None:
    x = gg.Context().from_numpy(X)
    for call, text in (
        (lambda: gg.map_custom(3, x), "fn must be a function"),  # pyright: ignore[reportArgumentType]
        (lambda: gg.map_custom(print, x, X), "src1 must be a Tensor"),  # pyright: ignore[reportArgumentType]
        (lambda: gg.map_custom(print, *[x] * 11), "at most 10"),
        (lambda: gg.map_custom(print), "needs a tensor or ne"),
        (lambda: gg.map_custom(print, x, dtype=gg.BF16, n_tasks=None), "n_tasks must be 1"),
        (lambda: gg.map_custom(print, x, n_tasks=0), "n_tasks must be"),
        (lambda: gg.map_custom(print, x, ne=(0,)), "positive"),
        (lambda: gg.map_custom(print, x, dtype="f32"), "no pyggml.DType"),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(gg.GGMLError, match=text):
            call()


def test_an_op_of_another_package(example_op: ModuleType) -> None:
    hypot = example_op.hypot
    x = gg.Context().from_numpy(X)
    y = hypot(gg.sqr(x), x, 0.5)
    want = 0.5 * np.hypot(X * X, X)
    for backend in ("cpu", "ref"):
        np.testing.assert_allclose(gg.eval(y, backend=backend, n_threads=2), want, rtol=1e-5)
    with pytest.raises(gg.ShapeError, match="of one shape"):
        hypot(x, x.T)
    with pytest.raises(gg.DTypeError, match="b cannot be F16 beside a of F32; it may be F32"):
        hypot(x, gg.cast(x, gg.F16))
    for wrong, text in ((0, "NULL"), ("hypot", "whole number"), (print, "whole number"), (ffi.NULL, "NULL")):
        with pytest.raises(gg.BackendError, match=text):
            gg.register_kernel(example_op.OP, wrong, gg.F32)
    assert "hypot" in gg.dump_dot(gg.Graph().build_forward_expand(y))


def test_a_kernel_by_ctypes_by_cffi_and_by_address(example_op: ModuleType) -> None:
    x = gg.Context().from_numpy(X)
    function = example_op.LIB.own_hypot_f32
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    for f in (function, address, ffi.cast("void *", address)):
        gg.register_kernel(example_op.OP, f, gg.F32, gg.F32, gg.F32)
        np.testing.assert_allclose(gg.eval(example_op.hypot(x, x)), np.hypot(X, X), rtol=1e-5)


def test_the_module_of_an_op_may_define_it_again() -> None:
    def define(shape: Callable[..., tuple[int, ...]], factor: int) -> gg.OpDef:
        return gg.OpDef(
            name="times",
            srcs=("a",),
            params=(),
            shape=shape,
            dtypes={(gg.F32,): gg.F32},
            ref=lambda a: factor * a,
            kernel="times",
            cost=gg.elementwise_cost(1),
            inplace=(),
            label="times",
        )

    def shape(srcs, params):
        return srcs[0].ne

    try:
        x = gg.Context().from_numpy(X)
        for factor in (2, 3):
            y = gg.record(define(shape, factor), (x,), {})
            np.testing.assert_allclose(gg.eval(y, backend="ref"), factor * X, rtol=1e-6)
        for theirs, name in ((OPS["silu"], "silu"), (OPS["times"], "times")):
            with pytest.raises(gg.GraphError, match=f"op {name} is defined twice"):
                dataclasses.replace(theirs, shape=dict if name == "times" else shape)
    finally:
        del OPS["times"]


def network(ctx: gg.Context) -> tuple[gg.Graph, gg.Tensor]:
    w, x = ctx.from_numpy(X, name="w"), ctx.from_numpy(X[:2] + 1, name="x")
    h = gg.silu(gg.mul_mat(w, x) * 0.5)
    cache = ctx.new_tensor(gg.F32, (3, 4), "cache")
    cache.set(np.zeros((4, 3)))
    stored = gg.cpy(h, cache[1:3])
    y = gg.mul_mat(stored, gg.sqr(h)) + gg.mul_mat(cache[1:3], h)
    return gg.Graph().build_forward_expand(gg.soft_max(y)), h


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 12)), st.permutations(["device", "cpu", "ref"]))
def test_a_backend_of_another_package(pins: set[int], order: list[str]) -> None:
    device.register()
    want_graph, _ = network(gg.Context())
    gg.compute(want_graph)
    g, _ = network(gg.Context())
    sched = gg.Scheduler(order)
    for i in pins:
        t = g.nodes[i] if i < g.n_nodes else g.nodes[-1]
        if t.op in ("mul_mat", "add", "scale", "sqr"):
            sched.set_tensor_backend(t, "device")
    sched.compute(g)
    np.testing.assert_allclose(g.nodes[-1].numpy(), want_graph.nodes[-1].numpy(), rtol=1e-4)
    if order[0] == "device":
        assert "split 0 on device" in sched.assignment(g) and sched.buffer_size("device") > 0


def test_a_device_alone() -> None:
    device.register()
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (8, 3), "x").set_input()
    y = gg.sqr(x)
    for _ in range(2):
        np.testing.assert_array_equal(gg.eval(y, inputs={x: X}, backend="device"), X * X)
    with pytest.raises(gg.BackendError, match="device"):
        gg.eval(gg.silu(y), backend="device")
    with pytest.raises(gg.BackendError, match="can write into cache"):
        gg.eval(gg.cpy(x, ctx.from_numpy(X, name="cache")), inputs={x: X}, backend="device")


def test_an_interrupt_on_the_way_into_python(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_call":
            sys.setprofile(None)
            raise KeyboardInterrupt

    with gg.Context() as ctx:
        out = gg.map_custom(lambda d, a: np.copyto(d, a), ctx.from_numpy(np.ones(4), gg.F32))
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            gg.eval(out, n_threads=1)
    finally:
        sys.setprofile(None)
    assert capfd.readouterr().err == ""


def _define(**changes: Any) -> gg.OpDef:
    fields: dict[str, Any] = {
        "name": "own_scale",
        "srcs": ("a",),
        "params": ("s", "t"),
        "shape": lambda srcs, params: srcs[0].ne,
        "dtypes": {(gg.F32,): gg.F32},
        "ref": lambda a, s, t: s * a + t,
        "kernel": "own_scale",
        "cost": gg.elementwise_cost(1),
        "inplace": (),
        "label": "",
    }
    return gg.OpDef(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "op : name must be a name, not ''"),
        ({"srcs": "a"}, r'op own_scale: srcs must be a tuple of names, \("a",\), not \'a\''),
        ({"params": ("s", 1)}, "params must be a tuple of names"),
        ({"inplace": [0]}, "inplace must be a tuple of indices"),
        ({"kernel": 1}, "kernel must be the stem of C symbols"),
        ({"shape": (1,)}, "shape must be a function"),
        ({"ref": None}, "ref must be a function, not None"),
        ({"cost": 1}, "cost must be a function, not 1"),
        ({"dtypes": {gg.F32: gg.F32}}, "a row of dtypes is a tuple with a type for each of a, not F32"),
        ({"dtypes": {(gg.F32,) * 3: gg.F32}}, "a row of dtypes is a tuple"),
        ({"dtypes": {(gg.F32,): "F32"}}, "dtypes must give a DType"),
        ({"dtypes": [gg.F32]}, "dtypes must be a dict of rows"),
    ],
)
def test_a_definition_is_checked(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(gg.GraphError, match=says):
        _define(**changes)
    assert "own_scale" not in OPS


def test_an_error_in_a_reference_shows_its_line() -> None:
    """Like that of a function of map_custom, it is the cause of the error that names the node."""

    def wrong(a: np.ndarray, s: float, t: float) -> np.ndarray:
        return a[7]

    try:
        y = gg.record(_define(ref=wrong), (gg.Context().from_numpy(X),), {"s": 1.0, "t": 1.0})
        with pytest.raises(gg.BackendError, match="own_scale: index 7 is out of bounds") as e:
            gg.eval(y, backend="ref")
        cause = e.value.__cause__
        assert isinstance(cause, IndexError)
        assert traceback.extract_tb(cause.__traceback__)[-1].name == "wrong"
    finally:
        OPS.pop("own_scale", None)


def test_what_is_recorded_is_what_was_defined() -> None:
    x = gg.Context().from_numpy(X)
    try:
        op = _define()
        y = gg.record(op, (x,), {"t": 1.0, "s": 3.0})  # in any order: kernels get them in that of `params`
        assert list(y.op_params) == ["s", "t"]
        np.testing.assert_allclose(gg.eval(y, backend="ref"), 3 * X + 1, rtol=1e-6)
        with pytest.raises(gg.BackendError, match="register_kernel gives it a kernel; the backend ref computes"):
            gg.eval(y)
        for srcs, params, says in (
            ((x,), {"s": 1}, "its parameters are s, t; given were s"),
            ((x,), {"s": 1, "t": 1, "u": 1}, "given were s, t, u"),
            ((x, x), {"s": 1, "t": 1}, r"it has 1 sources \(a\), 2 were given"),
            ((), {"s": 1, "t": 1}, "0 were given"),
            ([x], {"s": 1, "t": 1}, "given as a tuple"),
            (x, {"s": 1, "t": 1}, "given as a tuple, .* not as Tensor"),
        ):
            with pytest.raises(gg.GraphError, match=says):
                gg.record(op, srcs, params)  # pyright: ignore[reportArgumentType]
        with pytest.raises(gg.GraphError, match="kernel=None is for views: name a kernel"):
            gg.record(_define(kernel=None), (x,), {"s": 1, "t": 1})
    finally:
        OPS.pop("own_scale", None)


def test_shapes_of_one_to_four_numbers() -> None:
    x = gg.Context().from_numpy(X)
    try:
        for ne, shape in ((1, (1,)), ((1,), (1,)), ((2, 3), (3, 2)), ((1, 2, 3), (3, 2, 1))):
            op = _define(shape=lambda srcs, params, ne=ne: ne, params=(), ref=lambda a: np.zeros(()))
            assert gg.record(op, (x,), {}).ne[::-1][4 - len(shape) :] == shape
        for bad in ((0,), (1, 2, 3, 4, 5), "x", None, ()):
            with pytest.raises(gg.ShapeError, match="own_scale: ne must be one to four positive numbers"):
                gg.record(_define(shape=lambda srcs, params, ne=bad: ne, params=()), (x,), {})
    finally:
        OPS.pop("own_scale", None)


def test_a_function_that_returns_an_array_is_refused() -> None:
    x = gg.Context().from_numpy(X)
    with pytest.raises(gg.BackendError, match=r"fn returned an array: .*\(dst\[:\] = \.\.\.\)"):
        gg.eval(gg.map_custom(lambda dst, a: 2 * a, x))
    np.testing.assert_allclose(gg.eval(gg.map_custom(lambda dst, a: np.exp(a, out=dst), x)), np.exp(X), rtol=1e-6)


def test_a_backend_that_lacks_something() -> None:
    class Half:
        name, buft, alignment = "half", "CPU", 64

    gg.register_backend("half", lambda n: Half())  # pyright: ignore[reportArgumentType]
    says = "has no supports_op, supports_buft, fuse, reads, compile: pyggml.backends.protocol.Backend says"
    for backend in ("half", Half()):
        with pytest.raises(gg.BackendError, match=says):
            gg.Scheduler([backend])  # pyright: ignore[reportArgumentType]
