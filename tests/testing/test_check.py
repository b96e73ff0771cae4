"""What a package checks its own op, kernel or backend with."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import lower
from pyggml.backends.cpu.isa import own_kernel
from pyggml.backends.ref import RefBackend
from pyggml.opdef import OPS
from pyggml.testing import Mismatch, Src, cases_of, check_backend, check_gradient, check_kernel, check_op, run_case
from pyggml.testing.harness import Case
from pyggml.testing.plugin import PROFILES

from ..backend import device


def test_the_example_package_passes_its_own_test(example_op: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("test_hypot", Path(__file__).parents[1] / "example_op/test_hypot.py")
    assert spec is not None and spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    tests.test_hypot()


def test_a_kernel_that_is_not_registered(planted: ctypes.CDLL) -> None:
    types = (gg.F32, gg.F32, gg.F32)
    check_kernel(OPS["add"], planted.none, *types, max_examples=20)
    check_kernel(OPS["add"], planted.none, *types, cases=cases_of(OPS["add"], types=types[:2]), max_examples=20)
    with pytest.raises(Mismatch, match=r"result = .* ne \[3, 1, 1, 1\]"):
        check_kernel(OPS["add"], planted.tail, *types, cases=cases_of(OPS["add"], types=types[:2]))
    for number in (7, 9, 12):  # whatever two of them mean to pyggml
        ctypes.c_int.in_dll(planted, "returned").value = number
        with pytest.raises(gg.BackendError, match=rf"kernel status {number}\b"):
            check_kernel(OPS["add"], planted.status, *types)
    np.testing.assert_array_equal(gg.eval(gg.Context().from_numpy(np.ones(7, np.float32)) + 1), np.full(7, 2))


@pytest.mark.parametrize("name", ["add", "silu", "scale", "concat", "argsort", "cpy"])
def test_cases_follow_from_a_definition(name: str) -> None:
    """Those of pyggml's ops, whose kernels have no errors that are known."""
    op = OPS[name]
    check_op(op, cases_of(op, roundings=8), max_examples=15)


def test_cases_with_shapes_values_and_a_bound() -> None:
    op = OPS["mul_mat"]
    k_m_n = st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
    cases = cases_of(
        op,
        types=(gg.F32, gg.F32),
        shapes=k_m_n.map(lambda s: ((s[0], s[1]), (s[0], s[2]))),
        values=[lambda rng, shape: rng.random(shape)] * 2,
        nmse=1e-13,
        special=False,
    )
    check_op(op, cases, max_examples=15)


def with_gradient(grad) -> gg.OpDef:
    return dataclasses.replace(OPS["sqr"], name="own_sqr", kernel="sqr", grad=grad, shape=own_shape)


def own_shape(srcs, params):
    return srcs[0].ne


@pytest.mark.parametrize(
    ("grad", "text"),
    [
        (lambda node, gy: (gy * node.src[0],), "along a direction it is"),  # 2 is forgotten
        (lambda node, gy: (gy * node.src[0] * 2 + gy.sum() * 1e-3,), "along a direction it is"),
        (lambda node, gy: (gy * node / node.src[0] * 2 + gg.log(-gg.sqr(node)),), "it is not finite"),
    ],
)
def test_a_wrong_gradient_is_found(grad, text: str) -> None:
    try:
        op = with_gradient(grad)
        with pytest.raises(Mismatch, match=text):
            check_gradient(op, max_examples=20)
        with pytest.raises(Mismatch, match=text):
            check_op(op, max_examples=20)
    finally:
        del OPS["own_sqr"]


def test_a_gradient_that_is_right() -> None:
    try:
        op = with_gradient(lambda node, gy: (gy * node.src[0] * 2,))
        check_gradient(op, cases_of(op, types=(gg.F32,)), max_examples=20)
        with pytest.raises(gg.BackendError, match="no case of count_equal had a gradient"):
            check_gradient(OPS["count_equal"], max_examples=3)
    finally:
        del OPS["own_sqr"]


def test_no_case_is_accepted() -> None:
    op = OPS["mul_mat"]
    cases = cases_of(op, types=(gg.F32, gg.F32), shapes=st.just(((3, 1), (4, 1))), special=False)
    with pytest.raises(gg.BackendError, match="no case of mul_mat was accepted"):
        check_op(op, cases, max_examples=1)


def test_a_message_says_all_that_is_needed(planted: ctypes.CDLL) -> None:
    case = Case((Src(gg.F32, (3, 2)), Src(gg.F32, (3, 2))), gg.add, 0.0)
    run_case(case)
    kernel = own_kernel(OPS["add"], planted.tail)
    with pytest.raises(Mismatch, match=r"(?s)^add: the result must be equal; element \[2, 0, 0, 0\].*2 threads.*b = "):
        run_case(case, n_threads=2, kernel=kernel)


def test_an_op_without_kernel() -> None:
    with pytest.raises(gg.BackendError, match="hypotenuse has no kernel to check"):
        check_op(_without_kernel())


def _without_kernel() -> gg.OpDef:
    op = gg.OpDef(
        name="hypotenuse",
        srcs=("a",),
        params=(),
        shape=lambda srcs, params: srcs[0].ne,
        dtypes={(gg.F32,): gg.F32},
        ref=np.abs,
        kernel=None,
        cost=gg.elementwise_cost(1),
        inplace=(),
        label="",
    )
    del OPS[op.name]
    return op


def test_a_backend_of_device_memory() -> None:
    gg.register_device_buffer("XOR", device.XorBuffer)
    assert set(check_backend(device.Device(), ["add", "mul_mat", "sqr", "silu"], max_examples=5)) == {
        "add",
        "mul_mat",
        "sqr",
    }
    with pytest.raises(gg.BackendError, match="has computed none"):
        check_backend(device.Device(), ["silu"], max_examples=5)


def test_an_error_of_a_backend_is_found() -> None:
    class Wrong(RefBackend):
        name = "wrong"

        def compile(self, steps, resolve):
            program = super().compile(steps, resolve)
            run = program.run

            def wrong(interruptible: bool = True, n_threads: int | None = None) -> None:
                run()
                for t in program.nodes:
                    if t.op == "silu":
                        t.store(t.elements() * 1.01)

            program.run = wrong
            return program

    assert check_backend("ref", ["silu", "cpy"], max_examples=5) == ["cpy", "silu"]
    with pytest.raises(Mismatch, match=r"(?s)silu: NMSE 0.0001 .*\(wrong\).*ne \[1, 1, 1, 1\]"):
        check_backend(Wrong(), ["cpy", "silu"])


def test_the_plugin_has_profiles() -> None:
    for name, n in PROFILES.items():
        profile = settings.get_profile(name)
        assert profile.max_examples == n and profile.deadline is None
    assert settings().deadline is None


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "pyggml.testing")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pyggml\[test\]'"):
        importlib.import_module("pyggml.testing")


def test_importing_it_switches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def switches() -> object:
        return repr(settings()), dict(os.environ), np.geterr(), {k: v for k, v in vars(lower).items() if k.isupper()}

    before = switches()
    for name in [name for name in sys.modules if name.startswith("pyggml.testing")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("pyggml.testing")
    assert switches() == before


def test_what_is_no_op_is_named() -> None:
    for op in ("silu", gg.silu, None):
        with pytest.raises(gg.BackendError, match=r"the definition of an op \(OpDef\) is checked, not .*OPS\['silu'\]"):
            check_op(op)  # pyright: ignore[reportArgumentType]
    with pytest.raises(gg.BackendError, match="no op is called 'sillu'; near: silu"):
        check_backend("ref", ["add", "sillu"])
