"""CogVLM (arXiv:2311.03079), the part for text: Llama with two sets of weights, one for tokens and one for the
rows of pictures. When a ubatch holds both, each weight is multiplied with all of it, and each token takes its own."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import KV, Build, build_attn, build_inp_kq_mask, build_inp_which, build_rope, split_qkv
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams


class CogVLM(PlainDecoder):
    """A decoder with one set of weights for tokens and one for pictures."""

    def attention(self, b: Build, cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        """What attention gives in layer `il`, which reads `cur`."""
        n = b.hparams.layer(il)
        qkv = _linear(b, "attn_qkv", cur, n.n_embd_q + n.n_embd_k_gqa + n.n_embd_v_gqa, "wqkv", il)
        Qcur, Kcur, Vcur = split_qkv(b, qkv, il)
        Qcur = build_rope(b, Qcur, pos, factors, "Qcur", il)
        Kcur = build_rope(b, Kcur, pos, factors, "Kcur", il)
        cur = build_attn(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il))
        return _linear(b, "attn_output", cur, b.hparams.n_embd, "kqv_out", il)

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """The feed-forward network of layer `il`."""
        n_ff = b.hparams.layer(il).n_ff
        gate = b.cb(gg.silu(_linear(b, "ffn_gate", cur, n_ff, "ffn_gate", il)), "ffn_silu", il)
        par = b.cb(gg.mul(gate, _linear(b, "ffn_up", cur, n_ff, "ffn_up", il)), "ffn_gate_par", il)
        return _linear(b, "ffn_down", par, b.hparams.n_embd, "ffn_out", il)


def _linear(b: Build, role: str, cur: Tensor, n_out: int, name: str, il: int) -> Tensor:
    """The product with the weight for tokens, or for pictures; a model must have both."""
    ne = (cur.ne[0], n_out)
    tokens, pictures = b.weight(role, ne, il), b.weight(f"vis_{role.removeprefix('ffn_')}", ne, il)
    if not b.mixed:
        return b.cb(b.mul_mat(pictures if b.embd else tokens, cur), name, il)
    both = gg.concat(b.mul_mat(tokens, cur), b.mul_mat(pictures, cur), 1)
    return b.cb(gg.get_rows(both, build_inp_which(b, cur.ne[1])), name, il)


def _read(r: Reader) -> HParams:
    plain = {"rope_freq_base": 10000.0, "rope_freq_scale": 1.0, "yarn_ext_factor": 0.0, "rope_attn_factor": 1.0}
    return read_hparams(HParams, r, rope_type="neox", n_rot=0, **plain)


ARCHITECTURES = (Architecture(("cogvlm",), CogVLM(rope_factors=False).build, _read),)
