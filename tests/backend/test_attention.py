"""Attention over a transposed V in one step: as good as its nodes one by one, and nothing that is looked at is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.isa import table_of
from pyggml.buffers.alloc import Step, steps_of
from pyggml.ops._mask import biased, sink_scores
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor
from pyggml.testing.harness import Src, Values, check_guards, make_source, nmse, place
from pyggml.testing.strategies.attention import (
    BLOCK_TYPES,
    HEADS_INSIDE,
    KEYS,
    ROW_TYPES,
    TOKENS,
    bound,
    mild,
)
from pyggml.testing.strategies.matmul import bound as product_bound
from pyggml.testing.strategies.softmax import causal, distances, draw_sinks, gaussian, hidden_rows


def unset_cells(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Only a stretch of the cells is visible, which begins and ends inside of blocks."""
    first, last = sorted(rng.integers(0, shape[3], 2).tolist())
    cell = np.arange(shape[3])
    return np.where((cell >= first) & (cell <= last), np.zeros(shape), -np.inf)


@dataclass(frozen=True)
class Attention:
    q: Src
    k: Src
    v: Src
    mask: Src | None
    sinks: Src | None
    scale: float
    max_bias: float
    merged: bool
    seed: int


@st.composite
def attentions(
    draw: st.DrawFn, keys: st.SearchStrategy[int] = KEYS, tokens: st.SearchStrategy[int] = TOKENS
) -> Attention:
    type_k, type_v = draw(st.sampled_from(ROW_TYPES + BLOCK_TYPES)), draw(st.sampled_from([gg.F16, gg.F32, gg.BF16]))
    widths = [8, 20, 32, 40, 64, 65, 80, 128, 256]
    d = draw(st.sampled_from([32, 64, 256] if type_k.is_quantized else widths))
    dv = draw(st.sampled_from(widths))
    n_kv, n_tokens = draw(keys), draw(tokens)
    n_head_kv, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    n_batch = draw(st.integers(1, 2))
    mask, max_bias = None, 0.0
    mask_type = draw(st.sampled_from([None, gg.F16, gg.F32, gg.F32]))
    if mask_type is not None:
        values: Values = draw(st.sampled_from([causal, causal, distances, gaussian, hidden_rows, unset_cells]))
        m2, m3 = draw(st.sampled_from([1, 1, n_head_kv])), draw(st.sampled_from([1, n_batch]))
        mask = Src(mask_type, (n_kv, n_tokens + draw(st.sampled_from([0, 3])), m2, m3), None, 0, values)
        max_bias = draw(st.sampled_from([0.0, 0.0, 8.0]))
    inside = draw(st.sampled_from([None, HEADS_INSIDE]))
    q = Src(gg.F32, (d, n_tokens, n_head_kv * group, n_batch), inside, 0, mild)
    k = Src(type_k, (d, n_kv, n_head_kv, n_batch), inside, 0, mild)
    v = Src(type_v, (n_kv, dv, n_head_kv, n_batch), None, draw(st.sampled_from([0, 1, 29])), mild)
    scale = draw(st.sampled_from([d**-0.5, 0.125, -0.3]))
    return Attention(
        q, k, v, mask, draw_sinks(draw, q.ne[2]), scale, max_bias, draw(st.booleans()), draw(st.integers(0, 99))
    )


def values_of(t: Tensor | None) -> np.ndarray | None:
    return None if t is None else np.asarray(t.elements(), np.float64)


def exact(x: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> np.ndarray:
    """[batch, head, token, dv] in float64."""
    fq, fk, fv = (np.asarray(t.elements(), np.float64) for t in (q, k, v))
    group = fq.shape[1] // fk.shape[1]
    s = fq @ np.repeat(fk, group, 1).swapaxes(2, 3) * float(np.float32(x.scale))
    s, sink = biased(s, values_of(mask), x.max_bias), sink_scores(values_of(sinks))
    with np.errstate(invalid="ignore"):
        top = np.maximum(s.max(axis=3, keepdims=True), sink)
        e, rest = np.exp(s - top), np.exp(sink - top)
    return e / (e.sum(axis=3, keepdims=True) + rest) @ np.repeat(fv, group, 1).swapaxes(2, 3)


def record(
    x: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> tuple[gg.Graph, Tensor]:
    """The graph as model builders record it, and what it computes."""
    kq = gg.soft_max_ext(gg.mul_mat(k, q), mask, x.scale, x.max_bias, sinks)
    y = gg.mul_mat(v, kq)
    if x.merged:
        y = gg.cont_3d(gg.permute(y, 0, 2, 1, 3), y.ne[0] * y.ne[2], y.ne[1], y.ne[3])
    return gg.Graph().build_forward_expand(y), y


def steps_for(backend: CpuBackend, g: gg.Graph) -> list[Step]:
    return backend.fuse(g.nodes, Counter(s for t in g.nodes for s in t.src if s is not None))


def check(x: Attention, isa: str, n_threads: int = 2) -> None:
    rng = np.random.default_rng(x.seed)
    with gg.Context() as ctx:
        q, k, v = (make_source(ctx, s, rng) for s in (x.q, x.k, x.v))
        mask, sinks = (make_source(ctx, s, rng) for s in (x.mask, x.sinks))
        assert q is not None and k is not None and v is not None
        if x.v.pad:  # what lies between rows must not be looked at
            owner = v.root
            a = np.array(owner.elements())
            a[..., x.v.ne[0] :] = np.nan
            owner.store(a)
        g, y = record(x, q, k, v, mask, sinks)
    want = exact(x, q, k, v, mask, sinks)
    if x.merged:
        want = want.swapaxes(1, 2).reshape(y.ne[::-1])
    leafs = [t for t in g.leafs if t.view_src is None]
    before = [t.tobytes() for t in leafs]
    largest_bias = 80 if x.mask is not None and x.mask.values is gaussian else 0
    limit = bound(x.q.ne[0], x.scale, largest_bias)

    def run(steps: list[Step], n_threads: int, nodes: list[Tensor]) -> np.ndarray:
        for t in nodes:
            place(t)
        CpuBackend(n_threads, isa, ()).compile(steps, lambda s: s).run()
        for t in (*leafs, *nodes):
            check_guards(t)
        assert [t.tobytes() for t in leafs] == before
        return np.array(y.elements())

    fused = steps_for(CpuBackend(1, isa, ("attention",)), g)
    assert [(s.fusion, s.nodes[-1]) for s in fused if s.nodes[-1].view_src is None] == [("attention", y)]
    got = run(fused, 1, [y])
    assert nmse(got, want) <= limit
    assert np.array_equal(run(fused, n_threads, [y]), got, equal_nan=True), "threads change the result"
    one_by_one = run(steps_of(g.nodes), 1, [t for t in g.nodes if t.view_src is None])
    limit_of_nodes = limit + product_bound(x.v.ne[0])  # mul_mat adds up all keys in a row
    assert nmse(one_by_one, want) <= limit_of_nodes
    assert nmse(got, one_by_one) <= 2 * (limit + limit_of_nodes)  # each is within its limit of the same values


@pytest.mark.parametrize("isa", [i for i in isa_levels() if "attn_vt" in table_of(i)])
def test_one_step_is_as_good_as_three(isa: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(attentions())
    def of_any_shape(x: Attention) -> None:
        check(x, isa)

    of_any_shape()


def test_what_is_hidden_from_all_may_hold_anything() -> None:
    """Cells of K and V that no token sees are not looked at (one by one, NaN in V would spread)."""
    rng = np.random.default_rng(0)
    n_kv, d, hidden = 200, 32, np.r_[3:9, 70:130, 180:200]
    a_k, a_v = rng.standard_normal((1, 2, n_kv, d)), rng.standard_normal((1, 2, d, n_kv))
    bias = np.zeros((n_kv,))
    bias[hidden] = -np.inf
    results = []
    for unset in (0.0, np.nan):
        a_k[:, :, hidden], a_v[..., hidden] = unset, unset
        with gg.Context() as ctx:
            q = ctx.from_numpy(np.ones((1, 8, 3, d), np.float32))
            k, v = (ctx.from_numpy(a.astype(np.float16)) for a in (a_k, a_v))
            mask = ctx.from_numpy(np.tile(bias, (3, 1)).astype(np.float32))
            y = gg.mul_mat(v, gg.soft_max_ext(gg.mul_mat(k, q), mask, 0.1))
        gg.compute(gg.Graph().build_forward_expand(y))
        results.append(y.numpy().copy())
    assert np.isfinite(results[0]).all()
    assert np.array_equal(*results)


@pytest.mark.parametrize("isa", [i for i in isa_levels() if "attn_vt" in table_of(i)])
@pytest.mark.parametrize("n", [1, 40])
def test_capped_scores(n: int, isa: str) -> None:
    """scale and tanh between the product and soft_max, which scales by the cap."""
    d, n_kv, cap, scale = 32, 100, 3.0, 0.5
    rng = np.random.default_rng(n)
    a_q, a_k, a_v = (rng.standard_normal(s).astype(np.float32) for s in ((4, n, d), (2, n_kv, d), (2, d, n_kv)))
    k, v = (np.repeat(a, 2, axis=0).astype(np.float64) for a in (a_k, a_v))
    weights = np.exp(cap * np.tanh(scale / cap * (a_q @ k.transpose(0, 2, 1))))
    want = weights / weights.sum(axis=-1, keepdims=True) @ v.transpose(0, 2, 1)
    with gg.Context() as ctx:
        scores = gg.tanh(gg.scale(gg.mul_mat(ctx.from_numpy(a_k), ctx.from_numpy(a_q)), scale / cap))
        y = gg.mul_mat(ctx.from_numpy(a_v), gg.soft_max_ext(scores, None, cap))
    schedule = Scheduler([CpuBackend(2, isa)]).alloc(gg.Graph().build_forward_expand(y))
    assert [s.fusion for s in schedule.splits[0].steps] == ["attention"]
    schedule.run()
    assert nmse(y.numpy(), want) <= bound(d, scale, 0)


def attention_of_leafs(heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """(kq, weights, kqv) of small leafs, K of `heads` heads, V of two."""
    rng = np.random.default_rng(1)
    with gg.Context() as ctx:
        q = ctx.from_numpy(rng.standard_normal((4, 3, 16)).astype(np.float32))
        k = ctx.from_numpy(rng.standard_normal((heads, 10, 16)).astype(np.float32))
        v = ctx.from_numpy(rng.standard_normal((2, 16, 10)).astype(np.float32))
        kq = gg.mul_mat(k, q)
        weights = gg.soft_max_ext(kq, None, 0.25)
        return kq, weights, gg.mul_mat(v, weights)


def fused(*results: Tensor) -> list[list[str]]:
    g = gg.Graph()
    for t in results:
        g.build_forward_expand(t)
    schedule = Scheduler([CpuBackend(1)]).alloc(g)
    return [[t.op for t in s.nodes] for s in schedule.splits[0].steps if s.fusion]


def test_what_is_looked_at_is_not_fused_away() -> None:
    three = ["mul_mat", "soft_max", "mul_mat"]
    kq, weights, y = attention_of_leafs()
    assert fused(y) == [three]
    with pytest.raises(gg.AllocError, match="recycled"):
        weights.numpy()
    kq, _, y = attention_of_leafs()
    kq.set_output()
    assert fused(y) == []
    _, weights, y = attention_of_leafs()
    assert fused(gg.neg(weights), y) == []
    assert fused(attention_of_leafs(heads=4)[2]) == []  # K and V of different heads
    _, _, y = attention_of_leafs()
    assert fused(gg.cont(gg.permute(y, 0, 2, 1, 3))) == [[*three, "permute", "cont"]]
    _, _, y = attention_of_leafs()
    y.set_output()
    assert fused(gg.cont(gg.permute(y, 0, 2, 1, 3))) == [three]
    _, _, y = attention_of_leafs()
    assert fused(gg.cont(gg.permute(y, 1, 0, 2, 3))) == [three]
    _, _, y = attention_of_leafs()
    view = gg.permute(y, 0, 2, 1, 3)
    assert fused(gg.cont(view), gg.cont(view)) == [three]


def test_a_cache_that_is_written_between_is_read_before() -> None:
    """V changes between soft_max and the product: K q stays where it is recorded."""
    kq, _, y = attention_of_leafs()
    k = kq.src[0]
    assert k is not None
    g = gg.Graph().build_forward_expand(kq)
    g.build_forward_expand(gg.scale_inplace(k, 0.0))
    g.build_forward_expand(y)
    assert [s.fusion for s in Scheduler([CpuBackend(1)]).alloc(g).splits[0].steps if s.fusion] == []
