"""Gradients by torch's autograd in float64 (shared/golden/grads.npz) against ours, on both backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.testing.gradients import Exact

from ..conftest import shared_dir

# Ops that get their gradients next.
TO_DO = {
    "acc", "set_2d", "pad", "roll", "interpolate", "diag_mask_zero",
    "swiglu", "swiglu_split", "geglu", "geglu_split", "reglu", "reglu_split", "geglu_erf", "geglu_erf_split",
    "geglu_quick", "geglu_quick_split", "swiglu_oai", "norm", "rms_norm", "l2_norm", "group_norm",
    "mul_mat_id", "soft_max", "soft_max_ext", "soft_max(diag_mask_inf)", "flash_attn_ext", "rope_ext",
    "conv_2d_direct", "conv_2d", "conv_2d_dw_direct", "conv_1d", "conv_transpose_1d", "conv_transpose_2d_p0",
    "pool_2d", "pool_1d", "im2col", "ssm_conv", "ssm_scan", "gated_linear_attn",
    "cross_entropy_loss", "opt_step_adamw", "opt_step_sgd",
}  # fmt: skip


def load_cases() -> list[dict[str, Any]]:
    path = shared_dir() / "golden" / "grads.npz"
    if not path.exists():
        return []
    with np.load(path) as z:
        return [c for c in json.loads(str(z["cases"])) if c["op"] not in TO_DO]


# Gradients with a parameter that F32 does not have: 1/3, 1/n.
WITH_FRACTIONS = {"hardswish", "mean"}


def rounding(case: dict[str, Any]) -> float:
    """Of a gradient in float64. Parameters of ops are rounded to F32."""
    rounded = any(isinstance(x, float) and float(np.float32(x)) != x for x in case["args"])
    return 2.0**-26 if rounded or case["op"] in WITH_FRACTIONS else 2.0**-48


def build(case: dict[str, Any], sources: list[gg.Tensor | None]) -> gg.Tensor:
    """The op of a case on its sources."""
    op, args = case["op"], case["args"]
    if op == "soft_max(diag_mask_inf)":
        return gg.soft_max(gg.diag_mask_inf(sources[0], *args))
    if op == "flash_attn_ext":
        sources[3] = gg.cast(sources[3], gg.F16)
    return getattr(gg, op)(*sources, *args, **case["kw"])


@pytest.mark.parametrize("case", load_cases(), ids=lambda c: f"{c['op']}-{c['id']}")
def test_gradient_equals_torch(case: dict[str, Any], shared: Path) -> None:
    with np.load(shared / "golden" / "grads.npz") as z, gg.Context() as ctx:
        arrays = {name: z[f"{case['id']}/{name}"] for name in ("gy", *(f"grad{j}" for j in case["wrt"]))}
        sources: list[gg.Tensor | None] = []
        for j, spec in enumerate(case["srcs"]):
            a = None if spec is None else z[f"{case['id']}/src{j}"]
            sources.append(None if a is None else ctx.from_numpy(a, gg.DType[spec[0]]))
        wrt = [sources[j] for j in case["wrt"]]
        node = build(case, list(sources))
        gy = ctx.from_numpy(np.zeros(node.shape, np.float32))
        grads = gg.grad(node, wrt, gy)
        gy.set(arrays["gy"].reshape(gy.shape))
    assert [g.shape for g in grads] == [t.shape for t in wrt]
    g = gg.Graph()
    for t in grads:
        g.build_forward_expand(t.set_output())
    exact = Exact()  # float64 throughout, from sources in float32
    exact.compute(g.nodes)
    for backend, u in (("exact", rounding(case)), ("ref", 2.0**-24), ("cpu", 2.0**-24)):
        if backend != "exact":
            gg.compute(g, backend=backend)
        for j, t in zip(case["wrt"], grads, strict=True):
            want = arrays[f"grad{j}"].astype(np.float64)
            got = (exact[t] if backend == "exact" else t.numpy().astype(np.float64)).reshape(want.shape)
            error, size = np.linalg.norm(got - want), np.linalg.norm(want)
            assert error <= 16 * u * size + 64 * u, f"{backend}: {error} of {size}"
