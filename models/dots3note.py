"""dots3note (llama.cpp's `dots3note`, https://github.com/ggml-org/llama.cpp): DeepSeek-V3.2 with a window, and latent
rows and heads of other sizes, in some layers. The roped elements of K are normed, and heads of attention gated by a
sigmoid. Layers without the window attend to what an indexer chooses, see `indexer.py`; its heads
are roped as transformers' are, neighbours together (llama.cpp's are roped by halves)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import MLA, Build, build_attn_gate, build_mla
from .deepseek2 import DeepSeek2, read_deepseek2
from .hparams import Router
from .indexer import INDEX_EPS, build_chosen_mask, read_indexer
from .metadata import Reader, read_router, read_window
from .sparse import DSAHParams

_RANK, _HEAD_K, _HEAD_V = (
    f"{{arch}}.attention.{key}_swa" for key in ("kv_lora_rank", "key_length_mla", "value_length_mla")
)


@dataclass(frozen=True, kw_only=True)
class Dots3NoteHParams(DSAHParams):
    """The sizes of latent rows and heads in layers with the window."""

    n_lora_kv_swa: int
    n_embd_head_k_mla_swa: int
    n_embd_head_v_mla_swa: int

    @property
    def mla_swa(self) -> MLA:
        """The sizes of latent attention in layers with the window."""
        sizes = self.n_embd_head_k_mla_swa, self.n_embd_head_v_mla_swa
        return MLA(self.n_lora_q, self.n_lora_kv_swa, *sizes, self.n_rot)


class Dots3Note(DeepSeek2[Dots3NoteHParams]):
    """Layers with the window have sizes of their own."""

    def latent(self, b: Build[Dots3NoteHParams], cur: Tensor, pos: Tensor, il: int) -> Tensor:
        hp = b.hparams
        m = hp.mla_swa if hp.is_swa(il) else hp.mla
        scale = 1.0 / math.sqrt(m.n_embd_head_k)
        choose = partial(build_chosen_mask, b, hp, cur, pos=pos, il=il)
        attn = build_mla(b, cur, pos, None, il, m, k_norm=True, scale=scale, choose=choose)
        return build_attn_gate(b, attn, cur, il, gg.sigmoid)


def _read(r: Reader) -> Dots3NoteHParams:
    n_rot, n_lora_kv = r.integer(Keys.Rope.DIMENSION_COUNT), r.integer(_RANK)
    window: dict[str, Any] = read_window(r, 0)
    n_head_k, n_head_v = r.integer(_HEAD_K), r.integer(_HEAD_V)
    for key, n in ((_HEAD_K, n_head_k), (_HEAD_V, n_head_v)):
        if not n:
            r.fail(key, "must be positive")
    return read_deepseek2(
        Dots3NoteHParams,
        r,
        router=read_router(r, Router(gating="sigmoid", norm=False)),
        **read_indexer(r),
        f_index_norm_eps=INDEX_EPS,
        **window,
        n_lora_kv_swa=n_lora_kv,
        n_embd_head_k_swa=n_lora_kv + n_rot,
        n_embd_head_v_swa=n_lora_kv,
        rope_first_swa=n_lora_kv,
        n_embd_head_k_mla_swa=n_head_k,
        n_embd_head_v_mla_swa=n_head_v,
    )


ARCHITECTURES = (Architecture(("dots3note",), Dots3Note(rope_factors=False).build, _read),)
