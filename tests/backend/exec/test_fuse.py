"""Fused steps give what their nodes give one by one, and nothing that is looked at is ever fused away."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.fuse import FUSIONS
from pyggml.backends.cpu.repack import repack
from pyggml.sched import Scheduler

K, M_KV, FF, HEAD = 512, 256, 768, 64
CELLS, FIRST = 80, 7  # of the cache, and the first one that is written


class Layer:
    """Norm, Q, K and V, rope, the store of K, a projection with its residual, and the feed-forward block."""

    def __init__(self, n: int, types: tuple[gg.DType, ...], type_k: gg.DType = gg.F16) -> None:
        rng = np.random.default_rng(n)
        self.ctx = gg.Context()
        names = ("q", "k", "v", "o", "up", "gate", "down")
        shapes = ((K, K), (M_KV, K), (M_KV, K), (K, K), (FF, K), (FF, K), (K, FF))
        self.w = {
            name: self.leaf(rng.standard_normal(shape) * 0.05, types[i % len(types)], name)
            for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
        }
        norms = [self.leaf(1 + 0.1 * rng.standard_normal(K), gg.F32, f"norm{i}") for i in range(3)]
        self.x = self.ctx.new_tensor(gg.F32, (K, n), name="x").set_input()
        self.pos = self.ctx.new_tensor(gg.I32, (n,), name="pos").set_input()
        self.values = {self.x: rng.standard_normal((n, K)).astype(np.float32), self.pos: np.arange(n) + 3}
        self.cache = self.leaf(np.zeros(CELLS * M_KV), type_k, "cache")

        cur = self.norm(self.x, norms[0])
        q, k, v = (gg.mul_mat(self.w[name], cur).set_name(name.upper()) for name in "qkv")
        heads = [gg.reshape_3d(t, HEAD, t.ne[0] // HEAD, n) for t in (q, k)]
        q, k = (gg.rope(t, self.pos, HEAD, 0) for t in heads)
        at = gg.view_1d(self.cache, n * M_KV, type_k.row_size(FIRST * M_KV))
        self.graph = gg.Graph()
        for t in (q, k, v, gg.cpy(k, at)):
            self.graph.build_forward_expand(t)
        v_wide = gg.repeat(v, q_like := gg.reshape_2d(q, K, n))
        out = gg.add(gg.mul_mat(self.w["o"], gg.add(q_like, v_wide)), self.x)
        cur = self.norm(out, norms[1])
        up, gate = gg.mul_mat(self.w["up"], cur), gg.mul_mat(self.w["gate"], cur)
        ffn = gg.mul_mat(self.w["down"], gg.mul(gg.silu(gate), up))
        self.result = self.norm(gg.add(ffn, out), norms[2])
        self.graph.build_forward_expand(self.result)

    def leaf(self, a: np.ndarray, dtype: gg.DType, name: str) -> gg.Tensor:
        return self.ctx.from_numpy(np.asarray(a, np.float32), dtype=dtype, name=name)

    def norm(self, x: gg.Tensor, weight: gg.Tensor) -> gg.Tensor:
        return gg.mul(gg.rms_norm(x, 1e-5), weight)

    def run(self, isa: str, n_threads: int, fusions: tuple[str, ...]) -> tuple[np.ndarray, bytes, set[str]]:
        """The result, the cache, and the fusions that took place."""
        sched = Scheduler([CpuBackend(n_threads, isa, fusions)])
        schedule = sched.alloc(self.graph)
        self.cache.raw()[...] = 0
        for t, a in self.values.items():
            t.set(a)
        schedule.run()
        done = {s.fusion for split in schedule.splits for s in split.steps if s.fusion}
        return self.result.numpy().copy(), self.cache.tobytes(), done


TYPES = {
    "f32": (gg.F32,),
    "f16": (gg.F16,),
    "q4_0": (gg.Q4_0,),
    "q4_k_m": (gg.Q4_K, gg.Q4_K, gg.Q6_K),
    "mixed": (gg.Q8_0, gg.F32, gg.Q5_1),
}


def exact(isa: str) -> bool:
    """Whether the products of repacked weights are as wide as the norms of this level, and sum squares as they do."""
    return isa != "avx512"  # they are avx2's


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("n", [1, 5, 45])
@pytest.mark.parametrize("types", TYPES)
def test_fused_is_as_unfused(types: str, n: int, isa: str) -> None:
    layer = Layer(n, TYPES[types])
    repack(layer.w.values(), isa=isa)
    want, want_cache, none = layer.run(isa, 1, ())
    assert not none
    assert np.isfinite(want).all()
    for fusions in (*((f,) for f in FUSIONS), FUSIONS):
        for n_threads in (1, 2):
            got, cache, done = layer.run(isa, n_threads, fusions)
            if exact(isa):
                assert np.array_equal(got, want) and cache == want_cache, fusions
            else:  # one rounding may move an activation by a step of its 16 bits
                assert np.sum((got - want) ** 2) <= 1e-8 * np.sum(want**2)
    assert {"norm", "rope"} <= done


@pytest.mark.parametrize("isa", [i for i in isa_levels() if i != "generic"])
def test_products_take_all_they_can(isa: str) -> None:
    """A layer of repacked weights: Q, K and V with their norm, o and down with a residual, up and gate with a norm."""
    layer = Layer(2, TYPES["q4_0"])
    repack(layer.w.values(), isa=isa)
    backend = CpuBackend(1, isa)
    steps = Scheduler([backend]).alloc(layer.graph).splits[0].steps
    ops = [[t.op for t in s.nodes] for s in steps if s.fusion == "products"]
    norm = ["rms_norm", "mul"]
    ffn = [*norm, "mul_mat", "silu", "mul_mat", "mul"]
    assert ops == [[*norm, *["mul_mat"] * 3], ["mul_mat", "add"], ffn, ["mul_mat", "add"]]
    assert Scheduler([backend]).assignment(layer.graph).count("\n  products:\n    rms_norm ") == 2
    fused = [t for s in steps for t in s.inner]
    assert fused and all(t.flags & gg.tensor.FLAG_RECYCLED for t in fused)
    with pytest.raises(gg.AllocError, match="recycled"):
        fused[0].numpy()


@pytest.mark.parametrize("type_k", [gg.F32, gg.F16, gg.BF16, gg.Q8_0])
def test_rope_stores_to_any_cache(type_k: gg.DType) -> None:
    layer = Layer(4, (gg.F32,), type_k)
    _, want, _ = layer.run("generic", 1, ())
    _, got, done = layer.run("generic", 1, ("rope",))
    assert got == want
    assert done == (set() if type_k is gg.Q8_0 else {"rope"})


def test_rope_with_sections_stores_to_a_cache() -> None:
    rng = np.random.default_rng(0)
    a, at = rng.standard_normal((3, 2, HEAD)).astype(np.float32), np.arange(12, dtype=np.int32)
    scaling = (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
    caches: list[bytes] = []
    for fusions in ((), ("rope",)):
        with gg.Context() as ctx:
            k = gg.rope_multi(
                ctx.from_numpy(a), ctx.from_numpy(at), None, HEAD, [16, 8, 8, 0], gg.ROPE_TYPE_MROPE, *scaling
            )
            cache = ctx.from_numpy(np.zeros(6 * HEAD, np.float32), dtype=gg.F16)
            schedule = Scheduler([CpuBackend(1, None, fusions)]).alloc(
                gg.Graph().build_forward_expand(gg.cpy(k, cache))
            )
        schedule.run()
        assert [s.fusion for s in schedule.splits[0].steps] == (["rope"] if fusions else ["", ""])
        caches.append(cache.tobytes())
    assert caches[0] == caches[1]


def fused_ops(y: gg.Tensor, *others: gg.Tensor) -> list[str]:
    g = gg.Graph()
    for t in (y, *others):
        g.build_forward_expand(t)
    return [s.fusion for s in Scheduler(["cpu"]).alloc(g).splits[0].steps if s.fusion]


def test_what_is_looked_at_is_not_fused_away() -> None:
    rng = np.random.default_rng(0)
    with gg.Context() as ctx:
        x = ctx.from_numpy(rng.standard_normal((3, 32)).astype(np.float32))
        w = ctx.from_numpy(np.ones(32, np.float32))

        def pair() -> tuple[gg.Tensor, gg.Tensor]:
            norm = gg.rms_norm(x, 1e-5)
            return norm, gg.mul(norm, w)

        norm, y = pair()
        assert fused_ops(y) == ["norm"]
        norm, y = pair()
        norm.set_output()
        assert fused_ops(y) == []
        norm, y = pair()
        assert fused_ops(y, gg.neg(norm)) == []
        norm, y = pair()
        assert fused_ops(y, gg.neg(gg.view_1d(norm, 8, 0))) == []
        norm, _ = pair()
        assert fused_ops(gg.mul_inplace(norm, w)) == []
        silu = gg.silu(x)
        assert fused_ops(gg.mul(silu, silu)) == []
        assert fused_ops(gg.mul(x, gg.silu(x))) == ["glu"]


def test_what_is_written_between_is_not_read_later() -> None:
    """silu(x) stands before x is overwritten, its product after: they stay apart."""
    with gg.Context() as ctx:
        x = ctx.from_numpy(np.full(32, 2.0, np.float32))
        silu = gg.silu(x)
        stored = gg.cpy(ctx.from_numpy(np.zeros(32, np.float32)), x)
        y = gg.mul(silu, ctx.from_numpy(np.ones(32, np.float32)))
        g = gg.Graph()
        for t in (silu, stored, y):
            g.build_forward_expand(t)
        gg.compute(g)
        assert np.allclose(y.numpy(), 2 / (1 + np.exp(-2.0)))


def two_products(between: Callable[[gg.Tensor], gg.Tensor], fusions: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """What is fused of two products of the same columns x and a node that reads x between them, and the products."""
    rng = np.random.default_rng(0)
    with gg.Context() as ctx:
        w = [ctx.from_numpy(rng.standard_normal((64, 256)).astype(np.float32), dtype=gg.Q4_0) for _ in range(2)]
        repack(w)
        x = gg.neg(ctx.from_numpy(rng.standard_normal((2, 256)).astype(np.float32)))
        g = gg.Graph()
        first = gg.mul_mat(w[0], x).set_output()
        g.build_forward_expand(first).build_forward_expand(between(x).set_output())
        second = gg.mul_mat(w[1], x).set_output()
        g.build_forward_expand(second)
    schedule = Scheduler([CpuBackend(1, None, fusions)]).alloc(g)
    schedule.run()
    return [s.fusion for s in schedule.splits[0].steps if s.fusion], np.stack([first.numpy(), second.numpy()])


def test_products_share_columns_that_other_nodes_read() -> None:
    _, want = two_products(gg.sqr, ())
    _, got = two_products(gg.sqr, FUSIONS)
    assert np.array_equal(got, want)


def test_products_of_columns_that_change_stay_apart() -> None:
    none, want = two_products(lambda x: gg.scale_inplace(x, 2.0), ())
    fused, got = two_products(lambda x: gg.scale_inplace(x, 2.0), FUSIONS)
    assert fused == none == []
    assert np.array_equal(got, want)


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gg.BackendError, match="no fusion is called nrom; there are norm, share"):
        CpuBackend(1, None, ("nrom",))
    monkeypatch.setenv("PYGGML_FUSE", "norm,glu")
    assert CpuBackend(1).fusions == {"norm", "glu"}
    monkeypatch.setenv("PYGGML_FUSE", "none")
    assert CpuBackend(1).fusions == set()


SIDE = 64  # of all matrices in random graphs
Program = tuple[int, list[tuple[str, int, int, int, bool]]]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Columns, and steps: what, the tensors it reads (counted from the last), a weight, and if its result is kept."""
    ops = ("product", "bias", "norm", "post_norm", "glu", "residual", "silu", "add", "scale_inplace", "view", "store")
    ops += ("halves", "heads", "sum")
    which = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 9])
    step = st.tuples(st.sampled_from(ops), which, which, st.integers(0, 2), st.integers(0, 2).map(lambda i: i == 0))
    return draw(st.sampled_from([1, 3, 40])), draw(st.lists(step, min_size=3, max_size=20))


def outcome_of(program: Program, fusions: tuple[str, ...]) -> tuple[list[np.ndarray], set[str]]:
    """What the graph of a program leaves in what is kept and in a cache that it writes to, and what was fused."""
    n, steps = program
    isa = [i for i in isa_levels() if exact(i)][-1]
    rng = np.random.default_rng(n)
    with gg.Context() as ctx:
        w = [ctx.from_numpy(rng.standard_normal((SIDE, SIDE)).astype(np.float32) / 8, dtype=gg.Q8_0) for _ in range(3)]
        repack(w, isa=isa)
        weight = ctx.from_numpy(1 + rng.standard_normal(SIDE).astype(np.float32) / 8)
        cache = ctx.from_numpy(np.zeros(SIDE * n, np.float32), dtype=gg.F16)
        pos = ctx.from_numpy(np.arange(n, dtype=np.int32))
        shares = ctx.from_numpy(rng.standard_normal((n, 2, 1)).astype(np.float32))
        pool = [gg.neg(ctx.from_numpy(rng.standard_normal((n, SIDE)).astype(np.float32)))]
        g = gg.Graph().build_forward_expand(pool[0])
        kept: list[gg.Tensor] = []
        for op, i, j, k, keep in (*steps, ("add", 0, 1, 0, True)):
            a, b = (pool[-1 - min(at, len(pool) - 1)] for at in (i, j))
            parts: list[gg.Tensor] = []
            if op == "product":
                t = gg.mul_mat(w[k], a)
            elif op == "norm":
                parts = [gg.rms_norm(a, 1e-5)]
                t = gg.mul(parts[0], weight)
            elif op == "post_norm":
                parts = [gg.mul(gg.rms_norm(a, 1e-5), weight)]
                t = gg.add(parts[0], b)
            elif op == "bias":
                parts = [gg.mul_mat(w[k], a)]
                t = gg.add(parts[0], weight)
            elif op == "glu":
                parts = [gg.mul_mat(w[k], a), gg.mul_mat(w[k - 1], b)]
                t = gg.mul((gg.silu, gg.gelu, gg.relu)[k](parts[0]), parts[1])
            elif op == "residual":
                parts = [gg.mul_mat(w[k], a)]
                t = gg.add(parts[0], b)
            elif op == "halves":
                parts = [gg.mul_mat(w[k], a)]
                t = gg.repeat((gg.swiglu, gg.geglu, gg.reglu)[k](parts[0]), a)
            elif op == "heads":
                parts = [gg.mul(gg.rms_norm(gg.reshape_3d(a, SIDE, 1, n), 1e-5), weight)]
                t = gg.reshape_2d(gg.rope(parts[0], pos, SIDE, k % 2 * gg.ROPE_TYPE_NEOX), SIDE, n)
                parts = [gg.reshape_2d(parts[0], SIDE, n)]
            elif op == "sum":
                parts = [gg.mul(gg.reshape_3d(a, SIDE // 2, 2, n), shares)]
                views = [gg.view_2d(parts[0], SIDE // 2, n, SIDE * 4, i * SIDE * 2) for i in range(2)]
                t = gg.add(gg.add(*views), gg.view_2d(b, SIDE // 2, n, b.nb[1], 0))
                parts = [gg.reshape_2d(parts[0], SIDE, n)]
                t = gg.repeat(t, a)
            elif op == "silu":
                t = gg.silu(a)
            elif op == "add":
                t = gg.add(a, b)
            elif op == "scale_inplace":
                t = gg.scale_inplace(a, 0.5)
            elif op == "view":
                t = gg.reshape_2d(a, SIDE, n)
            else:
                t = gg.cpy(gg.rope(gg.reshape_3d(a, SIDE, 1, n), pos, SIDE, 0), cache)
            g.build_forward_expand(t)
            if op != "store":
                pool += [*parts[:k], t]  # others may read the parts, too
            if keep and t.view_src is None:
                kept.append(t.set_output())
    schedule = Scheduler([CpuBackend(1, isa, fusions)]).alloc(g)
    schedule.run()
    done = {s.fusion for split in schedule.splits for s in split.steps if s.fusion}
    return [cache.numpy().copy(), *(t.numpy().copy() for t in kept)], done


@given(programs())
@settings(max_examples=200, deadline=None)
def test_any_graph(program: Program) -> None:
    """Whatever a graph reads, keeps and writes in place: fused it gives the same."""
    want, none = outcome_of(program, ())
    got, _ = outcome_of(program, FUSIONS)
    assert not none
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("isa", [i for i in isa_levels() if i != "generic"])
def test_norms_of_huge_rows_in_products(isa: str) -> None:
    """Rows whose squares f32 does not hold: normed by the product as by the node."""
    rng = np.random.default_rng(0)
    for n in (1, 32, 70):
        with gg.Context() as ctx:
            w = ctx.from_numpy(rng.standard_normal((64, K)).astype(np.float32), dtype=gg.Q8_0)
            repack((w,), isa=isa)
            x = ctx.from_numpy((rng.uniform(-3.4e38, 3.4e38, (n, K))).astype(np.float32))
            norm = gg.mul(gg.rms_norm(x, 1e-5), ctx.from_numpy(np.ones(K, np.float32)))
            y = gg.mul_mat(w, norm)
            g = gg.Graph().build_forward_expand(y)
        schedule = Scheduler([CpuBackend(2, isa)]).alloc(g)
        assert [s.fusion for s in schedule.splits[0].steps] == ["products"]
        schedule.run()
        a = x.numpy().astype(np.float64)
        want = a / np.sqrt(np.mean(a**2, axis=1, keepdims=True)) @ w.numpy().astype(np.float64).T
        assert np.sum((y.numpy() - want) ** 2) <= 1e-7 * np.sum(want**2)
