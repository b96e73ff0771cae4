"""An attack by random graphs: many ops, views, results over other memory, outputs, graphs that grow between runs.

Each graph is computed node by node, every node against the reference on the same sources (`local`); then planned as a
whole with and without fusions, in one go and growing, on leafs put back to what they were, against the first (`whole`).
Where that computes on `ref`, errors grow from node to node: soft_max is held to what those of its scores explain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.fuse import FUSIONS
from pyggml.backends.cpu.repack import repack
from pyggml.backends.ref import RefBackend, compute_node
from pyggml.buffers.alloc import steps_of
from pyggml.opdef import OPS
from pyggml.tensor import FLAG_OUTPUT, Tensor

from . import COUNT, SEED

SIDE, CELLS, HEAD = 64, 48, 32
TYPES = (gg.F32, gg.F16, gg.BF16, gg.Q8_0, gg.Q4_0, gg.Q5_1, gg.IQ4_NL)
UNARY = ("silu", "gelu", "relu", "tanh", "sqr", "neg", "sigmoid", "soft_max", "silu_inplace", "relu_inplace", "dup")
BINARY = ("add", "sub", "mul", "add_inplace", "mul_inplace", "sub_inplace", "swiglu_split")
LOCAL = {"mul_mat": 2e-4, "flash_attn_ext": 1e-4, "cpy": 1e-6, "set_rows": 1e-6, "rope": 1e-6}  # NMSE; others 1e-8
SEEN: Counter[str] = Counter()


class Net:
    """The graph of a seed: `order` is what is expanded, one after the other; `pool` holds [n, SIDE] tensors."""

    def __init__(self, seed: int, isa: str) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.ctx, self.n = gg.Context(), int(rng.choice([1, 3, 40]))
        self.refused = 0
        self.order: list[Tensor] = []
        self.built = gg.Graph()  # `order`, as it grows: what is in a graph may be read by its old name
        self.weights = [self._leaf((SIDE, SIDE), TYPES[rng.integers(len(TYPES))], 0.2) for _ in range(3)]
        repack(self.weights, isa=isa)
        self.row = self._leaf((SIDE,), gg.F32)
        self.k = self._leaf((CELLS, SIDE), (gg.F16, gg.F32)[seed % 2])
        self.v = self._leaf((SIDE, CELLS), gg.F16)
        self.pos = self.ctx.from_numpy(rng.integers(0, 9, self.n).astype(np.int32))
        self.perm = self.ctx.from_numpy(rng.permutation(self.n).astype(np.int32))
        self.pool = [self._leaf((self.n, SIDE), gg.F32) for _ in range(2)]
        with self.ctx:
            for _ in range(rng.integers(4, 28)):
                try:
                    t = self._step()
                except gg.ShapeError as e:  # an overlap
                    assert "shares bytes" in str(e) or "share bytes" in str(e), e
                    self.refused += 1
                    continue
                self.order.append(t)
                self.built.build_forward_expand(t)
                if rng.random() < 0.2:
                    t.set_output()
        self.order[-1].set_output()

    def _leaf(self, shape: tuple[int, ...], dtype: gg.DType, scale: float = 1.0) -> Tensor:
        return self.ctx.from_numpy((self.rng.standard_normal(shape) * scale).astype(np.float32), dtype=dtype)

    def _any(self) -> Tensor:
        return self.pool[-1 - min(int(self.rng.geometric(0.35)) - 1, len(self.pool) - 1)]

    def _step(self) -> Tensor:
        names = [n for n in dir(self) if n.startswith("do_")]
        t: Tensor = getattr(self, names[self.rng.integers(len(names))])()
        if t.ne == self.pool[0].ne and t.dtype is gg.F32:
            self.pool.append(t)
        return t

    def do_unary(self) -> Tensor:
        return getattr(gg, UNARY[self.rng.integers(len(UNARY))])(gg.cont(self._any()))

    def do_unary_in_place(self) -> Tensor:
        a, which = self._any(), self.rng.integers(3)
        if which == 0:
            return gg.scale_inplace(a, 0.5)
        return gg.clamp_inplace(a, -2.0, 2.0) if which == 1 else gg.rms_norm_inplace(a, 1e-5)

    def do_binary(self) -> Tensor:
        return getattr(gg, BINARY[self.rng.integers(len(BINARY))])(self._any(), self._any())

    def do_product(self) -> Tensor:
        return gg.mul_mat(self.weights[self.rng.integers(3)], self._any())

    def do_residual(self) -> Tensor:
        return gg.add(gg.mul_mat(self.weights[self.rng.integers(3)], self._any()), self._any())

    def do_glu(self) -> Tensor:
        a = self._norm(self._any())
        gate, up = (gg.mul_mat(w, a) for w in self.weights[:2])
        return gg.mul(gg.silu(gate), up)

    def _norm(self, a: Tensor) -> Tensor:
        return gg.mul(gg.rms_norm(a, 1e-5), self.row)

    def do_norm(self) -> Tensor:
        return self._norm(self._any())

    def do_rope(self) -> Tensor:
        a = gg.reshape_3d(gg.cont(self._any()), HEAD, SIDE // HEAD, self.n)
        return gg.reshape_2d(gg.rope(a, self.pos, HEAD, int(self.rng.choice([0, 2]))), SIDE, self.n)

    def do_rope_store(self) -> Tensor:
        a = gg.reshape_3d(gg.cont(self._any()), HEAD, SIDE // HEAD, self.n)
        at = int(self.rng.integers(0, CELLS - self.n + 1))
        return gg.cpy(gg.rope(a, self.pos, HEAD, 0), gg.view_1d(self.k, SIDE * self.n, at * self.k.nb[1]))

    def do_rope_over_itself(self) -> Tensor:
        """A part of the cache (F32) roped and stored somewhere near it."""
        n, at, to = min(self.n, 8), *map(int, self.rng.integers(0, CELLS - 8, 2))
        k = self.k if self.k.dtype is gg.F32 else self._leaf((CELLS, SIDE), gg.F32)
        a = gg.view_3d(k, HEAD, SIDE // HEAD, n, HEAD * 4, k.nb[1], at * k.nb[1])
        rope = gg.rope(a, gg.view_1d(self.pos, n, 0), HEAD, 0)
        return gg.cpy(rope, gg.view_1d(k, SIDE * n, min(at + to % 3, CELLS - n) * k.nb[1]))

    def do_store(self) -> Tensor:
        """A tensor, or a part of one, into a part of another: often the same one."""
        a, b = self._any(), self._any()
        m = int(self.rng.integers(1, SIDE + 1))
        from_, to = (int(4 * x) for x in self.rng.integers(0, SIDE - m + 1, 2))
        rows = int(self.rng.integers(1, self.n + 1))
        return gg.cpy(gg.view_2d(a, m, rows, a.nb[1], from_), gg.view_2d(b, m, rows, b.nb[1], to))

    def do_part_in_place(self) -> Tensor:
        a, b = self._any(), self._any()
        x, y = (int(4 * x) for x in self.rng.integers(0, 33, 2))
        return gg.add_inplace(gg.view_2d(a, 32, self.n, a.nb[1], x), gg.view_2d(b, 32, self.n, b.nb[1], y))

    def do_set_rows(self) -> Tensor:
        return gg.set_rows(self._any(), self._any(), self.perm)

    def do_get_rows(self) -> Tensor:
        return gg.get_rows(self._any(), self.perm)

    def do_turned(self) -> Tensor:
        return gg.cont(gg.transpose(gg.cont(gg.transpose(self._any()))))

    def do_concat(self) -> Tensor:
        both = gg.concat(self._any(), self._any(), 0)
        return gg.cont(gg.view_2d(both, SIDE, self.n, both.nb[1], 4 * int(self.rng.integers(0, SIDE + 1))))

    def do_attention(self) -> Tensor:
        heads, scale = SIDE // HEAD, float(self.rng.choice([0.1, 1.0]))
        q = gg.permute(gg.reshape_3d(gg.cont(self._any()), HEAD, heads, self.n), 0, 2, 1, 3)
        size = self.k.dtype.type_size
        k = gg.view_3d(self.k, HEAD, CELLS, heads, SIDE * size, HEAD * size, 0)
        v = gg.view_3d(self.v, CELLS, HEAD, heads, self.v.nb[1], self.v.nb[1] * HEAD, 0)
        kqv = gg.mul_mat(v, gg.soft_max_ext(gg.mul_mat(k, q), None, scale, 0.0))
        return gg.reshape_2d(gg.cont(gg.permute(kqv, 0, 2, 1, 3)), SIDE, self.n)

    def do_flash(self) -> Tensor:
        heads, size = SIDE // HEAD, self.k.dtype.type_size
        q = gg.permute(gg.reshape_3d(gg.cont(self._any()), HEAD, heads, self.n), 0, 2, 1, 3)
        k = gg.view_3d(self.k, HEAD, CELLS, heads, SIDE * size, HEAD * size, 0)
        return gg.reshape_2d(gg.flash_attn_ext(q, k, k, None, 0.2), SIDE, self.n)

    def graph(self, first: int, end: int, g: gg.Graph | None = None) -> gg.Graph:
        g = gg.Graph() if g is None else g
        for t in self.order[first:end]:
            g.build_forward_expand(t)
        return g


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Squared error over squared reference (1e-30 below); infinity where they are not finite at the same places."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    ok = np.isfinite(want) & (np.abs(want) < 1e30)
    if not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return np.inf if (np.abs(want[np.isfinite(want)]) < 1e30).all() else 0.0  # f32 may overflow in between
    return float(np.sum((got[ok] - want[ok]) ** 2) / max(np.sum(want[ok] ** 2), 1e-30))


def node_by_node(seed: int, isa: str) -> tuple[Net, list[bytes], list[bytes]]:
    """The values of all outputs and leafs, each node having been compared with the reference on its own sources."""
    net = Net(seed, isa)
    backend = CpuBackend(2, isa, ())
    g = net.graph(0, len(net.order))
    for t in g.nodes:
        if t.view_src is None:
            t.allocate()
    for t in g.nodes:
        if OPS[t.op].kernel is None:
            continue
        SEEN[t.op] += 1
        roots = {s.root: s.root.raw().copy() for s in (t, *t.src) if s is not None}
        compute_node(t)
        want = np.array(t.elements())
        for root, bytes_ in roots.items():
            root.raw()[...] = bytes_
        backend.compile(steps_of([t]), lambda s: s).run()
        error = nmse(t.elements(), want)
        assert error <= LOCAL.get(t.op, 1e-8), f"seed {seed}: {t.describe()} {t.op}: NMSE {error:.3g}"
    outputs = [t.tobytes() for t in g.nodes if t.flags & FLAG_OUTPUT and t.view_src is None]
    return net, outputs, [t.tobytes() for t in g.leafs]


def whole(seed: int, isa: str, fusions: Collection[str], grow: bool) -> tuple[list[bytes], list[bytes], set[str]]:
    """The outputs and leafs of a planned graph, and the fusions that took place. It runs in one go; with `grow` its
    first half runs before that, with fewer outputs.
    """
    net = Net(seed, isa)
    sched = gg.Scheduler([CpuBackend(2, isa, fusions)])
    g, half = gg.Graph(), len(net.order) // 2 + 1
    if grow:
        net.graph(0, half, g)
        kept = [t for t in g.nodes if t.flags & FLAG_OUTPUT]
        before = {t: t.raw().copy() for t in g.leafs}
        for t in kept:
            t.flags &= ~FLAG_OUTPUT
        sched.compute(g)
        for t in kept:
            t.set_output()
        for t, bytes_ in before.items():
            t.raw()[...] = bytes_
    net.graph(half if grow else 0, len(net.order), g)
    sched.compute(g)
    fused = {s.fusion for split in sched.splits for s in split.steps if s.fusion}
    outputs = [t.tobytes() for t in g.nodes if t.flags & FLAG_OUTPUT and t.view_src is None]
    return outputs, [t.tobytes() for t in g.leafs], fused


def check(seed: int, isa: str) -> None:
    net, outputs, leafs = node_by_node(seed, isa)
    SEEN["graphs"] += 1
    SEEN["refused"] += net.refused
    for fusions in ((), FUSIONS, [f for f in FUSIONS if f not in ("attention", "norm")]):
        for grow in (False, True):
            got, got_leafs, fused = whole(seed, isa, fusions, grow)
            SEEN.update(f"fused {f}" for f in fused)
            if "attention" in fused or (isa == "avx512" and "norm" in fusions):
                continue  # not bit for bit: see fuse.py
            assert got == outputs and got_leafs == leafs, f"seed {seed}: fusions {fusions}, growing {grow}"


@pytest.mark.parametrize("isa", isa_levels())
def test_graphs(isa: str) -> None:
    share = COUNT // len(isa_levels())
    first = SEED + share * list(isa_levels()).index(isa)
    for seed in range(first, first + share):
        check(seed, isa)
    print(isa, dict(SEEN))


def scores_and_weights(seed: int, backend: CpuBackend | RefBackend) -> list[tuple[np.ndarray, np.ndarray]]:
    """The sources and results of all soft_max nodes."""
    net = Net(seed, isa_names()[-1])
    g = net.graph(0, len(net.order))
    found = [t for t in g.nodes if t.op == "soft_max" and t.view_src is None]
    for t in found:
        t.set_output()
        if t.src[0] is not None and t.src[0].op != "none":
            t.src[0].set_output()
    gg.Scheduler([backend]).compute(g)
    untouched = {t.view_src for t in g.nodes if OPS[t.op].kernel is not None}
    return [
        (np.array(t.src[0].elements()) * t.op_params["scale"], np.array(t.elements()))
        for t in found
        if t.src[0] is not None and not {t, t.src[0].root} & untouched
    ]


def isa_names() -> list[str]:
    return list(isa_levels())


def test_soft_max_follows_its_scores() -> None:
    """Whole graphs on cpu and ref: where a score moves by d, a weight moves by at most exp(2 d) - 1 of itself."""
    large: list[str] = []
    for seed in range(SEED, SEED + COUNT):
        cpu, ref = (scores_and_weights(seed, b) for b in (CpuBackend(2), RefBackend()))
        for (s, p), (s_ref, p_ref) in zip(cpu, ref, strict=True):
            if not (np.isfinite(s).all() and np.isfinite(s_ref).all()):
                continue
            d = np.abs(s.astype(np.float64) - s_ref).max(axis=3, keepdims=True)
            error = np.abs(p.astype(np.float64) - p_ref)
            bound = np.minimum(1.0, p_ref * np.expm1(np.minimum(2 * d, 700)) + 1e-5 * p_ref + 1e-7)
            assert (error <= bound).all(), f"seed {seed}: {error.max():.3g} is more than its scores explain"
            if error.max() > 5e-3:
                large.append(f"{seed}: weight {error.max():.4f}, score {d.max():.4f} of {np.abs(s_ref).max():.3g}")
    print(f"{len(large)} of {COUNT} graphs have a soft_max off by more than 5e-3, all explained by their scores:")
    print("\n".join(large[:20]))
