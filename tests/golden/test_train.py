"""All golden training curves, but for those that no arithmetic in F32 can follow."""

from __future__ import annotations

import pytest

from .train_score import GOLDEN, LIMIT, curves, difference

# What keeps a curve from its limit. A float64 run of the same graph is off by as much, or the first losses agree to
# 1e-7 and their difference grows tenfold in each step.
OFF = {
    "smollm3/sgd": "the losses of the golden run follow from tables rounded to F32",
    **dict.fromkeys(
        ("mamba/sgd", "falcon-mamba/sgd", "jamba/sgd", "qwen3-next/sgd", "qwen3-5/sgd", "qwen3-5-moe/sgd"),
        "the golden run computes parts in F32, whose rounding grows",
    ),
    "ernie4-5/sgd": "F32 activations: 1.9e-4; in float64 4e-6",
    "ernie4-5-moe/adamw": "the gradient of a router row is rounding, which AdamW makes a step of; off or not by level",
    "qwen3-5-moe/adamw": "a learning rate that is off by 1e-5 changes the last loss by 5e-3; off or not by level",
    "dots1/lora": "two experts are almost equal in step 5",
    "minimax/sgd": "the checkpoint's fading of heads is rounded to bfloat16, part by part",
    **dict.fromkeys(("deepseek-v32/sgd", "deepseek-v32/adamw"), "equal scores: which tokens are chosen is left open"),
}


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden data in {GOLDEN}")
@pytest.mark.parametrize("curve", [c for c in curves() if c not in OFF] if GOLDEN.is_dir() else [])
def test_curve(curve: str) -> None:
    assert difference(curve) <= LIMIT[curve.rsplit("/", 1)[1]]
