"""Arguments in another order, and parameters in place of tensors: the error says what is meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml import missing
from pyggml.opdef import OPS

CTX = gg.Context()
X = CTX.from_numpy(np.ones((2, 4)), gg.F32, "x")
W = CTX.from_numpy(np.ones((4, 3)), gg.F32, "w")
B = CTX.from_numpy(np.ones((5, 2, 4)), gg.F32, "b")
Q = CTX.from_numpy(np.ones((3, 32)), gg.Q4_0, "q")
Y = CTX.from_numpy(np.ones((2, 32)), gg.F32, "y")
IDS = CTX.from_numpy([0, 1], name="ids")
ROPE = (0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)


def _graph() -> gg.Graph:
    return gg.Graph().build_forward_expand(X + 1)


def _own(a: Any, b: Any) -> gg.Tensor:
    """An op of another package."""

    def shape(srcs: Any, params: Any) -> Any:
        gg.rule(srcs[0].ne[1] <= srcs[1].ne[1], "a has more rows than b")
        return srcs[1].ne

    op = gg.OpDef(
        "hints_own",
        ("a", "b"),
        (),
        shape,
        {(gg.F32, gg.F32): gg.F32},
        np.add,
        "hints_own",
        gg.elementwise_cost(1),
        (),
        "",
    )
    del OPS[op.name]
    return gg.record(op, (a, b), {})


CALLS: dict[str, tuple[Callable[[], Any], type[gg.GGMLError], str]] = {
    "new_tensor": (
        lambda: CTX.new_tensor((4,), gg.F32),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "new_tensor: the type comes before the shape: new_tensor(F32, (4,))\n  at ",
    ),
    "from_numpy": (
        lambda: CTX.from_numpy(gg.F16, np.ones(3)),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "from_numpy: the array comes before the type: from_numpy(array, F16)",
    ),
    "from_bytes": (
        lambda: CTX.from_bytes(gg.Q8_0, b"", 32),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "from_bytes: the data comes first, then the type, then the shape",
    ),
    "NumPy's type": (
        lambda: CTX.new_tensor(np.float32, 4),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "<class 'numpy.float32'> is no pyggml.DType (is pyggml.F32 meant?)",
    ),
    "a type's name": (
        lambda: CTX.from_numpy([1.0], "q4_0"),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "'q4_0' is no pyggml.DType (is pyggml.Q4_0 meant?)",
    ),
    "quantize": (
        lambda: gg.quantize(gg.Q4_0, np.ones(32)),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "the array comes before the type: quantize(array, Q4_0)",
    ),
    "dequantize": (
        lambda: gg.dequantize(gg.Q4_0, b""),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "the data comes before the type: dequantize(data, Q4_0)",
    ),
    "dequantize a tensor": (  # its values in F32, read as bytes, had whole blocks
        lambda: gg.dequantize(CTX.from_numpy(np.ones((2, 288)), gg.Q4_0), gg.Q4_0),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "dequantize takes bytes, not a Tensor: t.numpy() has its values, t.tobytes() its bytes",
    ),
    "dequantize values": (
        lambda: gg.dequantize(np.ones(32, np.float32), gg.BF16),
        gg.DTypeError,
        "dequantize takes bytes of BF16, not float32",
    ),
    "save an array": (
        lambda: gg.save("never.gguf", {"good": np.ones(3), "bad": np.ones(3, complex)}),
        gg.DTypeError,
        "save: bad: from_numpy: no tensor type stores complex128",
    ),
    "save what is not computed": (
        lambda: gg.save("never.gguf", {"good": X, "sum": X + 1}),
        gg.AllocError,
        "save: sum: ",
    ),
    "None": (lambda: X.set(None), gg.DTypeError, "set: values of type object cannot be stored in x: F32"),
    "text": (lambda: X.set("1"), gg.DTypeError, "set: values of type <U1 cannot be stored in x: F32"),
    "types": (lambda: gg.mul_mat(Y, Q), gg.DTypeError, "Exchanged they fit: mul_mat(b, a)"),
    "shapes": (lambda: gg.mul_mat(B, X), gg.ShapeError, "Exchanged they fit: mul_mat(b, a)"),
    "rows": (lambda: gg.get_rows(IDS, X), gg.DTypeError, "Exchanged they fit: get_rows(b, a)"),
    "repeats": (lambda: gg.sub(X, B), gg.ShapeError, "Exchanged they fit: sub(b, a)"),
    "own op": (lambda: _own(W, X), gg.ShapeError, "a has more rows than b. Exchanged they fit: hints_own(b, a)"),
    "a @ b": (
        lambda: gg.mul_mat(X, W),
        gg.ShapeError,
        "4 is not 3. As in NumPy they fit: a @ b, which is mul_mat(cont(transpose(b)), a)",
    ),
    "b @ a": (
        lambda: gg.mul_mat(W, X),
        gg.ShapeError,
        "3 is not 4. As in NumPy they fit: b @ a, which is mul_mat(cont(transpose(a)), b)",
    ),
    "scale": (
        lambda: gg.scale(2.0, X),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "a must be a Tensor, not float; it is called as scale(a, s",
    ),
    "rms_norm": (
        lambda: gg.rms_norm(X, W),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "not a Tensor; it is called as rms_norm(a, eps",
    ),
    "soft_max_ext": (
        lambda: gg.soft_max_ext(X, 0.5, None, 0.0),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "mask must be a Tensor, not float; it is called as soft_max_ext(a, mask=None, scale=1.0, max_bias=0.0",
    ),
    "rope_ext": (
        lambda: gg.rope_ext(X, IDS, 4, None, *ROPE),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "c must be a Tensor, not int; it is called as rope_ext(a, b, c, n_dims, mode",
    ),
    "views": (
        lambda: gg.view_1d(4, X, 0),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "a must be a Tensor, not int; it is called as view_1d(a, ne0, offset",
    ),
    "an array": (
        lambda: gg.add(X, np.ones(4)),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "b must be a Tensor, not ndarray; it is called as add(a, b). Context.from_numpy makes a tensor",
    ),
    "compute": (
        lambda: gg.compute(X),  # pyright: ignore[reportArgumentType]
        gg.GraphError,
        "compute takes a Graph, not Tensor: Graph().build_forward_expand(t) makes one",
    ),
    "eval": (lambda: gg.eval([X, W]), gg.GraphError, "eval takes tensors, eval(a, b), not list"),  # pyright: ignore[reportArgumentType]
    "expand": (
        lambda: gg.Graph().build_forward_expand([X]),  # pyright: ignore[reportArgumentType]
        gg.GraphError,
        "build_forward_expand takes one Tensor at a time, not list",
    ),
    "inputs": (
        lambda: gg.compute(_graph(), {"z": 1}),
        gg.GraphError,
        "inputs: 0 leafs of this graph are called 'z', not one; they are called x",
    ),
    "dump_dot": (
        lambda: gg.dump_dot("g.dot", _graph()),  # pyright: ignore[reportArgumentType]
        gg.GraphError,
        "only a Graph can be drawn, not str: the graph comes before the path",
    ),
    "dump_dot of a tensor": (
        lambda: gg.dump_dot(X),  # pyright: ignore[reportArgumentType]
        gg.GraphError,
        "only a Graph can be drawn, not Tensor: Graph().build_forward_expand(t) makes one",
    ),
    "dump_dot of a picture": (
        lambda: gg.dump_dot(_graph(), "g.svg"),
        gg.GraphError,
        "dump_dot writes Graphviz's text: render(graph, 'g.svg') draws",
    ),
    "reshape": (
        lambda: gg.reshape(X, (4, 2)),  # pyright: ignore[reportArgumentType]
        gg.DTypeError,
        "b must be a Tensor, not tuple; it is called as reshape(a, b)",
    ),
    "[] =": (lambda: X.__setitem__(0, 1), gg.GraphError, "t[1:3].set(array) writes values now"),
    "save": (
        lambda: gg.save({"x": X}, "x.gguf"),  # pyright: ignore[reportArgumentType]
        gg.GGUFError,
        "the path comes before the tensors: save(path, tensors)",
    ),
    "set_tensor_backend": (
        lambda: gg.Scheduler().set_tensor_backend("ref", X + 1),  # pyright: ignore[reportArgumentType]
        gg.GraphError,
        "only nodes run on a backend, not str: the node comes before the backend",
    ),
    "register_kernel": (
        lambda: gg.register_kernel("add", 1, gg.F32),  # pyright: ignore[reportArgumentType]
        gg.BackendError,
        "register_kernel takes the definition of an op (OpDef), not 'add'",
    ),
    "register_backend": (
        lambda: gg.register_backend(_graph, "mine"),  # pyright: ignore[reportArgumentType]
        gg.BackendError,
        "register_backend takes a name and a function that makes a backend, not <function",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_hint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, error, says = CALLS[name]
    with pytest.raises(error) as e:
        call()
    assert says in str(e.value)


def test_no_hint_where_neither_order_fits() -> None:
    with pytest.raises(gg.ShapeError) as e:
        gg.mul_mat(X, CTX.from_numpy(np.ones((7, 5)), gg.F32))
    assert "Exchanged they fit" not in str(e.value)
    with pytest.raises(gg.ShapeError) as e:
        gg.add(X, W)
    assert "Exchanged they fit" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("softmax", "module 'pyggml' has no attribute 'softmax': pyggml.soft_max(a)"),
        ("ggml_mul_mat", "'ggml_mul_mat': pyggml.mul_mat"),
        ("GGML_TYPE_Q4_0", "'GGML_TYPE_Q4_0': pyggml.Q4_0"),
        ("soft_maxx", "'soft_maxx': pyggml.soft_max"),
        ("zeros", "'zeros': pyggml.Context().from_numpy(array)"),
        ("no_such_thing", "module 'pyggml' has no attribute 'no_such_thing'"),
    ],
)
def test_names_of_other_libraries(name: str, says: str) -> None:
    with pytest.raises(AttributeError) as e:
        getattr(gg, name)
    assert says in str(e.value)
    assert not hasattr(gg, name)


def test_hints_name_what_there_is() -> None:
    for text in vars(missing)["_MEANT"].values():
        assert all(hasattr(gg, name) for name in re.findall(r"pyggml\.(\w+)", text)), text


V = gg.Var("n", hi=16)
ZERO = gg.Var("z", hi=16)
ZERO.bind(0)
TWO = CTX.new_tensor(gg.F32, (4, gg.Var("k", hi=8) * gg.Var("m", hi=8)))

WAYS: dict[str, tuple[Callable[[], Any], type[gg.GGMLError], str]] = {
    "no tensors": (lambda: gg.eval(), gg.GraphError, "eval takes tensors, eval(a, b); none was given"),
    "backends": (
        lambda: gg.eval(X + 1, backend=["cpu"]),  # pyright: ignore[reportArgumentType]
        gg.BackendError,
        "backend must be the name of one, such as 'cpu' or 'ref', not ['cpu']; pyggml.Scheduler(backends) runs",
    ),
    "a Var without hi": (
        lambda: gg.Var("q"),
        gg.GraphError,
        "a Var needs hi, the largest value that it may take: Var('q', ",
    ),
    "a Var as a number": (
        lambda: f"{V:5d}",
        gg.Varies,
        "n is no number before the graph runs: f'{int(n):5d}' shows what it is now",
    ),
    "a Size as a number": (lambda: f"{V + 1:.2f}", gg.Varies, "f'{int(n + 1):.2f}' shows"),
    "a Size is bound": (
        lambda: (V + 1).bind(3),
        gg.GraphError,
        "n + 1 cannot be bound to 3: it follows from what is bound, n.bind(..)",
    ),  # pyright: ignore
    "0 elements": (
        lambda: CTX.new_tensor(gg.F32, (4, ZERO)),
        gg.ShapeError,
        "z is not positive for z = 0). z may be 0, by lo=0 or z.bind(0): Var('z', hi=16, lo=1) is not",
    ),
    "two Vars": (
        lambda: gg.eval(TWO + 1, inputs={TWO: np.ones((6, 4))}),
        gg.ShapeError,
        "is 6 does not tell k and m, which are now k = 1, m = 1: bind them, or give inputs that have one of them",
    ),
    "t.sum(dim=)": (lambda: X.sum(dim=1), gg.OptionError, "t.sum has no option 'dim' (is 'axis' meant?)"),  # pyright: ignore
    "t.max(keepdim=)": (lambda: X.max(0, keepdim=True), gg.OptionError, "(is 'keepdims' meant?)"),  # pyright: ignore
    "sum(dim=)": (lambda: gg.sum(X, dim=1), gg.OptionError, "sum has no option 'dim' (is 'axis' meant?)"),  # pyright: ignore
    "mean(dim=)": (lambda: gg.mean(X, dim=1), gg.OptionError, "mean has no option 'dim' (is 'axis' meant?)"),  # pyright: ignore
    "soft_max(dim=)": (lambda: gg.soft_max(X, dim=1), gg.OptionError, "(is 'axis' meant?)"),  # pyright: ignore
    "soft_max(axis=2)": (lambda: gg.soft_max(X, axis=2), gg.ShapeError, "axis must name axes of shape (2, 4)"),
    "concat of a list": (
        lambda: gg.concat([X, X], 0),  # pyright: ignore
        gg.OptionError,
        "concat(a, b, dim). np.concatenate([a, b], axis) joins any number",
    ),
    "concat(axis=)": (lambda: gg.concat(X, X, axis=0), gg.OptionError, "np.concatenate([a, b], axis)"),  # pyright: ignore
    "tensor()": (
        lambda: gg.tensor([1]),
        gg.GraphError,
        "pyggml.Context().from_numpy(array) makes a tensor of an array",
    ),  # pyright: ignore
    "var()": (lambda: gg.var(X), gg.GraphError, "a.var(axis) the variance of a tensor"),  # pyright: ignore
    "graph()": (lambda: gg.graph(), gg.GraphError, "pyggml.Graph() makes a graph"),  # pyright: ignore
}


@pytest.mark.parametrize("name", WAYS)
def test_ways_of_numpy_and_torch(name: str) -> None:
    call, error, says = WAYS[name]
    with pytest.raises(error) as e:
        call()
    assert says in str(e.value)


def test_what_works_as_in_numpy() -> None:
    assert (f"{V}", f"{V:>3}", f"{V + 1:6}|") == ("n", "  n", "n + 1 |")
    with CTX:
        assert gg.eval(gg.arange(3)).tolist() == [0, 1, 2] and gg.eval(gg.arange(1, 3)).tolist() == [1, 2]
        assert gg.arange(V + 1).shape == (V + 1,)
    b = np.arange(24, dtype=np.float32).reshape(2, 3, 4) % 5
    t = CTX.from_numpy(b)
    for axis in (-3, 1, 2, -1):
        want = np.exp(b) / np.exp(b).sum(axis=axis, keepdims=True)
        np.testing.assert_allclose(gg.eval(gg.soft_max(t, axis=axis)), want, rtol=1e-5)
