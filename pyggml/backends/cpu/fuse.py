"""Plan-time fusion: nodes that one kernel computes together. Values that nothing else reads get no memory.

The results are those of the nodes one by one, bit for bit, except attention's and, at the level avx512, norms' that
products do (these are avx2's). A node that is an output, or that anything outside of its pattern reads, is never fused
away.

norm        rms_norm(x) * weight; where only products of repacked weights read it, they take x and do it themselves
share       products of the same columns (Q, K and V) quantise or pack them once
glu         silu(gate) * up, where the products store it or in one pass
residual    a product and what is added to it
rope_store  rope and the copy of its result to the cache
attention   v (transposed) times soft_max of k times q, and the copy that puts the heads of each token side by side
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...alloc import Step
from ...dtypes import DType
from ...errors import BackendError
from ...opdef import OPS
from ...tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor
from .isa import Kernel
from .repack import product_kernel

FUSIONS = ("norm", "share", "glu", "residual", "rope_store", "attention")
_MAX_PRODUCTS = 3
_FLOATS = (DType.F32, DType.F16, DType.BF16)


def enabled_fusions(wanted: Collection[str] | None = None) -> frozenset[str]:
    """The fusions to use: `wanted`, else those PYGGML_FUSE names (comma-separated; `none`), else all.

    Raises BackendError for an unknown one.
    """
    if wanted is None:
        named = os.environ.get("PYGGML_FUSE", ",".join(FUSIONS))
        wanted = [n for n in named.split(",") if n not in ("", "none")]
    unknown = sorted(set(wanted) - set(FUSIONS))
    if unknown:
        raise BackendError(f"no fusion is called {', '.join(unknown)}; there are {', '.join(FUSIONS)}")
    return frozenset(wanted)


def fuse(nodes: Sequence[Tensor], uses: Mapping[Tensor, int], isa: str, enabled: Collection[str]) -> list[Step]:
    """The steps that compute `nodes`, in order. `uses`: how often the whole graph reads each tensor."""
    return _Fuser(nodes, uses, isa, enabled).steps()


def norm_of(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """(rms_norm node, weight) where `t` is the product of a norm's rows and one row, all dense f32."""
    if t.op != "mul" or t.view_src is not None:
        return None
    norm, weight = t.src
    if norm is None or weight is None or norm.op != "rms_norm" or norm.src[0] is None:
        return None
    dense = all(_is_f32_rows(s) for s in (norm.src[0], norm, weight, t))
    return (norm, weight) if dense and weight.ne == (t.ne[0], 1, 1, 1) else None


def gate_of(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """(silu node, value) where `t` is their product, element by element."""
    if t.op != "mul" or t.view_src is not None:
        return None
    for silu, up in (t.src, t.src[::-1]):
        if silu is not None and up is not None and silu.op == "silu" and silu.ne == up.ne and silu is not up:
            return (silu, up) if all(_is_f32_rows(s) for s in (silu.src[0], silu, up, t)) else None
    return None


def other_source(t: Tensor, s: Tensor) -> Tensor | None:
    """Of a node with two sources the one that is not `s`."""
    return t.src[1] if t.src[0] is s else t.src[0]


def attention_of(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """(product of k and q, soft_max node) where `t` is v times attention's weights, v and k of the same heads."""
    if t.op != "mul_mat" or t.view_src is not None:
        return None
    v, weights = t.src
    kq = weights.src[0] if weights is not None and weights.op == "soft_max" else None
    if v is None or weights is None or kq is None or weights.view_src is not None or kq.op != "mul_mat":
        return None
    k, q = kq.src
    if k is None or q is None or not _is_f32_rows(q) or v.dtype not in _FLOATS or v.nb[0] != v.dtype.type_size:
        return None
    same = k.nb[0] == k.dtype.type_size and k.ne[1:] == (v.ne[0], *v.ne[2:]) and k.ne[3] == q.ne[3] == t.ne[3]
    return (kq, weights) if same else None


def _is_f32_rows(t: Tensor | None) -> bool:
    return t is not None and t.dtype is DType.F32 and t.nb[0] == 4


class _Fuser:
    def __init__(self, nodes: Sequence[Tensor], uses: Mapping[Tensor, int], isa: str, enabled: Collection[str]) -> None:
        self.nodes, self.uses, self.isa, self.enabled = nodes, uses, isa, enabled
        self.at = {t: i for i, t in enumerate(nodes)}
        self.readers: dict[Tensor, list[Tensor]] = {}
        self.writers = [
            (i, t.view_src) for i, t in enumerate(nodes) if t.view_src is not None and OPS[t.op].kernel is not None
        ]
        for t in nodes:
            for s in t.src:
                if s is not None:
                    self.readers.setdefault(s, []).append(t)
        self.kernels: dict[Tensor, Kernel] = {}
        for t in nodes:
            found = product_kernel(isa, t) if t.op == "mul_mat" and t.ne[2] == t.ne[3] == 1 else None
            if found is not None:
                self.kernels[t] = found[0]
        self.taken: dict[Tensor, Step | None] = {}  # node -> the step that stands in its place, if it is one

    def steps(self) -> list[Step]:
        for t in self.nodes if "attention" in self.enabled else ():
            self._attention(t)
        for t in self.nodes:
            if t in self.kernels and t not in self.taken:
                self._products(t)
        for t in self.nodes:
            if t not in self.taken:
                self._pair(t)
        steps = (self.taken.get(t, Step((t,))) for t in self.nodes)
        return [s for s in steps if s is not None]

    def _take(self, place: Tensor, step: Step) -> None:
        self.taken.update(dict.fromkeys(step.nodes))
        self.taken[place] = step

    def _passes(self, t: Tensor, n: int = 1) -> bool:
        """Whether `t` is a node here that is read n times, all in this split, and need not exist otherwise."""
        return (
            t in self.at
            and t not in self.taken
            and t.view_src is None
            and not t.flags & (FLAG_INPUT | FLAG_OUTPUT)
            and self.uses[t] == n == len(self.readers.get(t, ()))
        )

    def _reader(self, t: Tensor) -> Tensor | None:
        """The one node that reads `t`, where it has no other use."""
        return self.readers[t][0] if self._passes(t) else None

    def _unwritten(self, sources: Iterable[Tensor | None], first: Tensor, last: Tensor) -> bool:
        """Whether no node between first and last writes to what `sources` lie in."""
        roots = {s.root for s in sources if s is not None}
        begin, end = self.at[first], self.at[last]
        return not any(begin < i < end and root in roots for i, root in self.writers)

    # -- products of weights that the CPU has its own form of ------------------------------------------------------

    def _products(self, t: Tensor) -> None:
        """The largest step that `t`, the first product of its columns that is left, can be part of."""
        x = t.src[1]
        assert x is not None
        readers = self.readers[x]
        same = [
            r
            for r in readers[readers.index(t) :]
            if self.kernels.get(r) is self.kernels[t] and r.src[1] is x and r not in self.taken
        ]
        step = self._glu(same) or self._residual(t) or self._shared(same)
        norm = self._norm_before(x, step)
        if norm:
            step = Step((*norm, *step.nodes), step.inner.union(norm), step.fusion, step.heirs)
        if len(step.nodes) > 1:
            several = len(step.nodes) - len(step.inner) > 1
            self._take(next(n for n in step.nodes if n in self.kernels) if several else step.nodes[-1], step)

    def _norm_before(self, x: Tensor, step: Step) -> tuple[Tensor, ...]:
        """The norm that makes `x`, where only the products of a step read it."""
        n = sum(t.op == "mul_mat" for t in step.nodes)
        found = norm_of(x) if "norm" in self.enabled and self._passes(x, n) else None
        if found is None or not self._passes(found[0]):
            return ()
        norm, weight = found
        return (norm, x) if self._unwritten((*norm.src, weight), norm, step.nodes[-1]) else ()

    def _glu(self, products: Sequence[Tensor]) -> Step | None:
        """silu(gate) * up of two of the products."""
        for gate in products if "glu" in self.enabled else ():
            silu = self._reader(gate)
            out = None if silu is None else self._reader(silu)
            found = None if out is None or out in self.taken else gate_of(out)
            if silu is None or out is None or found is None or found[0] is not silu:
                continue
            up = found[1]
            if up in products and self._passes(up) and up.nb == out.nb:
                nodes = tuple(sorted((gate, up, silu, out), key=self.at.__getitem__))
                if self._unwritten((*gate.src, *up.src), nodes[0], out):
                    return Step(nodes, frozenset((gate, up, silu)), "products")
        return None

    def _residual(self, t: Tensor) -> Step | None:
        """A product and what is added to it."""
        out = self._reader(t) if "residual" in self.enabled else None
        if out is None or out.op != "add" or out in self.taken or out.view_src is not None:
            return None
        other = other_source(out, t)
        if other is None or other is t or other.ne != t.ne or not _is_f32_rows(other) or out.nb != t.nb:
            return None
        if not self._unwritten(t.src, t, out):
            return None
        return Step((t, out), frozenset((t,)), "products", (other,))

    def _shared(self, same: Sequence[Tensor]) -> Step:
        """The first of these products, and others that can be computed as early."""
        first, *others = same
        group = [p for p in others if self._unwritten(p.src, first, p)]
        n = _MAX_PRODUCTS if "share" in self.enabled else 1
        return Step((first, *group[: n - 1]), fusion="products")

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, t: Tensor) -> None:
        """`t` = v times soft_max of k times q, and what only brings its heads together."""
        found = attention_of(t)
        if found is None or not all(self._passes(n) for n in found):
            return
        nodes = (*found, t, *self._merged(t))
        step = Step(nodes, frozenset(nodes[:-1]), "attention")
        if self._unwritten(step.sources(), nodes[0], nodes[-1]):
            self._take(nodes[-1], step)

    def _merged(self, t: Tensor) -> tuple[Tensor, ...]:
        """permute(t, 0, 2, 1, 3) and its dense copy, where nothing else reads t."""
        view = self._reader(t)
        if view is None or view.op != "permute" or view.flags & (FLAG_INPUT | FLAG_OUTPUT):
            return ()
        swapped = tuple((x[0], x[2], x[1], x[3]) for x in (t.ne, t.nb))
        readers = self.readers.get(view, ())
        if (view.ne, view.nb) != swapped or len(readers) != 1 or self.uses[view] != 1 or readers[0].op != "cont":
            return ()
        return (view, readers[0])

    # -- pairs -------------------------------------------------------------------------------------------------------

    def _pair(self, t: Tensor) -> None:
        """Two nodes, of which `t` is the second."""
        stored = t.src[0] if t.op == "cpy" and t.dtype in _FLOATS and t.is_contiguous else None
        if (norm := norm_of(t)) is not None:
            self._join("norm", norm[0], t, norm[0].src[0])
        elif (gate := gate_of(t)) is not None:
            self._join("glu", gate[0], t, gate[1])
        elif stored is not None and stored.op == "rope":
            self._join("rope_store", stored, t)

    def _join(self, fusion: str, first: Tensor, t: Tensor, heir: Tensor | None = None) -> None:
        """Compute `first` where `t` stands, if that is its only reader."""
        if fusion in self.enabled and self._passes(first) and self._unwritten(first.src, first, t):
            self._take(t, Step((first, t), frozenset((first,)), fusion, () if heir is None else (heir,)))
