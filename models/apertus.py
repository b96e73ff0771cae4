"""Apertus (arXiv:2509.14233): Llama with Q and K of each head normed, and a network without a gate. The activation is
xIELU (arXiv:2411.13010), whose parameters differ from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.constants import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams


@dataclass(frozen=True, kw_only=True)
class ApertusHParams(HParams):
    """The numbers of xIELU in each layer."""

    xielu_alpha_n: tuple[float, ...]
    xielu_alpha_p: tuple[float, ...]
    xielu_beta: tuple[float, ...]
    xielu_eps: tuple[float, ...]


class Apertus(PlainDecoder[ApertusHParams]):
    """The network with xIELU."""

    def ffn(self, b: Build[ApertusHParams], cur: Tensor, il: int) -> Tensor:
        """The feed-forward network of layer `il`."""
        hp = b.hparams
        up = b.linear("ffn_up", cur, hp.layer(il).n_ff, "ffn_up", il)
        numbers = (hp.xielu_alpha_n, hp.xielu_alpha_p, hp.xielu_beta, hp.xielu_eps)
        par = b.cb(gg.xielu(up, *(values[il] for values in numbers)), "ffn_xielu", il)
        return b.linear("ffn_down", par, hp.n_embd, "ffn_out", il)


def _read(r: Reader) -> ApertusHParams:
    keys = {
        "alpha_n": Keys.xIELU.ALPHA_N,
        "alpha_p": Keys.xIELU.ALPHA_P,
        "beta": Keys.xIELU.BETA,
        "eps": Keys.xIELU.EPS,
    }
    numbers = {f"xielu_{name}": r.numbers(key, r.integer(Keys.LLM.BLOCK_COUNT)) for name, key in keys.items()}
    return read_hparams(ApertusHParams, r, rope_type="neox", **numbers)


ARCHITECTURES = (Architecture(("apertus",), Apertus(qk_norm="head").build, _read),)
