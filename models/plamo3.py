"""PLaMo 3 (Preferred Networks, https://huggingface.co/pfnet/plamo-3-nict-8b-base): llama with norms before and behind
attention and network, whose tensors may have names without `.weight`, with Q and K normed, and with a window and a rope
of their own in seven of eight layers."""

from __future__ import annotations

from pyggml.gguf_io.constants import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_norm
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams, read_window


class Plamo3(PlainDecoder):
    """The names of the norms behind attention and network."""

    def post(self, b: Build, cur: Tensor, role: str, name: str, il: int) -> Tensor:
        """What attention or network gives, as it is added to the residual."""
        nameless = b.optional(role, cur.ne[:1], il, "") is not None
        return build_norm(b, cur, role, name, il, suffix="" if nameless else "weight")


def _read(r: Reader) -> HParams:
    window = read_window(r, 8, 0, plain_rope=True) if r.integer(Keys.Attention.SLIDING_WINDOW, 0) else {}
    return read_hparams(HParams, r, rope_type="neox", **window)


ARCHITECTURES = (Architecture(("plamo3",), Plamo3(qk_norm="head", gate_in_up=True, rope_factors=False).build, _read),)
