"""Every move that a family declares has its inverse."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from pyggml.hf.families import PAGES
from pyggml.hf.family import Family
from pyggml.hf.moves import ROW, Merged, Move, Sizes, Value

SIZES = Sizes(n_head=4, n_head_kv=2, head_k=6, head_v=6, n_rot=6, ints=lambda key, default=0: 4)
FAMILIES: list[Family] = [f for page in PAGES for f in import_module(f"pyggml.hf.families.{page}").FAMILIES]
SHAPES = [(48, 6), (24, 10), (40, 6), (3, 24, 8), (24, 1, 4), (1, 24), (24,), (1, 1, 4, 1)]
# Dims of tensors that these are for.
DIMS = {"ssm_conv1d.weight": 3, "shortconv.conv.weight": 3, "ssm_norm": 1, "ssm_a": 1, "ssm_d": 1}
DIMS |= {
    "token_types": 2,
    "a.conv1d.1.bias": 1,
    "a.conv1d.2.bias": 1,
    "self_attn.kv_b_proj.weight": 2,
    "linear_attn.in_proj_qkvz.weight": 2,
    "kimi-linear.ssm_a": 4,
}
Any = Move | Value | Merged
MOVES: dict[int, tuple[str, Any]] = {}
for _f in FAMILIES:
    for _role, _steps in [*_f.moves.items(), *_f.merged.items()]:
        _own = f"{_f.arch}.{_role}"
        MOVES |= {
            id(m): (_own if _own in DIMS else _role, m) for m in (_steps if isinstance(_steps, tuple) else (_steps,))
        }


del MOVES[id(next(f for f in FAMILIES if "xlm-roberta" in f.types).moves["position_embd"])]  # takes rows off


@pytest.mark.parametrize(("role", "move"), MOVES.values(), ids=[role for role, _ in MOVES.values()])
def test_there_and_back(role: str, move: Any) -> None:
    rng = np.random.default_rng(0)
    worked = 0
    for shape in SHAPES:
        a = -rng.integers(1, 50, shape).astype(np.float32) / 8
        if len(shape) != DIMS.get(role, min(len(shape), 3)) or (move is ROW and shape[0] != 1):
            continue
        if isinstance(move, Value):
            assert np.allclose(move.there(move.back(a)), a, rtol=1e-6)
            worked += 1
            continue
        try:
            if isinstance(move, Merged):
                parts = move.there(a, SIZES)
                assert [p.shape for p in parts] == move.shapes(shape, SIZES)
                back = move.back(parts, SIZES)
            else:
                there = move.there(a, SIZES)
                assert there.shape == move.shape(shape, SIZES)
                back = move.back(there, SIZES)
        except (ValueError, IndexError):
            continue  # it is for tensors of another shape
        assert np.array_equal(back, a)
        worked += 1
    assert worked
