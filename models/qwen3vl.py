"""Qwen3-VL (arXiv:2511.21631), its text models: as Qwen3; a token has three positions, which an interleaved rope turns
by. The tower adds to what the first layers give of a picture's rows (DeepStack, arXiv:2406.04334)."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_inp_deepstack, build_out_rows
from .decoder import PlainDecoder
from .hparams import HParams, RankHead
from .metadata import Reader, read_hparams, read_rope_sections
from .plain import yes_or_no


@dataclass(frozen=True, kw_only=True)
class Qwen3VLParams(HParams):
    """`n_deepstack`: how many of the first layers the tower adds to."""

    n_deepstack: int = 0


@dataclass(frozen=True, kw_only=True)
class Qwen3VL(PlainDecoder[Qwen3VLParams]):
    """A decoder whose first layers take additions for the rows of pictures."""

    def layer(self, b: Build[Qwen3VLParams], inpL: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        """The output of layer `il`, which reads `inpL`, with what the tower adds to it."""
        cur = super().layer(b, inpL, pos, factors, il)
        if not b.mixed or il >= b.hparams.n_deepstack:
            return cur
        (deep,) = build_out_rows(b, il, build_inp_deepstack(b, il))
        return b.cb(gg.add(cur, deep), "deepstack_out", il)


def _read_moe(r: Reader, **own: RankHead) -> Qwen3VLParams:
    n, sections = r.integer(Keys.LLM.NUM_DEEPSTACK_LAYERS, 0), read_rope_sections(r)
    return read_hparams(Qwen3VLParams, r, rope_type="imrope", rope_sections=sections, n_deepstack=n, **own)


def _read(r: Reader) -> Qwen3VLParams:
    return _read_moe(r, rank_head=yes_or_no(r))


_BUILD = Qwen3VL(qk_norm="head").build
ARCHITECTURES = (
    # Qwen3-TTS (arXiv:2601.15621), its model that writes the codes of speech: as Qwen3-VL.
    Architecture(("qwen3vl", "qwen3tts"), _BUILD, _read),
    Architecture(("qwen3vlmoe",), _BUILD, _read_moe),
)
