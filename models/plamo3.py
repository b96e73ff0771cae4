"""PLaMo 3 (Preferred Networks, https://huggingface.co/pfnet/plamo-3-nict-8b-base): llama with norms before and after
attention and network, and with Q and K normed. Seven of eight layers have a window and another rope. The names of the
norms' tensors may lack `.weight`."""

from __future__ import annotations

from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_norm
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams, read_window


class Plamo3(PlainDecoder):
    """A plain decoder in which the norms after attention and network have names of their own."""

    def post(self, b: Build, cur: Tensor, role: str, name: str, il: int) -> Tensor:
        """The output `cur` of attention or network, normed, as it is added to the residual."""
        nameless = b.optional(role, cur.ne[:1], il, "") is not None
        return build_norm(b, cur, role, name, il, suffix="" if nameless else "weight")


def _read(r: Reader) -> HParams:
    window = read_window(r, 8, 0, plain_rope=True) if r.integer(Keys.Attention.SLIDING_WINDOW, 0) else {}
    return read_hparams(HParams, r, rope_type="neox", **window)


ARCHITECTURES = (Architecture(("plamo3",), Plamo3(qk_norm="head", gate_in_up=True, rope_factors=False).build, _read),)
