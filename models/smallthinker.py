"""SmallThinker (arXiv 2507.20984): llama with a window in three of four layers; only layers with the window are roped.
The mixture of experts has relu. Its router reads the input of the layer, so that the experts can be fetched while
attention is computed."""

from __future__ import annotations

from typing import Any

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_experts, build_norm, build_out_rows, build_router
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams, read_window

_WINDOW = 4096


class SmallThinker(PlainDecoder):
    """The router reads what attention does."""

    def layer(self, b: Build, inpL: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        logits = b.linear("ffn_gate_inp", inpL, hp.n_expert, "ffn_moe_logits", il)
        cur = self.attention(b, build_norm(b, inpL, "attn_norm", "attn_norm", il), pos, factors, il)
        cur, inpL, logits = build_out_rows(b, il, cur, inpL, logits)
        ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)
        cur = build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il)
        selected, weights = build_router(b, cur, il, logits=logits)
        cur = build_experts(b, cur, selected, weights, hp.layer(il).n_ff_exp, il, "relu")
        return b.cb(gg.add(cur, ffn_inp), "l_out", il)


def _read(r: Reader) -> HParams:
    if not r.integer(Keys.Attention.SLIDING_WINDOW, 0):
        return read_hparams(HParams, r, rope_type="neox")
    roped = tuple(int(il % 4 != 0) for il in range(r.integer(Keys.LLM.BLOCK_COUNT)))
    window: dict[str, Any] = {**read_window(r, 4, dense_first=True), "n_swa": _WINDOW}
    return read_hparams(HParams, r, rope_type="neox", rope_layers=roped, **window)


ARCHITECTURES = (Architecture(("smallthinker",), SmallThinker(rope_factors=False).build, _read),)
