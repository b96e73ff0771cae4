"""Attention of a token has the same bits whatever is computed beside it: other tokens, keys of other sequences between
its own and after them, any number of threads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.isa import table_of
from pyggml.tensor import Tensor
from pyggml.testing.harness import place
from pyggml.testing.strategies.attention import BLOCK_TYPES, ROW_TYPES

KEYS = st.one_of(st.integers(1, 70), st.integers(120, 135), st.sampled_from([257, 300, 700]))


@dataclass(frozen=True)
class Company:
    """Attention of `n_tokens` tokens, each of which sees some of `n_kv` keys."""

    transposed: bool
    type_k: gg.DType
    type_v: gg.DType
    d: int
    dv: int
    n_kv: int
    n_tokens: int
    n_head_kv: int
    group: int
    visible: str
    max_bias: float
    cap: float
    sinks: bool
    bad: bool  # a key that only the last token sees holds NaN
    n_threads: int
    seed: int

    def mask(self, rng: np.random.Generator) -> np.ndarray:
        """float32 [n_tokens, n_kv]."""
        n, keys = self.n_tokens, np.arange(self.n_kv)
        seq = rng.integers(0, 3, self.n_kv)  # of each cell
        if self.visible == "blocks":
            seq = keys // 50 % 3
        own = rng.integers(0, 3, n)  # of each token
        last = np.sort(rng.integers(0, self.n_kv, n)) if self.visible != "decode" else np.full(n, self.n_kv)
        see = (keys <= last[:, None]) & ((seq == own[:, None]) | (self.visible in ("causal", "window")))
        if self.visible == "window":
            see &= keys > last[:, None] - 75
        bias = rng.standard_normal((n, self.n_kv)) if self.max_bias else np.zeros((n, self.n_kv))
        return np.where(see, bias, -np.inf).astype(np.float32)


@st.composite
def companies(draw: st.DrawFn) -> Company:
    transposed = draw(st.booleans())
    type_k = draw(st.sampled_from(ROW_TYPES + BLOCK_TYPES[:2]))
    type_v = draw(st.sampled_from([gg.F16, gg.F32, gg.BF16] if transposed else ROW_TYPES + BLOCK_TYPES[:2]))
    return Company(
        transposed=transposed,
        type_k=type_k,
        type_v=type_v,
        d=draw(st.sampled_from([32, 64] if type_k.is_quantized else [20, 32, 64, 72, 128])),
        dv=draw(st.sampled_from([32, 64] if type_v.is_quantized else [20, 32, 64, 72, 128])),
        n_kv=draw(KEYS),
        n_tokens=draw(st.sampled_from([1, 2, 3, 5, 20, 40])),
        n_head_kv=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 1, 2, 4, 7])),
        visible=draw(st.sampled_from(["causal", "window", "decode", "scattered", "blocks"])),
        max_bias=draw(st.sampled_from([0.0, 0.0, 8.0])),
        cap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        sinks=draw(st.booleans()),
        bad=draw(st.sampled_from([False, False, True])),
        n_threads=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
    )


def computed(
    x: Company, isa: str, n_threads: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, s: np.ndarray
) -> np.ndarray:
    """float32 [n_tokens, n_head, dv]. q is [n_tokens, n_head, d], k [n_kv, n_head_kv, d], v [n_kv, n_head_kv, dv]."""
    scale = x.d**-0.5
    with gg.Context() as ctx:

        def stored(a: np.ndarray, dtype: gg.DType) -> Tensor:
            t = ctx.new_tensor(dtype, a.shape[::-1])
            place(t)
            t.store(a)
            return t

        tq, tk = stored(q.swapaxes(0, 1), gg.F32), stored(k.swapaxes(0, 1), x.type_k)
        tv = stored(v.transpose(1, 2, 0) if x.transposed else v.swapaxes(0, 1), x.type_v)
        tm = stored(mask, gg.F32)
        ts = stored(s, gg.F32) if x.sinks else None
        if x.transposed:
            kq = gg.mul_mat(tk, tq)
            if x.cap:
                weights = gg.soft_max_ext(gg.tanh(gg.scale(kq, scale / x.cap)), tm, x.cap, x.max_bias, ts)
            else:
                weights = gg.soft_max_ext(kq, tm, scale, x.max_bias, ts)
            y = gg.mul_mat(tv, weights)
        else:
            y = gg.flash_attn_ext(tq, tk, tv, tm, scale, x.max_bias, x.cap, ts)
    g = gg.Graph().build_forward_expand(y)
    backend = CpuBackend(n_threads, isa, ("attention",))
    steps = backend.fuse(g.nodes, Counter(t for node in g.nodes for t in node.src if t is not None))
    assert len([step for step in steps if step.nodes[-1].view_src is None]) == 1
    place(y)
    backend.compile(steps, lambda step: step).run()
    got = np.array(y.elements())[0]
    return got.swapaxes(0, 1) if x.transposed else got


def check(x: Company, isa: str) -> None:
    rng = np.random.default_rng(x.seed)
    q = rng.standard_normal((x.n_tokens, x.n_head_kv * x.group, x.d)).astype(np.float32)
    k = rng.standard_normal((x.n_kv, x.n_head_kv, x.d)).astype(np.float32) * 2
    v = rng.standard_normal((x.n_kv, x.n_head_kv, x.dv)).astype(np.float32)
    mask, sinks = x.mask(rng), rng.standard_normal(x.n_head_kv * x.group).astype(np.float32)
    alone = np.flatnonzero((mask > -np.inf)[-1] & ~(mask > -np.inf)[:-1].any(axis=0))
    if x.bad and len(alone) and not x.type_v.is_quantized:
        v[alone[0], 0, 0] = np.nan
    got = computed(x, isa, x.n_threads, q, k, v, mask, sinks)
    for i in range(x.n_tokens):
        see = mask[i] > -np.inf
        if not see.any():
            continue
        own = mask[i : i + 1, see]
        want = computed(x, isa, 1, q[i : i + 1], k[see], v[see], own, sinks)[0]
        assert got[i].tobytes() == want.tobytes(), (i, int(see.sum()))


@pytest.mark.parametrize("isa", [isa for isa in isa_levels() if "attn_vt" in table_of(isa)])
def test_attention_of_a_token_does_not_depend_on_its_company(isa: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(companies())
    def of_any_shape(x: Company) -> None:
        check(x, isa)

    of_any_shape()
