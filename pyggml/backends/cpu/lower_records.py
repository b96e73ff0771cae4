"""What computes a step: the kernel, and what it is given, by the step's fusion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...buffers.alloc import Step
from ...buffers.buffer import Buffer
from ...dtypes import DType
from ...opdef import OPS
from ...tensor import Ne, Tensor
from .fuse_patterns import (
    SCANS,
    Gate,
    attention_of,
    bias_of,
    gate_of,
    norm_of,
    other_source,
    scan_of,
    weighted_of,
    window_of,
)
from .host import HOST_KERNEL
from .isa import Kernel, find_kernel, kernel_of
from .products import choose


class Half(NamedTuple):
    """The first (0) or second (1) half of a dimension."""

    dim: int
    which: int


class Record(NamedTuple):
    """A kernel (None: the backend has none) and its operands.

    copies  sources of which the repacked copy is read
    halves  sources of which one half is read
    layout  the result's ne, laid out densely in `dst`, where it is not dst's own
    shared  between threads; None: where its cost says so
    """

    kernel: Kernel | None
    dst: Tensor
    srcs: Sequence[Tensor | None]
    params: Sequence[float] = ()
    copies: Mapping[int, Buffer] = {}
    halves: Mapping[int, Half] = {}
    layout: Ne | None = None
    shared: bool | None = None


_F32 = DType.F32.gguf_id
_ADD, _GATED = 1, {"swiglu": 2, "geglu": 3, "reglu": 4, "swiglu_oai": 5}  # r16_store
_BIAS = 8  # the first source of mul_mat_r16 that is a bias
_READ = 9  # the first source of a recurrence that is about cells (csrc/kernels/state.h)
_ROPE_EPS = 13  # the parameter of rope that is of the norm before it


def _node(step: Step, isa: str) -> Record:
    t = step.nodes[0]
    if OPS[t.op].host is not None:
        return Record(HOST_KERNEL, t, (), shared=t.op_params.get("n_tasks") != 1)
    kernel, copy = choose(isa, t) or (kernel_of(isa, t), None)
    return Record(kernel, t, t.src, tuple(t.op_params.values()), {} if copy is None else {0: copy})


def _norm(step: Step, isa: str) -> Record:
    norm, t, *added = step.nodes
    kernel = find_kernel(isa, norm.op, _F32, _F32, _F32)
    srcs = (norm.src[0], t.src[1], *(other_source(out, t) for out in added))
    return Record(kernel, step.nodes[-1], srcs, tuple(norm.op_params.values()))


def _glu(step: Step, isa: str) -> Record:
    t = step.nodes[-1]
    unit = _unit_of(t)
    return Record(find_kernel(isa, unit.unit, _F32, _F32, _F32), t, (unit.gate, unit.up), (0.0,))


def _unit_of(t: Tensor) -> Gate:
    unit = gate_of(t)
    assert unit is not None, t
    return unit


def _rope(step: Step, isa: str) -> Record:
    rope = next(t for t in step.nodes if t.op in ("rope", "rope_multi"))
    x, weight, eps = rope.src[0], None, 0.0
    norm = norm_of(x) if x is not None and x in step.inner else None
    if norm is not None:
        x, weight, eps = norm[0].src[0], norm[1], norm[0].op_params["eps"]
    params = [*map(float, rope.op_params.values())]
    params += [0.0] * (_ROPE_EPS - len(params)) + [eps]
    return Record(kernel_of(isa, rope), step.nodes[-1], (x, *rope.src[1:3], weight), params, layout=rope.ne)


def _attention(step: Step, isa: str) -> Record:
    """Attention with a transposed v, or rows of it, by csrc/attention/flash_attn.c."""
    last = step.nodes[-1]
    kqv = last if last.op == "mul_mat" else step.nodes[-3]
    found = attention_of(kqv)
    assert found is not None, kqv
    (k, q), (_, mask, sinks) = found.kq.src, found.weights.src
    assert k is not None
    kernel = find_kernel(isa, "attn_vt", _F32, k.dtype.gguf_id, _F32)
    merged = last is not kqv
    params = (*found.weights.op_params.values(), float(merged), found.cap, float(found.in_rows))
    dv, n_tokens, n_head, n_batch = kqv.ne
    layout = (dv, n_head, n_tokens, n_batch) if merged else None
    return Record(kernel, last, (k, q, found.v, mask, sinks), params, layout=layout)


def _experts(step: Step, isa: str) -> Record:
    """The sum of what experts give, by csrc/kernels/experts_sum.c."""
    rows = next(t for t in step.nodes if t.op == "view").src[0]
    assert rows is not None
    weights, last, other = None, step.nodes[-1], None
    if rows in step.inner:
        found = weighted_of(rows)
        assert found is not None, rows
        rows, weights = found
    adds = [t for t in step.nodes if t.op == "add"]
    if len(adds) == rows.ne[1]:
        other = other_source(last, adds[-2])
    return Record(find_kernel(isa, "experts_sum", _F32, _F32, _F32), last, (rows, weights, other))


def _scan(step: Step, isa: str) -> Record:
    """A recurrence with its states in cells, by csrc/kernels/ssm.c and linear_attn.c."""
    store = step.nodes[-1]
    found = scan_of(store)
    assert found is not None, store
    out = found.scan
    srcs = list(out.src)
    srcs[SCANS[out.op]] = found.cells
    srcs += [None] * (_READ - len(srcs)) + [None if out.op == "ssm_scan" else found.read, store, store.src[2]]
    return Record(kernel_of(isa, out), out, srcs, tuple(out.op_params.values()))


def _conv(step: Step, isa: str) -> Record:
    """A convolution with the end of its window in cells, by csrc/kernels/short_conv.c."""
    store, conv = (next(t for t in step.nodes if t.op == op) for op in ("set_rows", "ssm_conv"))
    found, last = window_of(store), step.nodes[-1]
    assert found is not None, store
    added = next((t for t in step.nodes if t.op == "add"), None)
    bias = None if added is None else next(s for s in added.src if s not in step.inner)
    srcs = [found.x, conv.src[1], bias, found.cells]
    srcs += [None] * (_READ - len(srcs)) + [found.read, store, store.src[2]]
    kernel = find_kernel(isa, "conv_state", _F32, _F32, _F32)
    return Record(kernel, last, srcs, (float(last.op == "silu"),))


def _products(step: Step, isa: str) -> Record:
    """Products of the same columns, by csrc/products/r16/mul_mat_r16.c."""
    last = step.nodes[-1]
    products = [t for t in step.nodes if t.op in ("mul_mat", "mul_mat_id")]
    first = products[0]
    biases: dict[Tensor, Tensor] = {}
    ends = {t: t for t in products}  # the sums with their biases, where they have one
    for t in step.nodes:
        if (found := bias_of(t)) is not None:
            ends[found[0]], biases[found[0]] = t, found[1]
    store, other, dst = 0, None, ends[first]
    numbers: Sequence[float] = ()
    unit = gate_of(last)
    if unit is not None:
        products.sort(key=lambda t: ends[t] is not unit.gate)  # the gate first
        if unit.up is None:
            products = [first, first]
        store, dst = _GATED[unit.unit], last
        numbers = [float(v) for name, v in last.op_params.items() if name in ("alpha", "limit")]
    elif last not in ends.values():
        store, other, dst = _ADD, other_source(last, dst), last
    found = choose(isa, first)
    kernel = None if found is None else found[0]
    if first.op == "mul_mat_id":
        srcs = [products[0].src[0], *first.src[1:], None if len(products) == 1 else products[1].src[0]]
        srcs += [biases.get(t) for t in products]
        halves = _halves((0, 3), (4, 5)) if products.count(first) > 1 else {}
        return Record(kernel, dst, srcs, (float(store), 0.0, *numbers), _copies_of(products, (0, 3)), halves)
    columns, weight, eps = first.src[1], None, 0.0
    norm = norm_of(columns) if columns is not None and columns in step.inner else None
    if norm is not None:
        columns, weight, eps = norm[0].src[0], norm[1], norm[0].op_params["eps"]
    srcs = [products[0].src[0], columns, weight, other]
    for t in products[1:]:
        srcs += [t.src[0], None if store else ends[t]]
    srcs += [None] * (_BIAS - len(srcs)) + [biases.get(t) for t in products]
    halves = _halves((0, 4), (_BIAS, _BIAS + 1)) if products.count(first) > 1 else {}
    return Record(kernel, dst, srcs, (float(store), eps, *numbers), _copies_of(products, (0, 4, 6)), halves)


def _halves(weights: tuple[int, int], biases: tuple[int, int]) -> dict[int, Half]:
    """Of the sources that are the same for gate and value: the rows of each."""
    return {i: Half(dim, which) for dim, pair in ((1, weights), (0, biases)) for which, i in enumerate(pair)}


def _copies_of(products: Iterable[Tensor], at: Iterable[int]) -> dict[int, Buffer]:
    """The repacked copies of their weights, which are the sources `at`."""
    weights = zip(at, (t.src[0] for t in products), strict=False)
    return {i: a.form.copy for i, a in weights if a is not None and a.form.copy is not None}


RECORDS: Mapping[str, Callable[[Step, str], Record]] = {
    "": _node,
    "norm": _norm,
    "glu": _glu,
    "rope": _rope,
    "attention": _attention,
    "products": _products,
    "experts": _experts,
    "scan": _scan,
    "conv": _conv,
}
