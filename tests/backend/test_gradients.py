"""Every op's gradient against central differences of its float64 reference, and the CPU's against float64."""

from __future__ import annotations

import pytest

from pyggml.opdef import OPS
from pyggml.testing import STRATEGIES, check_gradient
from pyggml.testing.strategies import attention, recurrence

SMALL = {**attention.SMALL, **recurrence.SMALL}

# Ops that have no derivative: their results are integers, masks, new weights, or do not depend on a tensor.
WITHOUT = {
    "arange", "argmax", "argsort", "count_equal", "equal", "greater", "greater_equal", "less", "less_equal",
    "map_custom", "not_equal", "opt_step_adamw", "opt_step_adamw8", "opt_step_sgd",
    "top_k",
}  # fmt: skip
# The gradients of recurrences and of attention have none themselves, nor has that of a loss by class numbers.
ONCE = {
    "cross_entropy_ids_back", "flash_attn_ext_back", "gated_delta_net_back", "gated_linear_attn_back", "rwkv_wkv6_back",
    "rwkv_wkv7_back", "ssm_scan_back",
}  # fmt: skip


def test_every_op_has_a_gradient_or_no_derivative() -> None:
    ours = {
        name: op for name, op in OPS.items() if op.shape.__module__.startswith("pyggml.")
    }  # others' tests define ops
    assert {name for name, op in ours.items() if op.grad is None} == WITHOUT | ONCE


@pytest.mark.parametrize("op", sorted(name for name in STRATEGIES if OPS[name].grad is not None))
def test_gradient_is_the_slope(op: str) -> None:
    check_gradient(OPS[op], SMALL.get(op), max_examples=15)
