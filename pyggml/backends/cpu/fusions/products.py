"""products: fusions around products with weights, when the CPU has its own kernel for them
(csrc/products/r16/mul_mat_r16.c).

norm      when only products read rms_norm(x) * weight, they take x and compute that themselves
share     products of the same columns (Q, K and V) quantise or pack the columns once
glu       the kernel stores act(gate) * up, not gate and up or the two halves of one product; also for experts
residual  a product, its bias, and a tensor that is added to it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from operator import is_
from typing import NamedTuple

from pyggml.native import lib
from pyggml.native.packing import GROUP

from ....buffers.alloc import Step
from ....ops.matmul import PRODUCTS
from ....tensor import Tensor
from ..record import Half
from .glu import Gate, gate_of
from .nodes import Fusion, Nodes, fused, is_f32_rows, other_source
from .norm import norm_before

_GATED = {
    "swiglu": lib.R16_SWIGLU,
    "geglu": lib.R16_GEGLU,
    "reglu": lib.R16_REGLU,
    "swiglu_oai": lib.R16_SWIGLU_OAI,
}
_WEIGHTS = (lib.PG_MM_WEIGHTS, lib.PG_MM_WEIGHTS_1, lib.PG_MM_WEIGHTS_2)
_RESULTS = (lib.PG_MM_RESULT_1, lib.PG_MM_RESULT_2)  # the first product's result is that of the kernel


class Product(NamedTuple):
    """A product. When nothing else reads it, also its sum with a bias, which is a leaf."""

    node: Tensor
    bias: Tensor | None = None
    sum: Tensor | None = None

    @property
    def end(self) -> Tensor:
        """What is read of it."""
        return self.node if self.sum is None else self.sum

    @property
    def nodes(self) -> tuple[Tensor, ...]:
        return (self.node,) if self.sum is None else (self.node, self.sum)


class Products(NamedTuple):
    """Products of the same columns, and the nodes that compute with their results.

    nodes  all nodes, in order
    store  what the kernel does with the results (enum r16_store)
    last   the nodes after the products; the last of them is the result. Empty when the products are the results
    added  the tensor that is added to the product
    """

    products: tuple[Product, ...]
    nodes: tuple[Tensor, ...]
    store: int = lib.R16_STORE
    last: tuple[Tensor, ...] = ()
    added: Tensor | None = None

    @property
    def results(self) -> tuple[Tensor, ...]:
        """Those of the nodes that are read elsewhere."""
        return self.last[-1:] or tuple([p.end for p in self.products])


def _together(
    g: Nodes,
    products: tuple[Product, ...],
    store: int = lib.R16_STORE,
    last: tuple[Tensor, ...] = (),
    added: Tensor | None = None,
) -> Products | None:
    """The `Products` of these fields; None when something writes meanwhile to a tensor that their nodes read. (The last
    node may write where it reads.)"""
    found = Products(products, g.in_order({*last, *[t for p in products for t in p.nodes]}), store, last, added)
    nodes = found.nodes
    inner = set(nodes).difference(found.results)
    read = nodes if added is None else nodes[:-1]
    fits = g.unwritten([s for t in read for s in t.src if s not in inner], nodes[0], nodes[-1])
    return found if fits else None


def _bias_of(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """(product of matrices, leaf of one row) when `t` is their sum; of products by expert, a leaf of a row of each."""
    if t.op not in ("add", "add_id") or t.view_src is not None:
        return None
    product, bias, *ids = t.src
    if product is None or bias is None or bias.op != "none" or bias.view_src is not None or not is_f32_rows(bias):
        return None
    if ids:
        fits = product.op == "mul_mat_id" and product.src[2] is ids[0] and bias.ne[0] == t.ne[0]
    else:
        fits = product.op == "mul_mat" and bias.ne == (t.ne[0], 1, 1, 1)
    return (product, bias) if fits and product.nb == t.nb else None


def _biased(g: Nodes, t: Tensor) -> Product:
    out = g.reader(t) if "residual" in g.enabled else None
    found = None if out is None else _bias_of(out)
    return Product(t) if found is None else Product(t, found[1], out)


def _unit(g: Nodes, gate: Tensor) -> tuple[Tensor, Gate] | None:
    """The node of a gated unit that reads `gate`, itself or through an activation."""
    reader = g.reader(gate)
    for out in (reader, None if reader is None else g.reader(reader)):
        unit = None if out is None else gate_of(out)
        if out is not None and unit is not None and unit.gate is gate:
            return out, unit
    return None


def _gated(g: Nodes, same: Sequence[Tensor]) -> Products | None:
    """act(gate) * up of two of the products, or of the halves of one."""
    ends = {p.end: p for p in (_biased(g, t) for t in same)} if "glu" in g.enabled else {}
    for end, gate in ends.items():
        if (found := _unit(g, end)) is None:
            continue
        out, unit = found
        if unit.up is None:
            up = gate if out.ne[0] % GROUP == 0 else None
        else:
            up = ends.get(unit.up) if g.passes(unit.up) and unit.up.nb == out.nb else None
        last = (out,) if unit.act is None else (unit.act, out)
        if up is not None and (both := _together(g, (gate, up), _GATED[unit.unit], last)) is not None:
            return both
    return None


def _with_residual(g: Nodes, t: Tensor) -> Products | None:
    """Find a product with its bias and a tensor that is added to it."""
    product = _biased(g, t)
    out = g.reader(product.end) if "residual" in g.enabled else None
    if out is None or out.op != "add" or out.view_src is not None:
        return None
    added = other_source(out, product.end)
    if added is None or added is product.end or added.ne != t.ne or not is_f32_rows(added) or out.nb != t.nb:
        return None
    return _together(g, (product,), lib.R16_ADD, (out,), added)


def _shared(g: Nodes, same: Sequence[Tensor]) -> Products:
    """The first of these products, and others that can be computed as early; each with its bias."""
    first, *others = same
    found = _together(g, (_biased(g, first),)) or Products((Product(first),), (first,))
    for t in others:
        found = _together(g, (*found.products, _biased(g, t))) or found
    return found


def _find(g: Nodes, t: Tensor) -> Step | None:
    """`t` is the first product of its columns that is left. The step may be of others that read the same columns."""
    x, *ids = t.src[1:]
    if t not in g.kernels or x is None:
        return None
    same = [
        r
        for r in dropwhile(lambda r: r is not t, g.readers[x])
        if g.kernels.get(r) is g.kernels[t] and all(map(is_, r.src[1:], t.src[1:])) and r not in g.taken
    ]
    n = lib.PG_MM_MAX if "share" in g.enabled and not ids else 1
    found = _gated(g, same) or (None if ids else _with_residual(g, t)) or _shared(g, same[:n])
    n = len({p.node for p in found.products})
    norm = norm_before(g, x, n) if "norm" in g.enabled and not ids else None
    if norm is not None and not g.unwritten((norm.x, norm.weight), norm.nodes[0], found.nodes[-1]):
        norm = None
    nodes = found.nodes if norm is None else (*norm.nodes, *found.nodes)
    if len(nodes) == 1:
        return None

    srcs: dict[int, Tensor | None] = {lib.PG_MM_COLUMNS: x, lib.PG_MM_ADDED: found.added}
    if ids:
        srcs[lib.PG_MM_IDS] = ids[0]
    params: dict[int, float] = {lib.PG_MM_STORE: found.store}
    if norm is not None:
        srcs |= {lib.PG_MM_COLUMNS: norm.x, lib.PG_MM_NORM: norm.weight}
        params[lib.PG_MM_EPS] = norm.eps
    if found.store == lib.R16_SWIGLU_OAI:
        unit = found.last[-1].op_params
        params |= {lib.PG_MM_ALPHA: unit["alpha"], lib.PG_MM_LIMIT: unit["limit"]}
    halves: dict[int, Half] = {}  # when one weight has gate and value: which rows each is
    for i, (at, p) in enumerate(zip(_WEIGHTS, found.products, strict=False)):
        srcs |= {at: p.node.src[0], lib.PG_MM_BIAS + i: p.bias}
        if i and not found.last:
            srcs[_RESULTS[i - 1]] = p.end
        if n < len(found.products):
            halves |= {at: Half(1, i), lib.PG_MM_BIAS + i: Half(0, i)}
    packed = _WEIGHTS[: len(found.products)]
    results, heir = found.results, found.added
    return fused("products", nodes, results, g.kernels[t], srcs, params, heir=heir, packed=packed, halves=halves)


MATRICES = Fusion("products", PRODUCTS, _find, early=True)
