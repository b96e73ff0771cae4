"""Checks gradients: those that an op records, computed in float64, against central differences of its reference, and
what the CPU computes of them against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from ..backends.ref import source_array
from ..codec import Array
from ..dtypes import DType
from ..errors import BackendError
from ..graph import Graph
from ..learn.gradients import NoGradient, Overwritten, grad
from ..opdef import OPS, OpDef
from ..sched import Scheduler
from ..tensor import Tensor
from .harness import Case, Mismatch, explained, record_case, tolerance
from .search import Cases, cases_for, search

_STEP = 1e-5  # of central differences, in float64: errors of some 1e-10
_LARGEST = 50.0  # numbers beyond are replaced, so that no element is all of a sum
_DIRECTIONS = 2
_MOVES = 8  # of which the mean counts: by chance, a single move may hardly change a gradient of one number
_RELATIVE = 1e-6  # of the sum of absolute terms: one term of a million would show
_POSITIVE = ("log", "sqrt")  # ops whose sources are


class Exact:
    """Computes nodes by their references in float64 throughout: nothing is rounded to the types of tensors. `given`
    holds elements of leafs; other leafs have the values of their memory. `moved` changes the floats that a
    node gives, before others read them."""

    def __init__(
        self, given: Mapping[Tensor, Array] | None = None, moved: Callable[[Array], Array] | None = None
    ) -> None:
        self._moved = moved
        self._memory: dict[Tensor, Array] = {t: np.array(a).reshape(-1) for t, a in (given or {}).items()}

    def compute(self, nodes: Sequence[Tensor]) -> None:
        """Compute nodes in their order."""
        for t in nodes:
            op = OPS[t.op]
            if op.kernel is not None:
                with np.errstate(all="ignore"):
                    values = op.ref(*[None if s is None else self[s] for s in t.src], **t.op_params)
                into = (t, *[t.src[i] for i in op.changes])
                for s, a in zip(into, values if op.changes else (values,), strict=True):
                    assert s is not None
                    a = np.reshape(a, s.ne[::-1])
                    self[s][...] = a if self._moved is None or not s.dtype.is_float else self._moved(a)

    def __getitem__(self, t: Tensor) -> Array:
        """The elements of a tensor, [ne3, ne2, ne1, ne0]: a view of its memory."""
        root = t.root
        if root not in self._memory:
            self._memory[root] = self._first(root)
        memory, size, block = self._memory[root], t.dtype.type_size, t.dtype.block_size
        steps = [n // size * block * memory.itemsize for n in t.nb]
        steps[0] = steps[0] // block
        start = t.view_offs // size * block
        return np.lib.stride_tricks.as_strided(memory[start:], t.ne[::-1], steps[::-1])

    @staticmethod
    def _first(root: Tensor) -> Array:
        if root.op == "none" and root.buffer is not None:
            return source_array(root).reshape(-1)
        np_dtype = root.dtype.np_dtype
        return np.zeros(root.n_elements, np_dtype if np_dtype is not None and np_dtype.kind == "i" else np.float64)


def check_gradient(op: OpDef, cases: Cases | None = None, *, max_examples: int | None = None) -> None:
    """Look for a case in which the gradient that `op` records (`OpDef.grad`) is not that of its reference, or in which
    the CPU does not compute it as float64 does.

    Each source of a float type gets a gradient, with a random cotangent of the result, and its slope along random
    directions is compared with central differences of the reference, all in float64. `cases` and `max_examples` as to
    `check_op`. Raises Mismatch for the smallest case that was found, BackendError when no case had a gradient.
    """
    if not has_gradients(op, cases_for(op, cases), max_examples):
        raise BackendError(f"no case of {op.name} had a gradient: give cases=cases_of(op, types=..., values=...)")


def has_gradients(op: OpDef, cases: Cases, max_examples: int | None) -> bool:
    """Check gradients as `check_gradient`. False when no case had one."""
    said: list[bool] = []

    def check(case: Case) -> None:
        said.append(check_case(case))

    search(check, op.name, max_examples, cases)
    return any(said)


def check_case(case: Case) -> bool:
    """Check the gradients of a case with respect to all leafs of float types. False when the case says nothing: its
    result is of integers or has NaN, or no gradient can be taken (of masks, and in place of what the gradient needs).

    Numbers that are large or not finite are replaced where a gradient is taken. Elements of the result at a kink do not
    count. Raises Mismatch.
    """
    node = record_case(case)
    if not node.dtype.is_float:
        return False
    rng = np.random.default_rng(case.seed)
    forward = Graph().build_forward_expand(node)
    gy = node.ctx.new_tensor(DType.F32, node.ne, "gy")
    gradients: dict[Tensor, Tensor] = {}
    for leaf in forward.leafs:
        if leaf.dtype.is_float:
            with suppress(NoGradient, Overwritten):
                (gradients[leaf],) = grad(node, [leaf], gy)
    for leaf in gradients:
        _tame(node, leaf, rng)
    exact = Exact()
    exact.compute(forward.nodes)
    if np.isnan(exact[node]).any():
        return False
    for leaf, g in gradients.items():
        g.set_output()
        nodes = Graph().build_forward_expand(node).build_forward_expand(g)
        with explained(node, f"the gradient of {leaf.describe()}"):
            for _ in range(_DIRECTIONS):
                _check_direction(node, forward, nodes, leaf, g, gy, rng)
            _check_cpu(nodes, g, gy, rng)
    return bool(gradients)


def _tame(node: Tensor, leaf: Tensor, rng: np.random.Generator) -> None:
    """Replace numbers that are large or not finite, but for -inf in masks, and move the others away from kinks."""
    x = np.asarray(source_array(leaf), np.float64)
    with np.errstate(invalid="ignore"):
        odd = ~(np.abs(x) < _LARGEST) & ~((x == -np.inf) & (leaf in _masks(node)))
    x = np.where(odd, rng.standard_normal(x.shape), x) + 0.01 * rng.standard_normal(x.shape)
    leaf.store(np.abs(x) + 0.05 if node.op in _POSITIVE else x)


def _masks(node: Tensor) -> set[Tensor]:
    return {s.root for i, s in enumerate(node.src) if s is not None and OPS[node.op].role(i) == "mask"}


def _check_direction(
    node: Tensor, forward: Graph, nodes: Graph, leaf: Tensor, g: Tensor, gy: Tensor, rng: np.random.Generator
) -> None:
    """Compare the slope along a random direction with the central difference."""
    x = np.asarray(source_array(leaf), np.float64)
    v = np.where(np.isfinite(x), rng.standard_normal(x.shape), 0.0)

    def result(step: float) -> Array:
        exact = Exact({leaf: np.where(v != 0, x + step * v, x)})
        exact.compute(forward.nodes)
        return np.array(exact[node])

    down, here, up = result(-_STEP), result(0.0), result(_STEP)
    with np.errstate(invalid="ignore"):
        after, before = (up - here) / _STEP, (here - down) / _STEP
        slope = np.where(np.isfinite(here), (after + before) / 2, 0.0)
        bend = np.abs(after - before)
    smooth = bend < 0.02 * np.abs(slope) + 1e-4 * np.abs(slope).max() + 1e-9
    weight = np.where(smooth, rng.standard_normal(slope.shape), 0.0)
    exact = Exact({gy: weight})
    exact.compute(nodes.nodes)
    got, want = exact[g] * v, weight * slope
    if got.shape != v.shape or not np.isfinite(got).all():
        raise Mismatch(f"it is not finite: {exact[g]}")
    scale = float(np.abs(got).sum() + np.abs(want).sum())
    kinks = float(np.abs(weight * bend).sum())  # what is not quite smooth: the central difference is off by half of it
    if abs(float(got.sum() - want.sum())) > _RELATIVE * scale + kinks + 1e-9:
        raise Mismatch(f"along a direction it is {got.sum()}, the central difference {want.sum()}")


def _check_cpu(nodes: Graph, g: Tensor, gy: Tensor, rng: np.random.Generator) -> None:
    """Compare what the CPU computes with float64. The squared error may be 100 times that of the reference backend,
    which rounds every node. Where it is larger, the gradient is computed again with every leaf and every result of a
    node moved by a rounding, and 100 times the square of what that changes is allowed, too: terms that cancel exactly
    show their size so."""
    gy.set(rng.standard_normal(gy.shape))
    exact = Exact()
    exact.compute(nodes.nodes)
    want = exact[g]
    u = 2.0**-24
    before = {t: np.array(t.raw()) for t in nodes.leafs}
    errors: list[float] = []
    for backends in (["ref"], ["cpu", "ref"]):
        Scheduler(backends).compute(nodes)
        errors.append(float(np.sum((g.elements() - want) ** 2)))
        for t, memory in before.items():  # what ops in place have changed
            t.raw()[...] = memory
    of_ref, of_cpu = errors
    limit = 100 * of_ref + tolerance(DType.F32, 16) * float(np.sum(want**2)) + u * u * want.size
    if not of_cpu > limit:
        return

    def moved(a: Array) -> Array:
        return a * (1 + u * rng.standard_normal(np.shape(a)))

    leafs = {t: source_array(t) for t in nodes.leafs if t.dtype.is_float or t.dtype.is_quantized}
    for _ in range(_MOVES):
        near = Exact({t: moved(a) for t, a in leafs.items()}, moved)
        near.compute(nodes.nodes)
        limit += 100 * float(np.sum((near[g] - want) ** 2)) / _MOVES
    if of_cpu > limit:
        raise Mismatch(f"squared error {of_cpu:.3g} on the CPU, {of_ref:.3g} on ref; limit {limit:.3g}")
