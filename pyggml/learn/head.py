"""The loss of a model and its gradient, computed for some tokens at a time: logits of all tokens, and their gradient,
would take more memory than all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyggml import ops
from pyggml.graph import Graph
from pyggml.opdef import OPS, record
from pyggml.tensor import Tensor

from .gradients import gradients_of

_MOST = 1 << 24  # logits that are in memory at a time
_STEP = 32  # tokens of a part are a multiple of it
_BY_ELEMENT = ("add", "sub", "mul", "div", "scale", "tanh")  # ops whose rows depend on the same rows of their sources


class Head(NamedTuple):
    """The end of a model's graph, in which each token is for itself.

    rows    what it reads, a row for each token: ne [n, n_tokens]
    nodes   what computes the logits from the rows, in order; none: the rows are the logits
    """

    rows: Tensor
    nodes: Sequence[Tensor]

    def logits(self, rows: Tensor) -> Tensor:
        """Record the logits of some tokens, ne [n_vocab, tokens], of their rows."""
        new = {self.rows: rows}
        for t in self.nodes:
            new[t] = record(OPS[t.op], tuple(None if s is None else new.get(s, s) for s in t.src), t.op_params)
            new[t].name = t.name
        return new[self.nodes[-1]] if self.nodes else rows


def head_of(graph: Graph) -> Head:
    """The head of a model's graph, which ends with the logits: from the rows that the product with the output matrix
    reads. A graph that ends in another way has a head without nodes."""
    logits = graph.nodes[-1]
    product = logits
    while product.op in _BY_ELEMENT and product.src[0] is not None:
        product = product.src[0]
    rows = product.src[1] if product.op == "mul_mat" else None
    if rows is None or rows.op == "none" or rows.ne[1:] != logits.ne[1:] or logits.ne[2:] != (1, 1):
        return Head(logits, ())
    of_rows = {rows: None}
    for t in graph.nodes:
        if any(s in of_rows for s in t.src):
            of_rows[t] = None
    del of_rows[rows]
    if logits not in of_rows or not all(_by_row(t, {rows, *of_rows}) for t in of_rows):
        return Head(logits, ())
    return Head(rows, [*of_rows])


def _by_row(t: Tensor, of_rows: set[Tensor]) -> bool:
    """Whether each row of a node follows from the same row of those of its sources that are in `of_rows`."""
    own = [s in of_rows for s in t.src]
    if t.op == "mul_mat":
        return own == [False, True]
    return t.op in _BY_ELEMENT and all(
        is_own or (s is not None and s.ne[1:] == (1, 1, 1)) for s, is_own in zip(t.src, own, strict=True)
    )


def part_size(head: Head, logits: Tensor) -> int:
    """Tokens whose loss is computed at a time; the last ones may be fewer."""
    n_vocab, n_tokens = logits.ne[:2]
    if not head.nodes:
        return n_tokens
    n_parts = -(-n_tokens // max(_MOST // n_vocab, 1))
    return min(-(-n_tokens // n_parts // _STEP) * _STEP, n_tokens)


class Loss(NamedTuple):
    """A loss that was recorded: the mean of all predictions that count, its gradient with respect to the head's rows,
    and to the parameters that the head reads (no gradients when none are wanted)."""

    loss: Tensor
    of_rows: Tensor | None
    gradients: Mapping[Tensor, Tensor]


def record_loss(
    head: Head, labels: Tensor, shares: Tensor, seeds: Tensor | None, params: Sequence[Tensor], size: int
) -> Loss:
    """Record the loss of a model, and its gradients, for `size` tokens at a time.

    labels  of each token: I32 [n_tokens]; negative: its prediction does not count
    shares  of each part, which part of the predictions that count are its own: F32 [n_parts]
    seeds   the gradient of something with respect to the loss, times these shares; None: gradients are not wanted
    params  the parameters whose gradients are wanted, where the head reads them
    """
    n, n_tokens = head.rows.ne[:2]
    total: Tensor | None = None
    of_rows: Tensor | None = None
    gradients: dict[Tensor, Tensor] = {}
    for i, first in enumerate(range(0, n_tokens, size)):
        m, row = min(size, n_tokens - first), head.rows.nb[1]
        rows = head.rows if m == n_tokens else ops.view_2d(head.rows, n, m, row, first * row)
        own = ops.cross_entropy_ids(head.logits(rows), ops.view_1d(labels, m, 4 * first)).set_name(f"loss-{i}")
        share = own * ops.view_1d(shares, 1, 4 * i)
        total = share if total is None else total + share
        if seeds is None:
            continue
        found = gradients_of(own, [rows, *params], ops.view_1d(seeds, 1, 4 * i), until=rows)
        g = found.pop(rows)
        of_rows = g if of_rows is None else ops.concat(of_rows, g, 1)
        for w, gw in found.items():
            gradients[w] = ops.add(gradients[w], gw) if w in gradients else gw
    assert total is not None
    return Loss(total.set_name("loss"), of_rows, gradients)
