"""Muse Glimmer (llama.cpp's `muse-glimmer`, https://github.com/ggml-org/llama.cpp).

It is llama with normed embeddings and with attention that is gated by a sigmoid. There are norms before and after
attention and network; the norms after them have another epsilon. Q and K are normed. Three of four layers have a
window, and only these are roped. The logits are scaled, then softcapped."""

from __future__ import annotations

from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_norm
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams, read_swa_pattern, read_window

_POST_NORM_EPS, _SOFTCAP = 1e-8, 30.0  # the softcap is for files that do not say it


class MuseGlimmer(PlainDecoder):
    """A plain decoder in which the norms after attention and network have an epsilon of their own."""

    def post(self, b: Build, cur: Tensor, role: str, name: str, il: int) -> Tensor:
        """The output `cur` of attention or network, normed, as it is added to the residual."""
        return build_norm(b, cur, role, name, il, eps=_POST_NORM_EPS)


def _read(r: Reader) -> HParams:
    return read_hparams(
        HParams,
        r,
        f_logit_scale=r.number(Keys.LLM.LOGIT_SCALE),
        f_final_logit_softcapping=r.number(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, _SOFTCAP),
        rope_layers=read_swa_pattern(r, 4),
        **read_window(r, 4),
    )


_MUSE_GLIMMER = MuseGlimmer(embd_norm="plain", qk_norm="head", attn_gate="sigmoid", rope_factors=False)

ARCHITECTURES = (Architecture(("muse-glimmer",), _MUSE_GLIMMER.build, _read),)
