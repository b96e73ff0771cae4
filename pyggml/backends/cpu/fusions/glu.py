"""glu: act(gate) * up in one pass. Products that give gate and up store the result themselves (products.py)."""

from __future__ import annotations

from typing import NamedTuple

from pyggml.native import lib

from ....buffers.alloc import Step
from ....tensor import Tensor
from .nodes import Fusion, Nodes, fused, is_f32_rows

_UNITS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}  # activation -> the gated unit that has it


class Gate(NamedTuple):
    """A gated unit: `unit` (the op of that name) of `gate` and `up`, or of the halves of each row of `gate`, when `up`
    is None. `act`: the node of the activation, where that is not in the unit's own."""

    unit: str
    gate: Tensor
    up: Tensor | None
    act: Tensor | None = None


def gate_of(t: Tensor) -> Gate | None:
    """The unit that `t` is the result of: a node of that op, or the product of an activation and a value."""
    if t.view_src is not None or not is_f32_rows(t):
        return None
    if t.op in (*_UNITS.values(), "swiglu_oai"):
        gate, up = t.src
        if gate is None or not is_f32_rows(gate) or gate is up or t.op_params["swapped"]:
            return None
        return Gate(t.op, gate, up) if up is None or is_f32_rows(up) else None
    for act, up in (t.src, t.src[::-1]) if t.op == "mul" else ():
        if act is not None and up is not None and act.op in _UNITS and act.ne == up.ne and act is not up:
            gate = act.src[0]
            whole = gate is not None and all(map(is_f32_rows, (gate, act, up)))
            return Gate(_UNITS[act.op], gate, up, act) if gate is not None and whole else None
    return None


def _find(g: Nodes, t: Tensor) -> Step | None:
    found = gate_of(t)
    if found is None or (act := found.act) is None or (up := found.up) is None:
        return None
    if not g.passes(act) or not g.unwritten(act.src, act, t):
        return None
    srcs = {lib.PG_GLU_GATE: found.gate, lib.PG_GLU_UP: up}
    return fused("glu", (act, t), (t,), g.kernel(found.unit), srcs, {}, heir=up)


GLU = Fusion("glu", ("mul",), _find)
