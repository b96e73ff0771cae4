"""GLM 5 Next (llama.cpp's `glm5-next`, https://github.com/ggml-org/llama.cpp): Kimi's delta nets, and layers with
latent attention without positions, which attend to what an indexer chooses (see `sparse.py`), in pools of consecutive
tokens; hyper-connections (see `hyper.py`), and mixtures of limited experts."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.constants import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_ffn, build_inp_pos, build_moe_ffn, build_shared_expert, limited
from .hparams import HParams, Router
from .hyper import BY_MEAN, HyperHParams, build_hyper, read_hyper
from .kimi_k3 import BoundedKimi
from .kimi_linear import GATE_LOWER_BOUND, KimiHParams, read_kimi
from .metadata import Reader, read_clamps, read_router
from .sparse import Indexer, ask_indexer, read_indexer

_POOL, _TAIL = (f"{{arch}}.attention.indexer.{key}" for key in ("kpool", "kpool_select_tail"))
_L2_EPS = 1e-6  # which is not in files


@dataclass(frozen=True, kw_only=True)
class GLM5NextHParams(KimiHParams, HyperHParams, Indexer):
    """n_pool: tokens of a pool, of which the indexer chooses all or none."""

    n_pool: int


@dataclass(frozen=True, kw_only=True)
class GLM5Next(BoundedKimi):
    """Streams of residuals, and limited experts."""

    def build(self, b: Build) -> Graph:
        hp = b.hparams
        assert isinstance(hp, GLM5NextHParams), hp
        head = hp.n_indexer_embd
        ask_indexer(b, hp, hp.mla.n_lora_q)
        for il in filter(hp.has_kv, range(hp.n_layer)):
            b.optional("indexer_compressor_gate", (hp.n_embd, head), il)
            b.optional("indexer_compressor_ape", (head, hp.n_pool), il)
        with b.ctx:
            pos = build_inp_pos(b)
            return build_hyper(
                b,
                BY_MEAN,
                lambda cur, il: self.attention(b, cur, pos, None, il),
                lambda cur, il: self.ffn(b, cur, il),
            )

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        hp = b.hparams
        assert isinstance(hp, GLM5NextHParams), hp
        shared = limited(hp.swiglu_clamp_shexp[il])
        if not hp.is_moe(il):
            return build_ffn(b, cur, il, shared)
        out = build_moe_ffn(b, cur, il, limited(hp.swiglu_clamp_exp[il]))
        return b.cb(gg.add(out, build_shared_expert(b, cur, il, shared)), "ffn_out", il)


def _read(r: Reader) -> HParams:
    for key, good in ((Keys.Rope.DIMENSION_COUNT, 0), (_TAIL, True)):
        if r.get(key, good) != good:
            r.fail(key, f"is {r.get(key)!r}; supported is {good!r}")
    clamps = Keys.LLM.SWIGLU_CLAMP_SHEXP
    return read_kimi(
        r,
        cls=GLM5NextHParams,
        n_lora_q=r.integer(Keys.Attention.Q_LORA_RANK),
        n_rot=0,
        gate_lower_bound=r.number(GATE_LOWER_BOUND, 0.0),
        f_l2_eps=_L2_EPS,
        router=read_router(r, Router(gating="sigmoid", norm=False)),
        swiglu_clamp_exp=read_clamps(r, Keys.LLM.SWIGLU_CLAMP_EXP),
        swiglu_clamp_shexp=read_clamps(r, clamps if r.get(clamps, None) is not None else Keys.LLM.SWIGLU_CLAMP_EXP),
        n_pool=r.integer(_POOL),
        **read_indexer(r),
        **read_hyper(r),
    )


ARCHITECTURES = (Architecture(("glm5-next",), GLM5Next(rope_factors=False).build, _read, "hybrid"),)
