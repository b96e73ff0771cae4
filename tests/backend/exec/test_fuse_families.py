"""Fusions of what families of models repeat in every layer: experts, heads that are normed, gate and value in one
product, latent attention. Fused they give what their nodes give."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.fuse import FUSIONS
from pyggml.backends.cpu.products import FAST_BEYOND
from pyggml.backends.cpu.repack import be_fast, repack
from pyggml.sched import Scheduler

from .test_fuse_patterns import GATES, by_fusing, leafs_of, weights_of

K, M, N_EXPERT, N_USED = 64, 80, 4, 2
PACKED = [i for i in isa_levels() if i != "generic"]


def experts_of(ctx: gg.Context, isa: str, *shapes: tuple[int, int]) -> list[gg.Tensor]:
    """Repacked, with N_EXPERT matrices each."""
    rng = np.random.default_rng(1)
    w = [ctx.from_numpy(rng.standard_normal((N_EXPERT, *s)).astype(np.float32) / 8, dtype=gg.Q8_0) for s in shapes]
    repack(w, isa=isa)
    return w


def choice(ctx: gg.Context, n: int) -> gg.Tensor:
    """The experts of n tokens, most of them the first."""
    rng = np.random.default_rng(n)
    order = np.array([rng.permutation(N_EXPERT) for _ in range(n)])
    order[: n // 2] = np.arange(N_EXPERT)
    return ctx.from_numpy(order[:, :N_USED].astype(np.int32))


@pytest.mark.parametrize("isa", PACKED)
@pytest.mark.parametrize("n", [1, 7, 90])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", [*GATES, "swiglu_oai"])
def test_gates_of_experts(act: str, biased: bool, n: int, isa: str) -> None:
    """Few columns of an expert and many, with the biases of each or without."""

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        gate, up = experts_of(ctx, isa, (M, K), (M, K))
        x, b_gate, b_up = leafs_of(ctx, (n, 1, K), (N_EXPERT, M), (N_EXPERT, M))
        ids = choice(ctx, n)
        a, b = gg.mul_mat_id(gate, x, ids), gg.mul_mat_id(up, x, ids)
        if biased:
            a, b = gg.add_id(a, b_gate, ids), gg.add_id(b, b_up, ids)
        return [gg.swiglu_oai(a, b, 1.702, 7.0) if act == "swiglu_oai" else gg.mul(b, GATES[act](a))]

    _, fused = by_fusing(build, isa)
    unit = [act] if act == "swiglu_oai" else [act, "mul"]
    assert [sorted(ops) for ops in fused] == [sorted([*unit, *2 * ["mul_mat_id", *["add_id"] * biased]])]


@pytest.mark.parametrize("isa", PACKED)
@pytest.mark.parametrize("n", [1, 7, 90])
def test_gate_and_value_of_experts_in_one_product(n: int, isa: str) -> None:
    def build(ctx: gg.Context) -> list[gg.Tensor]:
        both, biased = experts_of(ctx, isa, (2 * M, K), (2 * M, K))
        x, bias = leafs_of(ctx, (n, 1, K), (N_EXPERT, 2 * M))
        ids = choice(ctx, n)
        a, b = gg.mul_mat_id(both, x, ids), gg.add_id(gg.mul_mat_id(biased, x, ids), bias, ids)
        return [gg.swiglu(a), gg.swiglu_oai(b, None, 1.702, 7.0)]

    _, fused = by_fusing(build, isa)
    assert sorted(fused) == [["mul_mat_id", "add_id", "swiglu_oai"], ["mul_mat_id", "swiglu"]]


def test_experts_of_other_tokens_stay_apart() -> None:
    """Gate and value choose their experts by different ids."""
    isa = PACKED[-1]

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        gate, up = experts_of(ctx, isa, (M, K), (M, K))
        (x,) = leafs_of(ctx, (3, 1, K))
        a, b = (gg.mul_mat_id(w, x, choice(ctx, 3)) for w in (gate, up))
        return [gg.mul(b, gg.silu(a))]

    assert by_fusing(build, isa)[1] == [["silu", "mul"]]


@pytest.mark.parametrize("isa", PACKED)
@pytest.mark.parametrize("n", [1, 50])
def test_bias_of_experts(n: int, isa: str) -> None:
    def build(ctx: gg.Context) -> list[gg.Tensor]:
        (down,) = experts_of(ctx, isa, (M, K))
        x, bias = leafs_of(ctx, (n, N_USED, K), (N_EXPERT, M))
        ids = choice(ctx, n)
        return [gg.add_id(gg.mul_mat_id(down, x, ids), bias, ids)]

    assert by_fusing(build, isa)[1] == [["mul_mat_id", "add_id"]]


def total_of(rows: gg.Tensor) -> gg.Tensor:
    """The sum over dimension 1, as mixtures write it."""
    n, n_rows, n_columns, _ = rows.ne
    views = [gg.view_2d(rows, n, n_columns, rows.nb[2], i * rows.nb[1]) for i in range(n_rows)]
    total = views[0]
    for view in views[1:]:
        total = gg.add(total, view)
    return total


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 37), (5, 8, 1030)])
def test_sums_of_experts(shape: tuple[int, int, int], added: bool, weighted: bool, isa: str) -> None:
    n, n_used, n_embd = shape

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        x, w, other = leafs_of(ctx, shape, (n, n_used, 1), (n, n_embd))
        rows = gg.neg(x)
        total = total_of(gg.mul(rows, w) if weighted else rows)
        return [gg.add(gg.abs(other), total) if added else total]

    _, fused = by_fusing(build, isa)
    assert [sorted(ops) for ops in fused] == [
        sorted(["mul"] * weighted + ["view"] * n_used + ["add"] * (n_used - 1 + added))
    ]


def test_sums_that_are_looked_at_are_not_fused_away() -> None:
    def fused(rows: gg.Tensor, *others: gg.Tensor) -> list[int]:
        g = gg.Graph().build_forward_expand(total_of(rows))
        for t in others:
            g.build_forward_expand(t)
        return [len(s.nodes) for s in Scheduler(["cpu"]).alloc(g).splits[0].steps if s.fusion]

    with gg.Context() as ctx:
        x, w = leafs_of(ctx, (3, 2, 32), (3, 2, 1))
        assert fused(gg.mul(x, w)) == [4]
        assert fused(gg.mul(x, w).set_output()) == [3]  # the sum alone
        rows = gg.mul(x, w)
        assert fused(rows, gg.neg(rows)) == []


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("mode", [gg.ROPE_TYPE_NORM, gg.ROPE_TYPE_NEOX])
@pytest.mark.parametrize("store", [None, gg.F16, gg.F32])
def test_heads_that_are_normed_and_roped(store: gg.DType | None, mode: int, isa: str) -> None:
    """Of rows that are partly roped and lie apart, as those of Q in one product with K and V."""
    head, n_head, n = 70, 3, 5

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        qkv, weight = leafs_of(ctx, (n, 2 * n_head * head), (head,))
        pos = ctx.from_numpy(np.arange(n, dtype=np.int32) + 9)
        q = gg.view_3d(qkv, head, n_head, n, 4 * head, qkv.nb[1], 4 * head)
        q = gg.rope(gg.mul(gg.rms_norm(q, 1e-6), weight), pos, 64, mode)
        if store is None:
            return [q]
        cache = ctx.from_numpy(np.zeros(n * n_head * head, np.float32), dtype=store)
        return [gg.cpy(q, cache)]

    _, fused = by_fusing(build, isa)
    assert fused == [["rms_norm", "mul", "rope", *["cpy"] * (store is not None)]]


@pytest.mark.parametrize("isa", PACKED)
@pytest.mark.parametrize("n", [1, 5, 300])
@pytest.mark.parametrize("dtype", [gg.Q4_0, gg.F16])
def test_gate_and_value_in_one_product(dtype: gg.DType, n: int, isa: str) -> None:
    """The halves of each row, with a bias or without. Floats are converted for many columns only, if at all; here they
    may be rounded wherever that is faster."""

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        rng = np.random.default_rng(0)
        ws = [ctx.from_numpy(rng.standard_normal((2 * M, 2 * K)).astype(np.float32) / 8, dtype=dtype) for _ in range(2)]
        repack(ws, isa=isa)
        be_fast([w for w in ws if not w.dtype.is_quantized])
        x, bias = leafs_of(ctx, (n, 2 * K), (2 * M,))
        return [gg.swiglu(gg.mul_mat(ws[0], x)), gg.geglu(gg.add(gg.mul_mat(ws[1], gg.neg(x)), bias))]

    _, fused = by_fusing(build, isa)
    both = [["mul_mat", "swiglu"], ["mul_mat", "add", "geglu"]]
    assert fused == (both if dtype is gg.Q4_0 or n > FAST_BEYOND.get(isa, n) else [])


def test_halves_of_groups_stay_whole() -> None:
    """24 rows are one group of 16 and a half: gate and value share it."""
    isa = PACKED[-1]

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        (w,) = weights_of(ctx, isa, (48, K))
        (x,) = leafs_of(ctx, (3, K))
        return [gg.swiglu(gg.mul_mat(w, x))]

    assert by_fusing(build, isa)[1] == []


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("type_k", [gg.F32, gg.F16, gg.Q8_0])
@pytest.mark.parametrize("n", [1, 40])
def test_latent_attention_copies_no_cache(n: int, type_k: gg.DType, isa: str) -> None:
    """V are the first elements of the rows of K, of which the nodes make a transposed copy."""
    d, dv, n_head, n_kv = 96, 64, 8, 130
    rng = np.random.default_rng(n)
    a_q, a_k = (rng.standard_normal(s).astype(np.float32) for s in ((n_head, n, d), (1, n_kv, d)))
    seen = np.where(np.arange(n_kv) <= n_kv - n + np.arange(n)[:, None], 0, -np.inf).astype(np.float32)
    results: list[np.ndarray] = []
    for fusions in ((), FUSIONS):
        with gg.Context() as ctx:
            q, mask = ctx.from_numpy(a_q), ctx.from_numpy(seen)
            k = ctx.from_numpy(a_k, dtype=type_k)
            rows = gg.view_3d(k, dv, n_kv, 1, k.nb[1], k.nb[2], 0)
            weights = gg.soft_max_ext(gg.mul_mat(k, q), mask, 0.1)
            v = gg.cont(gg.transpose(gg.cast(rows, gg.F32) if type_k.is_quantized else rows))
            y = gg.mul_mat(v, weights)
        schedule = Scheduler([CpuBackend(2, isa, fusions)]).alloc(gg.Graph().build_forward_expand(y))
        steps = schedule.splits[0].steps
        assert [s.fusion for s in steps if s.nodes[-1] is y] == (["attention"] if fusions else [""])
        assert not fusions or len([s for s in steps if s.nodes[-1].op != "view"]) == 1
        schedule.run()
        results.append(y.numpy().astype(np.float64))
    want, got = results
    assert np.sum((got - want) ** 2) <= 1e-6 * np.sum(want**2)
