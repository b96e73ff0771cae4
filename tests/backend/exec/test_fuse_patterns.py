"""Gates, biases and norms in the forms that architectures have them: fused they give what their nodes give."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.fuse import FUSIONS
from pyggml.backends.cpu.repack import repack
from pyggml.ops.norm import norm
from pyggml.sched import Scheduler

GATES = {"silu": gg.silu, "gelu": gg.gelu, "relu": gg.relu}


def by_fusing(build: Callable[[gg.Context], list[gg.Tensor]], isa: str) -> list[list[list[str]]]:
    """The ops of each step that is fused, of the graph of the results that `build` gives. They are as unfused."""
    done: list[list[list[str]]] = []
    values: list[list[np.ndarray]] = []
    for fusions in ((), FUSIONS):
        with gg.Context() as ctx:
            results = build(ctx)
            g = gg.Graph()
            for t in results:
                g.build_forward_expand(t.set_output())
        schedule = Scheduler([CpuBackend(2, isa, fusions)]).alloc(g)
        schedule.run()
        done.append([[t.op for t in s.nodes] for s in schedule.splits[0].steps if s.fusion])
        values.append([t.numpy().copy() for t in results])
    assert all(np.isfinite(a).all() for a in values[0])
    assert all(np.array_equal(a, b) for a, b in zip(*values, strict=True))
    return done


def leafs_of(ctx: gg.Context, *shapes: tuple[int, ...]) -> list[gg.Tensor]:
    rng = np.random.default_rng(len(shapes))
    return [ctx.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


def weights_of(ctx: gg.Context, isa: str, *shapes: tuple[int, int]) -> list[gg.Tensor]:
    """Repacked."""
    rng = np.random.default_rng(0)
    w = [ctx.from_numpy(rng.standard_normal(s).astype(np.float32) / 16, dtype=gg.Q4_0) for s in shapes]
    repack(w, isa=isa)
    return w


@pytest.mark.parametrize("isa", [i for i in isa_levels() if i != "generic"])
@pytest.mark.parametrize("n", [1, 3, 45])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", GATES)
def test_gates_of_products(act: str, biased: bool, n: int, isa: str) -> None:
    """act(gate) * up, with biases of either or without, of rows that are no whole number of vectors."""

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        gate, up = weights_of(ctx, isa, (75, 64), (75, 64))
        x, b_gate, b_up = leafs_of(ctx, (n, 64), (75,), (75,))
        a, b = gg.mul_mat(gate, x), gg.mul_mat(up, x)
        if biased:
            a, b = gg.add(a, b_gate), gg.add(b, b_up)
        return [gg.mul(GATES[act](a), b)]

    add = ["add"] * biased
    _, fused = by_fusing(build, isa)
    assert [sorted(ops) for ops in fused] == [sorted([act, "mul", *2 * ["mul_mat", *add]])]


@pytest.mark.parametrize("act", GATES)
def test_gates_of_anything(act: str) -> None:
    _, fused = by_fusing(
        lambda ctx: [gg.mul(b, GATES[act](a)) for a, b in [leafs_of(ctx, (3, 37), (3, 37))]], [*isa_levels()][-1]
    )
    assert fused == [[act, "mul"]]


@pytest.mark.parametrize("isa", [i for i in isa_levels() if i != "generic"])
@pytest.mark.parametrize("n", [1, 3, 45])
def test_biases_of_products(n: int, isa: str) -> None:
    """Q, K and V, of which one has no bias, and a product with a bias and a residual that is computed."""

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        w = weights_of(ctx, isa, (64, 64), (32, 64), (75, 64), (64, 64))
        x, b_q, b_v, b_o = leafs_of(ctx, (n, 64), (64,), (75,), (64,))
        q, k, v = (gg.mul_mat(a, x) for a in w[:3])
        out = gg.add(gg.add(gg.mul_mat(w[3], gg.neg(x)), b_o), gg.abs(x))
        return [gg.add(q, b_q), k, gg.add(v, b_v), out]

    _, fused = by_fusing(build, isa)
    assert fused == [["mul_mat", "add", "mul_mat", "mul_mat", "add"], ["mul_mat", "add", "add"]]


@pytest.mark.parametrize("isa", [i for i in isa_levels() if i != "generic"])
def test_attention_and_ffn_of_the_same_columns(isa: str) -> None:
    """Q, K and V share them also where gate and up do, in a step of their own."""

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        x = gg.neg(*leafs_of(ctx, (3, 64)))
        q, k, v, gate, up = (gg.mul_mat(w, x) for w in weights_of(ctx, isa, *[(32, 64)] * 5))
        return [q, k, v, gg.mul(gg.silu(gate), up)]

    _, fused = by_fusing(build, isa)
    assert sorted(map(len, fused)) == [3, 4]


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("rows", [(), (5,)])
@pytest.mark.parametrize("kind", ["norm", "rms_norm"])
def test_norms_with_a_bias_or_a_residual(kind: str, rows: tuple[int, ...], isa: str) -> None:
    def build(ctx: gg.Context) -> list[gg.Tensor]:
        x, w, b = leafs_of(ctx, (5, 75), (75,), (*rows, 75))
        x = gg.neg(x)
        normed = norm(x, 1e-5) if kind == "norm" else gg.rms_norm(x, 1e-5)
        return [gg.add(gg.abs(b), gg.mul(normed, w)) if rows else gg.add(gg.mul(normed, w), b)]

    _, fused = by_fusing(build, isa)
    assert fused == [[kind, "mul", "add"]]
