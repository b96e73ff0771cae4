"""Tensors in Python expressions, as NumPy has them: operators, indices, ranks, values; and files of tensors."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg

A = (np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7) / 3
ROW, COL = np.arange(4) + 1.0, np.arange(3).reshape(3, 1) + 1
VALUES = {"a": A, "m": A[0], "p": abs(A) + 0.5, "v": A[1, 2], "i": np.array([[1, -2, 3]], np.int32)}

EXPRESSIONS = """-a; abs(a); 1/p; 2/p; p**2; m**3; a**0; a**1; p**0.5; p**-1; p**-1.5; p**0.3; 2**a; np.float64(2.5)*a
ROW+a; a+ROW; ROW-a; a-ROW; ROW/p; a*COL; COL*a; COL-m; v+a; v-a; v*m; v/p; m[:1]+m; m[:,1:2]*v; np.ones(())+a; 3-m
np.arange(4)+m; np.float32(2)/p; np.ones((2,3),bool)+m[:2,:3]; m@m.T; a@m.T; m@a.T[:,:,0]; m@ROW; np.ones((2,3))@m
m[1]@m[2]; v@m.T; m@np.ones((2,4,5)); ROW@m.T; m.T@COL; a.T; v.T; -i; i+1; 1-i; i*0.5; i/2; 2/i; i+m[:,:3]; m[:,:3]/i
i**2; a[1]; a[1:,::2]; a[...,1]; a[:,None,1,:2]; a[-1,-2]; a[0][1:][0]; a[:,::2,1::2]; m[:1]; m[:1]+1; m[:1]@m.T
m[:,:1]@a[:1,:1]; a[:1]@v
i@m[:,:3].T; m[:,:3]@i.T; i@i.T; i@np.ones((3,2)); np.ones((2,3),int)@i.T"""


@pytest.mark.parametrize("text", [e.strip() for e in EXPRESSIONS.replace("\n", ";").split(";")])
def test_as_numpy(text: str) -> None:
    ctx = gg.Context()
    names = {"np": np, "ROW": ROW, "COL": COL, "abs": abs, "sum": sum, "list": list}
    node = eval(text, names | {k: ctx.from_numpy(v) for k, v in VALUES.items()})
    want = np.asarray(eval(text, names | VALUES))
    got = gg.eval(node, backend="ref")
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


KEYS = st.one_of(
    st.integers(-3, 2),
    st.builds(slice, *[st.none() | st.integers(-4, 4)] * 2, st.none() | st.integers(-2, 3).filter(bool)),
    st.just(None),
    st.just(...),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(KEYS, max_size=5).map(tuple))
def test_indices(key: tuple[Any, ...]) -> None:
    t = gg.Context().from_numpy(A)
    try:
        want = A[key]
    except IndexError:
        want = None
    backwards = any(isinstance(k, slice) and (k.step or 1) < 0 for k in key)
    if want is None or not want.size or want.ndim > 4 or backwards:
        with pytest.raises(gg.ShapeError, match="view: index"):
            t[key]
        return
    view = t[key]
    assert view.shape == want.shape and view.view_src is t
    np.testing.assert_array_equal(view.numpy(), want)


def test_indices_of_blocks_and_what_is_no_index() -> None:
    q = gg.Context().from_numpy(np.arange(128).reshape(2, 64), gg.Q8_0)
    np.testing.assert_array_equal(q[1, 32:].numpy(), q.numpy()[1, 32:])
    for key in (np.s_[:, 1], np.s_[:, 16:48], np.s_[:, ::2], np.s_[..., None]):
        with pytest.raises(gg.ShapeError, match="block"):
            q[key]
    for key in ([0, 1], 1.5, True, q, "a"):
        with pytest.raises(gg.DTypeError, match="whole number"):
            q[key]


def test_ranks_are_kept_through_ops() -> None:
    ctx = gg.Context()
    x, w = ctx.from_numpy(np.ones((1, 4), np.float32)), ctx.from_numpy(np.ones((1, 4), np.float32))
    ids = ctx.from_numpy([0])
    assert (x.shape, gg.rms_norm(x, 1e-5).shape, gg.mul_mat(w, x).shape) == ((1, 4), (1, 4), (1, 1))
    assert gg.mul_mat(w, x[0]).shape == (1,) and gg.get_rows(w, ids).shape == (1, 4)
    assert gg.sum(x).shape == (1,) and gg.argmax(x).shape == (1,) and gg.cont_1d(x, 4).shape == (4,)
    assert gg.eval(gg.soft_max(x + x[0])).shape == (1, 4)


def test_types_of_values() -> None:
    ctx = gg.Context()
    kinds = [([1, 2], gg.I32), ([1.5], gg.F32), ([True], gg.I32), (np.ones(2), gg.F32), (np.uint8([3]), gg.I32)]
    kinds += [(np.arange(3), gg.I64), (np.float16([1]), gg.F16), (3, gg.I32)]
    for values, dtype in kinds:
        assert ctx.from_numpy(values).dtype is dtype
    with pytest.raises(gg.DTypeError, match="2147483648 cannot be stored"):
        ctx.from_numpy([2**31])


def test_eval_and_inputs_that_persist() -> None:
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, 3, "x").set_input()
    y, z = x * 2, x + 1
    with pytest.raises(gg.AllocError, match=r"pyggml\.eval"):
        y.numpy()
    one, two = gg.eval(y, z, inputs={x: [1, 2, 3]})
    assert one.tolist() == [2, 4, 6] and two.tolist() == [2, 3, 4]
    assert gg.eval(y).tolist() == [2, 4, 6] and gg.eval(x).tolist() == [1, 2, 3]
    g = gg.Graph().build_forward_expand(y)
    for _ in range(3):
        gg.compute(g)
        assert y.numpy().tolist() == [2, 4, 6]


def test_what_things_look_like() -> None:
    ctx = gg.Context()
    head = gg.Var("head", 7, 3)
    assert repr(head) == "<Var head = 3 of 0..7>" and repr(5 + head) == repr(head + 5) == "head + 5"
    y = -ctx.from_numpy(A)
    assert repr(ctx) == "<Context 1 leafs of 96 bytes, 1 nodes>"
    sched = gg.Scheduler(("cpu",))
    sched.set_tensor_backend(y, "cpu")
    assert repr(sched) == "<Scheduler cpu (0 bytes); 1 pinned nodes, 0 graphs>"
    sched.set_tensor_backend(y, None)
    assert "0 pinned" in repr(sched)


def test_pinned_nodes_are_freed() -> None:
    sched = gg.Scheduler(("cpu", "ref"))
    y = -gg.Context().from_numpy(A)
    g = gg.Graph().build_forward_expand(y)
    sched.set_tensor_backend(y, "ref")
    sched.compute(g)
    gone = weakref.ref(y)
    del y, g
    gc.collect()
    assert gone() is None


METADATA = {"s": "hé", "n": 3, "low": -3, "big": 2**40, "huge": 2**63, "f": 0.1, "b": True, "names": ["a", "b"]}


def test_save_and_load(tmp_path: Path) -> None:
    path, ctx = tmp_path / "t.gguf", gg.Context()
    data = np.random.default_rng(0).bytes(1 << 14)
    tensors = {t.name: ctx.from_bytes(data[: 2 * t.row_size(256)], t, (256, 2)) for t in gg.DType}
    tensors |= {"one row": ctx.from_numpy(A[:1, :1]), "view": ctx.from_numpy(A)[:, 1:, ::2]}
    gg.save(path, tensors | {"array": A}, METADATA | {"list": [1, 2], "array": np.int8([1, 2])})
    found = gg.load(path)
    for name, t in tensors.items():
        assert (found[name].shape, found[name].dtype, found[name].tobytes()) == (t.shape, t.dtype, t.tobytes())
    assert list(found) == [*tensors, "array"] and {k: found.metadata[k] for k in METADATA} == METADATA
    assert np.asarray(found.metadata["array"]).dtype == np.int8
    gg.save(path, found, found.metadata)  # over the file that it came from
    assert gg.load(path).metadata.keys() == found.metadata.keys()
    found["one row"].set(np.zeros((1, 1, 4)))
    for bad in ({"": A}, {"x" * 65: A}, {1: A}, 3):
        with pytest.raises(gg.GGUFError, match=r"1 to 64 bytes|mapping"):
            gg.save(path, bad)  # pyright: ignore[reportArgumentType]
    for value in (None, 2**65, object(), [1, "a"], [[1], [2]]):
        with pytest.raises(gg.GGUFError, match="metadata k: GGUF has no type"):
            gg.save(path, {}, {"k": value})
    with pytest.raises(gg.AllocError, match="no memory"):
        gg.save(path, {"y": -ctx.from_numpy(A)})
    assert list(gg.load(path)) == list(found) and [p.name for p in tmp_path.iterdir()] == ["t.gguf"]


def test_a_checkout_that_is_not_installed_says_so(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "pyggml").symlink_to(root / "pyggml")
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'pyggml' not in str(getattr(f, '__dict__', ''))]"
    )
    code += f"; sys.path.insert(0, {str(tmp_path)!r}); import pyggml"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "whose C library is not built" in done.stderr and "pip install" in done.stderr


def test_errors_speak_of_numpy_shapes() -> None:
    with gg.Context() as ctx:
        w = ctx.from_numpy(np.ones((64, 32), np.float32), gg.Q4_0, "w")
        x, y, z = (ctx.from_numpy(np.ones(s, np.float32)) for s in ((2, 5, 32), (7, 9), (3, 32, 4)))
        with pytest.raises(gg.ShapeError, match=r"T: the blocks of Q4_0 .* gg.mul_mat\(w, x\)(.|\n)*shape \(64, 32\)"):
            x @ w.T
        with pytest.raises(gg.ShapeError, match=r"@: the last dimension of a, 32, is not b's last but one, 7(.|\n)*at"):
            x @ y
        with pytest.raises(gg.ShapeError, match=r"@: the dimensions before the last two, \(2,\) and \(3,\), must be"):
            x @ z
        with pytest.raises(gg.DTypeError, match=r"abs: ggml has none of I32; abs\(gg.cast\(x, gg.F32\)\)"):
            abs(ctx.from_numpy([1, -2]))
        for ne in ((-1, 3), (1, 2, 3, 4, 5), "ab"):
            with pytest.raises(gg.ShapeError, match=rf"new_tensor: ne must be(.|\n)*at {__file__}"):
                ctx.new_tensor(gg.F32, ne)  # pyright: ignore[reportArgumentType]
        with pytest.raises(gg.ShapeError, match=rf"new_tensor: 33 elements (.|\n)*at {__file__}"):
            ctx.new_tensor(gg.Q4_0, 33)
        with pytest.raises(gg.ShapeError, match=rf"map_custom: ne must be(.|\n)*at {__file__}"):
            gg.map_custom(lambda dst, a: None, x, ne=(0, 3))
    with pytest.raises(gg.BackendError, match="must be a list of names"):
        gg.Scheduler("cpu")


def test_overflow_is_infinite_and_silent(recwarn: pytest.WarningsRecorder) -> None:
    with gg.Context() as ctx:
        assert ctx.from_numpy(np.array([-1e6, 65504], np.float32), gg.F16).numpy().tolist() == [-np.inf, 65504]
        assert np.isinf(ctx.from_numpy(np.full(32, 1e30, np.float32), gg.Q8_0).numpy()).all()
    assert not recwarn.list


def test_names_stay_on_one_line() -> None:
    with gg.Context() as ctx:
        t = gg.sqr(ctx.from_numpy(np.ones(3, np.float32), name="a\nb")).set_name("日\x1b[31m")
        g = gg.Graph()
        g.build_forward_expand(t)
        assert "a\\nb" in str(g) and "日\\x1b[31m" in str(g) and len(str(g).splitlines()) == 4
        assert "\n" not in repr(t.src[0])
