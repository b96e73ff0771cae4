"""Muse Glimmer (llama.cpp's `muse-glimmer`, https://github.com/ggml-org/llama.cpp): llama with embeddings that are
normed, attention gated by a sigmoid, norms before and behind, those behind with an epsilon of their own, Q and K
normed, a window in three of four layers, which alone are roped, and logits that are scaled, then softcapped."""

from __future__ import annotations

from pyggml.gguf_io.constants import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_norm
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams, read_swa_pattern, read_window

_POST_NORM_EPS, _SOFTCAP = 1e-8, 30.0  # the latter when a file does not say


class MuseGlimmer(PlainDecoder):
    """The epsilon of the norms behind attention and network."""

    def post(self, b: Build, cur: Tensor, role: str, name: str, il: int) -> Tensor:
        """What attention or network gives, as it is added to the residual."""
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
