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


def load_cases(steps: bool) -> list[dict[str, Any]]:
    """The cases of gradients, or those of steps of optimisers."""
    path = shared_dir() / "golden" / "grads.npz"
    if not path.exists():
        return []
    with np.load(path) as z:
        return [c for c in json.loads(str(z["cases"])) if ("steps" in c) == steps]


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
    if op == "im2col":
        args = [*args, gg.F32]
    return getattr(gg, op)(*sources, *args, **case["kw"])


@pytest.mark.parametrize("case", load_cases(False), ids=lambda c: f"{c['op']}-{c['id']}")
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


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("case", load_cases(True), ids=lambda c: c["op"])
def test_steps_equal_torchs(case: dict[str, Any], backend: str, shared: Path) -> None:
    kw = case["kw"]
    with np.load(shared / "golden" / "grads.npz") as z, gg.Context() as ctx:
        gradients, after = z[f"{case['id']}/gy"], [z[f"{case['id']}/after{t}"] for t in range(case["steps"])]
        w = ctx.from_numpy(z[f"{case['id']}/src0"])
        g, m, v = (ctx.from_numpy(np.zeros(w.shape, np.float32)) for _ in range(3))
        adamw = case["op"] == "opt_step_adamw"
        params = ctx.from_numpy(np.zeros(7 if adamw else 2, np.float32))
        step = gg.opt_step_adamw(w, g, m, v, params) if adamw else gg.opt_step_sgd(w, g, params)
        graph = gg.Graph().build_forward_expand(step)
    for t, want in enumerate(after, 1):
        numbers = [kw["lr"], kw["weight_decay"]]
        if adamw:
            b1, b2 = kw["betas"]
            numbers = [kw["lr"], b1, b2, kw["eps"], kw["weight_decay"], 1 / (1 - b1**t), 1 / (1 - b2**t)]
        gg.compute(graph, {g: gradients[t - 1], params: numbers}, backend=backend)
        np.testing.assert_allclose(w.numpy(), want, rtol=2e-6, atol=2e-7)
