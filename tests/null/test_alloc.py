"""The planner against a brute-force checker: no two tensors that live at one time overlap."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.buffers import alloc
from pyggml.opdef import OPS
from pyggml.tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor


@st.composite
def graphs(draw: st.DrawFn) -> gg.Graph:
    """Random graphs of elementwise ops, products, views and copies."""
    with gg.Context() as ctx:
        pool: list[Tensor] = [ctx.new_tensor(gg.F32, (8, draw(st.integers(1, 4)) * 4)).set_input() for _ in range(2)]
        for _ in range(draw(st.integers(1, 25))):
            a = pool[draw(st.integers(0, len(pool) - 1))]
            kind = draw(st.sampled_from(["add", "sqr", "mul_mat", "view", "permute", "sqr_inplace", "cpy"]))
            if kind == "add":
                same = [t for t in pool if t.ne == a.ne]
                t = gg.add(a, same[draw(st.integers(0, len(same) - 1))])
            elif kind == "mul_mat":
                t = gg.mul_mat(pool[0], gg.cont(gg.reshape_2d(gg.cont(a), 8, a.n_elements // 8)))
            elif kind == "view":
                t = gg.view_1d(a, a.ne[0], 0)
            elif kind == "permute":
                t = gg.cont(gg.permute(a, 1, 0, 2, 3))
            elif kind == "cpy":
                t = gg.cpy(a, gg.dup(a))
            else:
                t = getattr(gg, kind)(gg.dup(a) if kind == "sqr_inplace" else a)
            if t.n_elements % 8 == 0:
                pool.append(t)
            if draw(st.integers(0, 9)) == 0:
                t.set_output()
        g = gg.Graph()
        for t in pool[-3:]:
            g.build_forward_expand(t)
    return g


def lifetimes(g: gg.Graph) -> dict[Tensor, tuple[int, int]]:
    """Root -> (index of the node that makes it, index of the last node that touches it)."""
    end = len(g.nodes)
    born = dict.fromkeys(g.leafs, -1) | {t: i for i, t in enumerate(g.nodes) if t.view_src is None}
    last = {t: -1 if t.op == "none" else born[t] for t in born}
    read: set[Tensor] = set()
    for i, t in enumerate(g.nodes):
        for s in t.src:
            if s is not None:
                last[s.root] = i
                read.add(s)
        if t.view_src is not None:
            last[t.view_src] = i
    for t in (*g.nodes, *g.leafs):
        if t.flags & (FLAG_INPUT | FLAG_OUTPUT) or t.op == "none":
            last[t.root] = end
    for t in g.nodes:
        if t not in read:  # a result that nobody uses stays readable, also where it is a view
            last[t.root] = end
    return {t: (born[t], last[t]) for t in born}


def check(g: gg.Graph, p: alloc.Plan) -> None:
    life = lifetimes(g)
    placed = [(t, *p.offsets[t], t.nbytes) for t in p.offsets]
    assert p.lives.keys() == p.offsets.keys() and p.n_steps == len(g.nodes)
    for _, pool, offset, n in placed:
        assert offset % 64 == 0 and offset + n <= p.sizes[pool]
    for i, (t, pool, offset, n) in enumerate(placed):
        for u, pool_u, offset_u, m in placed[:i]:
            if pool != pool_u or offset + n <= offset_u or offset_u + m <= offset:
                continue
            assert p.lives[t][1] < p.lives[u][0] or p.lives[u][1] < p.lives[t][0]
            first, second = (t, u) if life[t][0] < life[u][0] else (u, t)
            inherited = (
                offset == offset_u
                and life[first][1] == life[second][0]
                and any(second.src[j] is first for j in OPS[second.op].inplace if j < len(second.src))
            )
            assert life[first][1] < life[second][0] or inherited, f"{t} and {u} live at one time in one place"


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_plans_never_overlap(g: gg.Graph) -> None:
    p = alloc.plan(alloc.steps_of(g.nodes))
    check(g, p)
    assert p.lower_bound <= sum(-(-t.nbytes // 64) * 64 for t in p.offsets)


@settings(max_examples=100, deadline=None)
@given(graphs(), st.sampled_from([32, 64, 4096]))
def test_alignment_and_pools(g: gg.Graph, alignment: int) -> None:
    p = alloc.plan(alloc.steps_of(g.nodes), alignment=alignment, pool_of=lambda t: str(len(t.name) % 2))
    assert all(offset % alignment == 0 for _, offset in p.offsets.values())


def test_chain_runs_in_place() -> None:
    """A chain of elementwise ops needs one buffer, and peak bytes equal the lower bound."""
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, (1024,)).set_input()
        y = gg.add(x, x)
        for _ in range(10):
            y = gg.sqr(y)
        g = gg.Graph().build_forward_expand(y)
    p = alloc.plan(alloc.steps_of(g.nodes))
    assert p.sizes[""] == p.lower_bound == 4096


def test_view_that_nobody_reads_keeps_its_root() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, (8, 2)).set_input()
        y = gg.transpose(gg.sqr(x))
        z = gg.neg_inplace(gg.add(x, x))
        g = gg.Graph()
        for t in (y, z, gg.sqr(x)):
            g.build_forward_expand(t)
    p = alloc.plan(alloc.steps_of(g.nodes))
    assert not p.recycled
    check(g, p)


def test_no_reuse_across_outputs() -> None:
    with gg.Context() as ctx:
        x = ctx.new_tensor(gg.F32, (16,)).set_input()
        a = gg.sqr(x).set_output()
        b = gg.sqr(a)
        g = gg.Graph().build_forward_expand(b)
    p = alloc.plan(alloc.steps_of(g.nodes))
    assert x not in p.offsets and p.offsets[a] != p.offsets[b]
