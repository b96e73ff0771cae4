"""Plan-time fusion: nodes that one kernel computes together. Values that nothing else reads get no memory.

The results are those of the nodes one by one, bit for bit, except attention's and, at the level avx512, norms' that
products do (these are avx2's). A node that is an output, or that anything outside of its pattern reads, is never fused
away.

norm       rms_norm(x) or norm(x), times weight, plus a bias or a residual; where only products of repacked weights, or
            rope, read rms_norm(x) * weight, they take x and do it themselves
share      products of the same columns (Q, K and V) quantise or pack them once
glu        act(gate) * up, where the products store it or in one pass; also of experts, and of one product with both
residual   a product, its bias, and what is added to it
rope       rope, the norm of what it turns, and the copy of its result to the cache
attention  v (transposed, or a transposed copy) times soft_max of k times q (or of its tanh), and the copy that puts
            the heads of each token side by side
experts    the sum of what experts give, times their weights, and what is added to it
scan       a recurrence, which reads its states from their cells and stores them there
conv       a convolution over time, the bias and silu of its result, and what cells keep of its window
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...buffers.alloc import Step
from ...errors import BackendError
from ...opdef import OPS
from ...tensor import FLAG_INPUT, FLAG_OUTPUT, Size, Tensor
from ..runs import runs_of
from .fuse_patterns import (
    FLOATS,
    Gate,
    attention_of,
    bias_of,
    gate_of,
    is_f32_rows,
    norm_of,
    other_source,
    scan_of,
    states_bytes,
    views_of_rows,
    weighted_of,
    window_of,
)
from .isa import Kernel
from .repack import GROUP, PRODUCTS, product_kernel

FUSIONS = ("norm", "share", "glu", "residual", "rope", "attention", "experts", "scan", "conv")
_MAX_PRODUCTS = 3
_ROPES = ("rope", "rope_multi")


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
    kernels = {t: found[0] for t in nodes if t.op in PRODUCTS and (found := product_kernel(isa, t)) is not None}
    made: dict[int, list[Step]] = {}
    for run in runs_of(nodes, uses, kernels):
        part = nodes[run.begin : run.end]
        if run.like is None:
            made[run.begin] = _Fuser(part, uses, kernels, isa, enabled).steps()
        else:
            to = dict(zip(nodes[run.like : run.like + len(part)], part, strict=True))
            made[run.begin] = [s.of(tuple([to[t] for t in s.nodes]), s) for s in made[run.like]]
    return [s for steps in made.values() for s in steps]


class _Fuser:
    def __init__(
        self,
        nodes: Sequence[Tensor],
        uses: Mapping[Tensor, int],
        kernels: Mapping[Tensor, Kernel],
        isa: str,
        enabled: Collection[str],
    ) -> None:
        self.nodes, self.uses, self.isa, self.enabled = nodes, uses, isa, enabled
        self.at = {t: i for i, t in enumerate(nodes)}
        self.readers: dict[Tensor, list[Tensor]] = {}
        writers = [
            (i, t.view_src) for i, t in enumerate(nodes) if t.view_src is not None and OPS[t.op].kernel is not None
        ]
        self.writes_at, self.written = [i for i, _ in writers], [root for _, root in writers]
        for t in nodes:
            for s in t.src:
                if s is None:
                    continue
                if s in self.readers:
                    self.readers[s].append(t)
                else:
                    self.readers[s] = [t]
        self.kernels = {  # of products of one matrix, or by expert
            t: kernels[t] for t in nodes if t in kernels and (t.op == "mul_mat_id" or t.ne[2] == t.ne[3] == 1)
        }
        self.taken: dict[Tensor, Step | None] = {}  # node -> the step that stands in its place, if it is one

    def steps(self) -> list[Step]:
        for t in self.nodes if "attention" in self.enabled else ():
            self._attention(t)
        for t in self.nodes if "experts" in self.enabled else ():
            self._experts_sum(t)
        for t in self.nodes:
            if t.op == "set_rows" and not ("scan" in self.enabled and self._scan(t)) and "conv" in self.enabled:
                self._conv(t)
        if "rope" in self.enabled:
            self._ropes()
        for t in self.nodes:
            if t in self.kernels and t not in self.taken:
                self._products(t)
        for t in self.nodes:
            if t not in self.taken:
                self._pair(t)
        steps = (self.taken[t] if t in self.taken else Step((t,)) for t in self.nodes)
        return [s for s in steps if s is not None]

    def _take(self, place: Tensor, step: Step) -> None:
        self.taken.update(dict.fromkeys(step.nodes))
        self.taken[place] = step

    def _passes(self, t: Tensor, n: int = 1) -> bool:
        """Whether `t` is a node here that is read n times, all in this split, and need not exist otherwise."""
        return (
            t in self.at
            and t not in self.taken
            and (t.view_src is None or OPS[t.op].kernel is None)
            and not t.flags & (FLAG_INPUT | FLAG_OUTPUT)
            and self.uses[t] == n == len(self.readers.get(t, ()))
        )

    def _reader(self, t: Tensor) -> Tensor | None:
        """The one node that reads `t`, where it has no other use."""
        return self.readers[t][0] if self._passes(t) else None

    def _unwritten(self, sources: Iterable[Tensor | None], first: Tensor, last: Tensor) -> bool:
        """Whether no node after first, up to last (which writes as it reads), writes to what `sources` lie in."""
        written = self.written[
            bisect_right(self.writes_at, self.at[first]) : bisect_right(self.writes_at, self.at[last])
        ]
        return not written or {s.root for s in sources if s is not None}.isdisjoint(written)

    # -- products of weights that the CPU has its own form of ------------------------------------------------------

    def _products(self, t: Tensor) -> None:
        """The largest step that `t`, the first product of its columns that is left, can be part of."""
        x = t.src[1]
        assert x is not None
        readers = self.readers[x]
        same = [
            r
            for r in readers[readers.index(t) :]
            if self.kernels.get(r) is self.kernels[t] and r.src[1:] == t.src[1:] and r not in self.taken
        ]
        rest = self._by_expert if t.op == "mul_mat_id" else self._plain
        step = self._glu(same) or rest(same)
        norm = self._norm_before(x, step)
        if norm:
            step = Step((*norm, *step.nodes), step.inner.union(norm), step.fusion, step.heirs)
        if len(step.nodes) > 1:
            several = len(step.nodes) - len(step.inner) > 1
            self._take(next(n for n in step.nodes if n in self.kernels) if several else step.nodes[-1], step)
        if t not in step.nodes:  # the gate and value of others that read the same columns
            self._products(t)

    def _norm_before(self, x: Tensor, step: Step) -> tuple[Tensor, ...]:
        """The norm that makes `x`, where only the products of a step read it."""
        n = sum(t.op == "mul_mat" for t in step.nodes)
        found = norm_of(x) if "norm" in self.enabled and self._passes(x, n) else None
        if found is None or not self._passes(found[0]):
            return ()
        norm, weight = found
        if norm.op != "rms_norm":
            return ()
        return (norm, x) if self._unwritten((*norm.src, weight), norm, step.nodes[-1]) else ()

    def _biased(self, t: Tensor) -> tuple[Tensor, ...]:
        """A product and, where that is all it is read for, the sum of it and its bias."""
        out = self._reader(t) if "residual" in self.enabled else None
        return (t,) if out is None or out in self.taken or bias_of(out) is None else (t, out)

    def _products_step(self, nodes: Iterable[Tensor], results: Collection[Tensor], *heirs: Tensor) -> Step | None:
        """The step of these nodes, if nothing they read is written meanwhile. All but the results are inner.
        `heirs`: what the last one reads as it writes."""
        ordered = tuple(sorted(nodes, key=self.at.__getitem__))
        inner = frozenset(ordered) - frozenset(results)
        read = [s for t in (ordered[:-1] if heirs else ordered) for s in t.src if s not in inner]
        return Step(ordered, inner, "products", heirs) if self._unwritten(read, ordered[0], ordered[-1]) else None

    def _glu(self, products: Sequence[Tensor]) -> Step | None:
        """act(gate) * up of two of the products, or of the halves of one."""
        biased = [self._biased(p) for p in products] if "glu" in self.enabled else []
        ends = {nodes[-1]: nodes for nodes in biased}
        for end, nodes in ends.items():
            out, unit = self._unit(end)
            if out is None or unit is None or out in self.taken:
                continue
            act = () if unit.act is None else (unit.act,)
            up: tuple[Tensor, ...] | None = None
            if unit.up is None:
                up = () if out.ne[0] % GROUP == 0 else None
            elif unit.up in ends and self._passes(unit.up) and unit.up.nb == out.nb:
                up = ends[unit.up]
            step = None if up is None else self._products_step((*nodes, *up, *act, out), (out,))
            if step is not None:
                return step
        return None

    def _unit(self, gate: Tensor) -> tuple[Tensor | None, Gate | None]:
        """The node of a gated unit that reads `gate`, itself or through an activation."""
        reader = self._reader(gate)
        for out in (reader, reader and self._reader(reader)):
            unit = None if out is None else gate_of(out)
            if unit is not None and unit.gate is gate:
                return out, unit
        return None, None

    def _by_expert(self, same: Sequence[Tensor]) -> Step:
        """The first of these products by expert, and its bias."""
        nodes = self._biased(same[0])
        return self._products_step(nodes, nodes[-1:]) or Step((same[0],), fusion="products")

    def _plain(self, same: Sequence[Tensor]) -> Step:
        return self._residual(same[0]) or self._shared(same)

    def _residual(self, t: Tensor) -> Step | None:
        """A product, its bias, and what is added to it."""
        nodes = self._biased(t)
        end = nodes[-1]
        out = self._reader(end) if "residual" in self.enabled else None
        if out is None or out.op != "add" or out in self.taken or out.view_src is not None:
            return None
        other = other_source(out, end)
        if other is None or other is end or other.ne != t.ne or not is_f32_rows(other) or out.nb != t.nb:
            return None
        return self._products_step((*nodes, out), (out,), other)

    def _shared(self, same: Sequence[Tensor]) -> Step:
        """The first of these products, and others that can be computed as early."""
        first, *others = same
        step = self._products_step(nodes := self._biased(first), nodes[-1:]) or Step((first,), fusion="products")
        for p in others[: _MAX_PRODUCTS - 1] if "share" in self.enabled else ():
            more = self._biased(p)
            results = [t for t in step.nodes if t not in step.inner]
            step = self._products_step((*step.nodes, *more), (*results, more[-1])) or step
        return step

    # -- states ------------------------------------------------------------------------------------------------------

    def _scan(self, store: Tensor) -> bool:
        """A scan, and the node that stores its states: the rest of its result is read later, through views."""
        found = scan_of(store)
        if found is None or found.scan not in self.at or found.scan.flags & FLAG_OUTPUT:
            return False
        scan, end = found.scan, found.scan.nbytes - states_bytes(found, store)
        nodes = (*found.inner, scan, store)
        readers = self.readers[scan]
        for v in readers:
            reach = int(v.view_offs) + 4 + sum((n - 1) * nb for n, nb in zip(v.ne, v.nb, strict=True))
            plain = v.op == "view" and not isinstance(v.view_offs, Size) and not v.flags & FLAG_OUTPUT
            if v not in nodes and (not plain or reach > end):
                return False
        between = self.nodes[self.at[scan] + 1 : self.at[store]]
        if self.uses[scan] != len(readers) or any(t not in nodes and OPS[t.op].kernel is not None for t in between):
            return False
        return self._take_states(nodes, (scan, store), "scan")

    def _conv(self, store: Tensor) -> bool:
        """A convolution, what is done to its result, and the node that stores the end of its window."""
        found = window_of(store)
        conv = None if found is None else next((t for t in self.readers[found.window] if t.op == "ssm_conv"), None)
        weights = None if conv is None else conv.src[1]
        if found is None or conv is None or conv.src[0] is not found.window or weights is None:
            return False
        if not weights.is_contiguous:
            return False
        way, passed, biased = [conv], [conv], False
        while (t := self._reader(way[-1])) is not None and t not in self.taken and t.ne[0] == conv.ne[0]:
            bias = other_source(t, way[-1]) if t.op == "add" and not biased else None
            is_bias = bias is not None and bias.ne == (t.ne[0], 1, 1, 1) and is_f32_rows(bias)
            if t.view_src is None and (is_bias or t.op == "silu"):
                way, biased = [*way, t], True
                passed = way
                if t.op == "silu":
                    break
            elif t.op == "reshape":
                way = [*way, t]
            else:
                break
        nodes = (*found.inner, store, *passed)
        return self.at[store] < self.at[conv] and self._take_states(nodes, (store, passed[-1]), "conv")

    def _take_states(self, nodes: Sequence[Tensor], results: Collection[Tensor], fusion: str) -> bool:
        """Let these nodes be a step, the last of them in its place; all but the results are inner. Nobody else may look
        at the cells, or change what is read, in between."""
        ordered = tuple(sorted(nodes, key=self.at.__getitem__))
        inner = frozenset(ordered) - frozenset(results)
        for t in inner:
            n = sum(s is t for node in ordered for s in node.src)
            if not self._passes(t, n):
                return False
        step = Step(ordered, inner, fusion)
        store = next(t for t in ordered if t.op == "set_rows")
        read, cells = {s.root for s in step.sources()}, store.root
        for t in self.nodes[self.at[ordered[0]] : self.at[ordered[-1]]]:
            if t not in ordered and OPS[t.op].kernel is not None:
                changes = t.view_src is not None and t.root in read
                if changes or any(s is not None and s.root is cells for s in t.src):
                    return False
        self._take(ordered[-1], step)
        return True

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, t: Tensor) -> None:
        """`t` = v times soft_max of k times q, and what only brings its heads together."""
        found = attention_of(t)
        if found is None or not all(self._passes(n) for n in found.inner):
            return
        nodes = tuple(sorted((*found.inner, t, *self._merged(t)), key=self.at.__getitem__))
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

    # -- mixtures ----------------------------------------------------------------------------------------------------

    def _experts_sum(self, t: Tensor) -> None:
        """The sum over the rows of `t`, each times its weight where nothing else reads those, and what is added."""
        readers = self.readers.get(t, [])
        if not views_of_rows(t, readers) or not all(self._passes(v) for v in readers):
            return
        weighted = (t,) if weighted_of(t) is not None and self._passes(t, len(readers)) else ()
        nodes, total = [*weighted, *readers], readers[0]
        for view in readers[1:]:
            out = self.readers[view][0]
            if out.op != "add" or out.view_src is not None or out.src[0] is not total or not self._passes(total):
                return
            nodes.append(total := out)
        out = self._reader(total)
        other = other_source(out, total) if out is not None and out.op == "add" and out.view_src is None else None
        heirs: tuple[Tensor, ...] = ()
        if out is not None and other is not None and other is not total and other.ne == out.ne and is_f32_rows(other):
            nodes, heirs = [*nodes, out], (other,)
        nodes = tuple(sorted(nodes, key=self.at.__getitem__))
        step = Step(nodes, frozenset(nodes[:-1]), "experts", heirs)
        if self._unwritten((s for s in step.sources() if s not in heirs), nodes[0], nodes[-1]):
            self._take(nodes[-1], step)

    # -- ropes -------------------------------------------------------------------------------------------------------

    def _ropes(self) -> None:
        for t in self.nodes:  # those that are stored first: a rope may also be a step without that
            rope = t.src[0] if t.op == "cpy" else None
            plain = not t.op_params.get("limit") and t.dtype in FLOATS and t.is_contiguous
            if rope is not None and rope.op in _ROPES and plain and self._passes(rope):
                self._rope(rope, t)
        for t in self.nodes:
            if t.op in _ROPES and t not in self.taken:
                self._rope(t)

    def _rope(self, rope: Tensor, *store: Tensor) -> None:
        """A rope, the norm of what it turns, and its copy to a cache."""
        for before in (self._heads_norm(rope), ()):
            nodes = (*before, rope)
            read = Step(nodes, frozenset(nodes)).sources()
            nodes = (*nodes, *store)
            if len(nodes) > 1 and self._unwritten(read, nodes[0], nodes[-1]):
                x = nodes[0].src[0]
                heirs = () if store or x is None else (x,)
                self._take(nodes[-1], Step(nodes, frozenset(nodes[:-1]), "rope", heirs))
                return

    def _heads_norm(self, rope: Tensor) -> tuple[Tensor, ...]:
        """The norm of what `rope` turns, where nothing else reads it."""
        x = rope.src[0]
        norm = norm_of(x) if x is not None and self._passes(x) else None
        if x is None or norm is None or norm[0].op != "rms_norm" or not self._passes(norm[0]):
            return ()
        return (norm[0], x)

    # -- pairs -------------------------------------------------------------------------------------------------------

    def _pair(self, t: Tensor) -> None:
        """Two nodes, of which `t` is the second."""
        if (norm := norm_of(t)) is not None:
            self._norm(norm[0], t)
        elif (unit := gate_of(t)) is not None and unit.act is not None:
            self._join("glu", unit.act, t, unit.up)

    def _norm(self, norm: Tensor, t: Tensor) -> None:
        """A norm times its weight, and what is added to that: a row or as many."""
        x, weight = norm.src[0], t.src[1]
        nodes, out = (norm, t), self._reader(t)
        if out is not None and out.op == "add" and out not in self.taken and out.view_src is None and out.ne == t.ne:
            other = other_source(out, t)
            if other is not None and other is not t and is_f32_rows(other) and other.ne[0] == t.ne[0]:
                nodes = (norm, t, out)
        if (
            "norm" in self.enabled
            and x is not None
            and self._passes(norm)
            and self._unwritten((x, weight), norm, nodes[-1])
        ):
            self._take(nodes[-1], Step(nodes, frozenset(nodes[:-1]), "norm", (x,)))

    def _join(self, fusion: str, first: Tensor, t: Tensor, heir: Tensor | None = None) -> None:
        """Compute `first` where `t` stands, if that is its only reader."""
        if fusion in self.enabled and self._passes(first) and self._unwritten(first.src, first, t):
            self._take(t, Step((first, t), frozenset((first,)), fusion, () if heir is None else (heir,)))
