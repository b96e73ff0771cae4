"""Plan-time fusion: the nodes of a graph -> the steps in which they are computed (fusions/ has what is looked for)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from ...buffers.alloc import Step
from ...errors import BackendError
from ...ops.matmul import WITH_WEIGHTS
from ...tensor import Tensor
from ...var import Varies
from ..repeats import stretches_of
from .fusions import ORDER, Fusion, Nodes
from .products import fusible

# The fusions that can be switched on and off. Products that the CPU computes in a way of its own are always found;
# `norm`, `share`, `glu` and `residual` also say what may be fused to them.
FUSIONS = ("norm", "share", "glu", "residual", "rope", "attention", "experts", "scan", "conv")


def enabled_fusions(wanted: Collection[str] | None = None) -> frozenset[str]:
    """The fusions to use: `wanted` when it is given, otherwise those that PYGGML_FUSE names (comma-separated; `none`),
    otherwise all.

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
    kernels = {t: found for t in nodes if t.op in WITH_WEIGHTS and (found := fusible(isa, t)) is not None}
    made: dict[int, list[Step]] = {}
    for stretch in stretches_of(nodes, uses, kernels):
        part = nodes[stretch.begin : stretch.end]
        if stretch.like is None:
            made[stretch.begin] = _steps(Nodes(part, uses, kernels, isa, enabled))
        else:
            to = dict(zip(nodes[stretch.like : stretch.like + len(part)], part, strict=True))
            made[stretch.begin] = [s.of(tuple([to[t] for t in s.nodes]), s) for s in made[stretch.like]]
    return [s for steps in made.values() for s in steps]


def _found(fusion: Fusion, g: Nodes, t: Tensor) -> Step | None:
    """The step that `t` is part of, if it is one for all values of Vars."""
    try:
        return fusion.find(g, t)
    except Varies:
        return None


def _steps(g: Nodes) -> list[Step]:
    present = {t.op for t in g.nodes}
    for fusion in ORDER:
        if present.isdisjoint(fusion.ops) or (fusion.name in FUSIONS and fusion.name not in g.enabled):
            continue
        for t in g.nodes:
            while t.op in fusion.ops and t not in g.taken and (step := _found(fusion, g, t)) is not None:
                g.taken.update(dict.fromkeys(step.nodes))
                results = (n for n in step.nodes if n not in step.inner)
                g.taken[next(results) if fusion.early else step.nodes[-1]] = step
    steps = (g.taken[t] if t in g.taken else Step((t,)) for t in g.nodes)
    return [s for s in steps if s is not None]
