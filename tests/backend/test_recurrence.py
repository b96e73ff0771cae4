"""What sinks, sections and recurrent ops refuse, and what they do with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.tensor import Tensor

SCALING = (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)


def f32(*ne: int) -> Tensor:
    return gg.Context().from_numpy(np.ones(ne[::-1], np.float32))


def i32(*values: int) -> Tensor:
    return gg.Context().from_numpy(np.array(values, np.int32))


def multi(sections: object, mode: int | str, n_dims: int = 8) -> Tensor:
    return gg.rope_multi(f32(16, 2, 3), i32(*range(12)), None, n_dims, sections, mode, *SCALING)  # type: ignore[arg-type]


def scan(a: Tensor, ids: Tensor, K: int = 1) -> Tensor:
    b = f32(4, 1, 3, 2)
    return gg.ssm_scan(f32(4, 2, 6, 5), f32(2, 6, 3, 2), f32(6, 3, 2), a, b, b, ids, K)


def wkv6(state: Tensor) -> Tensor:
    x = f32(4, 2, 6)
    return gg.rwkv_wkv6(x, x, x, f32(4, 2), x, state)


def delta(heads_k: int, g: int) -> Tensor:
    v, k = f32(4, 6, 3, 2), f32(4, heads_k, 3, 2)
    return gg.gated_delta_net(k, k, v, f32(g, 6, 3, 2), f32(1, 6, 3, 2), f32(4, 4, 6, 2))


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (lambda: gg.soft_max_ext(f32(8, 2, 3), sinks=f32(2)), r"soft_max.*one score for each of the 3 heads"),
        (
            lambda: gg.flash_attn_ext(f32(8, 2, 3), f32(8, 5, 1), f32(8, 5, 1), None, 1.0, sinks=f32(3, 2)),
            r"flash_attn_ext.*one score for each of the 3 heads",
        ),
        (lambda: multi([2, 2, 0, 0], gg.ROPE_TYPE_NEOX), r"rope_multi.*mode must be one of 8 \(mrope\)"),
        (lambda: multi([2, 2, 0], gg.ROPE_TYPE_MROPE), r"four whole numbers.*\[2, 2, 0\]"),
        (lambda: multi([0, 0, 0, 4], gg.ROPE_TYPE_IMROPE), r"four whole numbers"),
        (lambda: multi([9, 9, 0, 0], gg.ROPE_TYPE_MROPE), r"not be more in all than a's ne\[0\] = 16"),
        (lambda: multi([4, 4, 0, 0], gg.ROPE_TYPE_VISION, 16), r"n_dims must be half"),
        (
            lambda: gg.rope_ext(f32(16, 2, 3), i32(1, 2, 3), None, 8, 8, *SCALING),
            r"one of 0 \(norm\), 2 \(neox\), not 8",
        ),
        (lambda: gg.ssm_conv(f32(3, 6, 2), f32(4, 6)), r"as long as those of c"),
        (lambda: gg.ssm_conv(f32(6, 6, 2), f32(4, 5)), r"same channels"),
        (lambda: scan(f32(3, 6), i32(0, 1)), r"A must have ne \[1 or d_state = 4, 6\]"),
        (lambda: scan(f32(1, 6), i32(0)), r"a state of s for each of x's 2 sequences"),
        (lambda: scan(f32(1, 6), i32(0, 1), 0), r"K must be a whole number from 1"),
        (lambda: wkv6(f32(32, 4)), r"n_seqs a divisor of the 6 tokens"),
        (lambda: wkv6(gg.transpose(f32(2, 32))), r"state must be contiguous"),
        (lambda: delta(4, 1), r"q must have v's ne"),
        (lambda: delta(3, 2), r"g must have ne \[1 or 4, 6, 3, 2\]"),
        (lambda: gg.solve_tri(f32(3, 4), f32(2, 4)), r"square"),
        (lambda: gg.solve_tri(f32(4, 4), f32(2, 4), left=False), r"only left, not uni"),
    ],
)
def test_bad_shapes_are_named(record: Callable[[], Tensor], text: str) -> None:
    with pytest.raises(gg.ShapeError, match=f"(?s){text}"):
        record()


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_a_state_that_is_not_there(backend: str) -> None:
    y = scan(f32(1, 6), i32(4, 5))
    with pytest.raises(gg.BackendError, match="row index 5 is out of range"):
        gg.compute(gg.Graph().build_forward_expand(y), backend=backend)


@pytest.mark.parametrize("op", ["scan", "delta"])
def test_tokens_in_two_steps_are_as_in_one(op: str) -> None:
    """The state that a step gives back is what the next one goes on from, and so are the older ones of K."""
    rng = np.random.default_rng(0)
    n, n_head, n_tokens = 8, 3, 6
    k, v = (rng.standard_normal((1, n_tokens, n_head, n)).astype(np.float32) / 2 for _ in range(2))
    gate = rng.uniform(-1, 0, (1, n_tokens, n_head)).astype(np.float32)
    first = rng.standard_normal((1, n_head, n, n)).astype(np.float32)

    def run(tokens: slice, state: np.ndarray, K: int) -> tuple[np.ndarray, np.ndarray]:
        with gg.Context() as ctx:
            t_k, t_v, s = (ctx.from_numpy(x) for x in (k[:, tokens], v[:, tokens], state))
            g = ctx.from_numpy(gate[:, tokens])
            if op == "scan":
                decay = ctx.from_numpy(np.full((n_head, 1), -0.5, np.float32))
                y = gg.ssm_scan(s, t_v, g, decay, t_k, t_k, ctx.from_numpy(np.zeros(1, np.int32)), K)
            else:
                one = gg.reshape_4d(g, 1, n_head, t_k.ne[2], 1)
                y = gg.gated_delta_net(t_k, t_k, t_v, one, gg.exp(one), s, K)
            gg.compute(gg.Graph().build_forward_expand(y))
        size = t_v.n_elements
        return y.numpy().ravel()[:size], y.numpy().ravel()[size:].reshape(K, *state.shape)

    want, (last, before) = run(slice(0, 6), first, 2)
    start, (state, _, _, none) = run(slice(0, 2), first, 4)
    end, (state, earlier) = run(slice(2, 6), state, 2)
    assert not none.any()
    assert np.array_equal(np.concatenate([start, end]), want)
    assert np.array_equal(state, last) and np.array_equal(earlier, before)


def test_gradients_have_the_same_bits_on_any_number_of_threads() -> None:
    """And more heads than a part of them sums up, more tokens than a chunk."""
    rng = np.random.default_rng(0)

    def random(*ne: int) -> Tensor:
        return gg.Context().from_numpy(rng.standard_normal(ne[::-1]).astype(np.float32) / 2)

    channels, heads = random(1, 70, 11, 2), random(20, 4, 11, 2)
    b, k = random(4, 1, 11, 2), random(20, 2, 11, 1)
    many = gg.ssm_scan(random(4, 1, 70, 3), channels, random(70, 11, 2), random(4, 70), b, b, i32(2, 2))
    few = gg.ssm_scan(random(4, 20, 4, 3), heads, random(4, 11, 2), random(1, 4), b, b, i32(0, 2), 3)
    net = gg.gated_delta_net(k, k, heads, -random(1, 4, 11, 2), random(1, 4, 11, 2), random(20, 20, 4, 2))
    for y in (many, few, net):
        wrt = [s for s in y.src if s is not None and s.dtype is gg.F32]
        gradients = gg.grad(y, wrt, random(*y.ne))
        g = gg.Graph()
        for t in gradients:
            g.build_forward_expand(t.set_output())
        results: list[list[bytes]] = []
        for n_threads in (1, 2, 3, 7):
            gg.compute(g, n_threads=n_threads)
            results.append([t.tobytes() for t in gradients])
        assert all(r == results[0] for r in results)


def test_a_gradient_of_another_shape_is_named() -> None:
    x = f32(4, 2, 6)
    with pytest.raises(
        gg.ShapeError, match=r"(?s)gated_linear_attn_back.*gy must have the ne of.*result, \[8, 10, 1, 1\]"
    ):
        gg.gated_linear_attn_back(x, x, x, x, x, f32(32, 1), 1.0)


def test_modes_of_rope_by_name() -> None:
    plain = [gg.rope(f32(16, 2, 3), i32(1, 2, 3), 8, mode) for mode in ("neox", gg.ROPE_TYPE_NEOX)]
    assert plain[0].op_params == plain[1].op_params
    sections = [multi([2, 2, 0, 0], mode) for mode in ("imrope", gg.ROPE_TYPE_IMROPE)]
    assert sections[0].op_params == sections[1].op_params
    with pytest.raises(gg.ShapeError, match=r"0 \(norm\), 2 \(neox\), not 'mrope'"):
        gg.rope(f32(16, 2, 3), i32(1, 2, 3), 8, "mrope")


def test_sections_of_unequal_lists() -> None:
    with pytest.raises(gg.DTypeError, match=r"rope_multi: section0 must be a number.*not \[1\]"):
        multi([[1], [2, 3]], gg.ROPE_TYPE_MROPE)
