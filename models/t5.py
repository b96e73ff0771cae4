"""T5 (arXiv 1910.10683), T5 1.1, Flan-T5 (2210.11416), mT5 and UMT5: an encoder, and a decoder whose tokens attend to
the text that the encoder has read. Also the encoder alone, `t5encoder`: sentence-T5 (arXiv 2108.08877), and the text
encoder of image models.

There are no positions. Instead a number is added to each score of attention, which depends on the head and on the
distance of the tokens. Each small distance has its own number, larger distances share them in buckets (see
`relative_buckets`). All layers use the numbers of the first layer, unless they have their own. Scores over the encoded
text have no such numbers. Scores are not scaled, and products have no biases. The network has a gate with gelu (T5 1.1,
Flan-T5), or no gate, with relu.

The first T5 uses the embeddings as output weights too, and scales their input by 1 / sqrt(n_embd). Files of pyggml have
a key for that, `t5.logit_scale`. llama.cpp does not read it; its logits are larger by that factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor
from pyggml.types import Ints

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    build_attn,
    build_cross_kv,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_out_ids,
    build_lm_head,
    build_norm,
    build_out_rows,
    build_result_embd,
)
from .hparams import MAX_LAYERS, HParams
from .memory.memory import Memory
from .metadata import Reader, read_hparams
from .ubatch import UBatch

_MAX_DISTANCE = "{arch}.attention.relative_buckets_max_distance"  # our own: llama.cpp takes 128, as all T5 have it


@dataclass(frozen=True, kw_only=True)
class RelativeHParams(HParams):
    """n_rel_attn_bkts: how many buckets of distances there are, see `relative_buckets`. n_rel_attn_max_distance: this
    distance and all larger ones share the last bucket."""

    n_rel_attn_bkts: int
    n_rel_attn_max_distance: int


@dataclass(frozen=True, kw_only=True)
class T5HParams(RelativeHParams):
    """The hyperparameters of T5. `n_layer` counts the layers of the decoder, `n_layer_enc` those of the encoder."""

    n_layer_enc: int


def _buckets(r: Reader) -> dict[str, int]:
    found = {
        "n_rel_attn_bkts": r.integer(Keys.Attention.REL_BUCKETS_COUNT),
        "n_rel_attn_max_distance": r.integer(_MAX_DISTANCE, 128),
    }
    exact = found["n_rel_attn_bkts"] // 2
    if exact < 2:
        r.fail(Keys.Attention.REL_BUCKETS_COUNT, "must be at least 4")
    if found["n_rel_attn_max_distance"] <= exact:
        r.fail(_MAX_DISTANCE, f"must be larger than {exact}, the distances that have a bucket each")
    return found


def _read_encoder(r: Reader) -> RelativeHParams:
    return read_hparams(RelativeHParams, r, causal_attn=False, rope_layers=0, f_attention_scale=1.0, **_buckets(r))


def _read(r: Reader) -> T5HParams:
    n_enc = r.integer(Keys.LLM.BLOCK_COUNT)
    if not 0 < n_enc <= MAX_LAYERS:
        r.fail(Keys.LLM.BLOCK_COUNT, f"must be 1 to {MAX_LAYERS}, not {n_enc}")
    return read_hparams(
        T5HParams,
        r,
        n_layer=r.integer(Keys.LLM.DECODER_BLOCK_COUNT, n_enc),
        n_layer_enc=n_enc,
        n_head=r.integer(Keys.Attention.HEAD_COUNT),  # encoder and decoder share it, so it is one number
        n_head_kv=r.integer(Keys.Attention.HEAD_COUNT_KV, 0),
        n_ff=r.integer(Keys.LLM.FEED_FORWARD_LENGTH),
        rope_layers=0,
        f_attention_scale=1.0,
        f_logit_scale=r.number(Keys.LLM.LOGIT_SCALE, 0.0),
        **_buckets(r),
    )


def build_t5encoder(b: Build[RelativeHParams]) -> Graph:
    """The graph of one ubatch; its last node `result_embd` has ne [n_embd, n_outputs]."""
    with b.ctx:
        return build_result_embd(b, _encoder(b, b.hparams.n_layer))


def build_t5_encode(b: Build[T5HParams]) -> Graph:
    """The graph of a text: K and V that the decoder's layers see of it are stored; its last node `result_embd` has ne
    [n_embd, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        embd = _encoder(b, hp.n_layer_enc, all_rows=True)
        for il in range(hp.n_layer):
            n = hp.layer(il)
            Kcur = b.linear("dec.cross_attn_k", embd, n.n_embd_k_gqa, "Kcur_cross", il)
            Vcur = b.linear("dec.cross_attn_v", embd, n.n_embd_v_gqa, "Vcur_cross", il)
            build_cross_kv(b, Kcur, Vcur, il)
        return build_result_embd(b, gg.get_rows(embd, build_inp_out_ids(b)))


def build_t5(b: Build[T5HParams]) -> Graph:
    """The graph of the decoder's tokens; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        for il in range(hp.n_layer):
            cur = build_norm(b, inpL, "dec.attn_norm", "attn_norm", il)
            cross_inp = b.cb(gg.add(_self_attn(b, "dec", cur, il), inpL), "cross_inp", il)

            cur = build_norm(b, cross_inp, "dec.cross_attn_norm", "attn_norm_cross", il)
            n = hp.layer(il)
            Qcur = b.linear("dec.cross_attn_q", cur, n.n_embd_q, "Qcur_cross", il)
            Qcur = gg.reshape_3d(Qcur, n.n_embd_head_k, n.n_head, b.n_tokens)
            cur = build_attn(b, KV(Qcur, None, None, build_inp_kq_mask(b, il, cross=True), il, cross=True))
            cur = b.linear("dec.cross_attn_o", cur, hp.n_embd, "kqv_out_cross", il)
            b.optional("dec.cross_attn_rel_b", (n.n_head, hp.n_rel_attn_bkts), il)  # in old files, unused

            cur, cross_inp = build_out_rows(b, il, cur, cross_inp)
            ffn_inp = b.cb(gg.add(cur, cross_inp), "ffn_inp", il)
            cur = _ffn(b, "dec", build_norm(b, ffn_inp, "dec.ffn_norm", "ffn_norm", il), il)
            inpL = b.cb(gg.add(cur, ffn_inp), "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "dec.output_norm", "result_norm"))


def _encoder(b: Build[RelativeHParams], n_layer: int, *, all_rows: bool = False) -> Tensor:
    """The output of the encoder: ne [n_embd, n_outputs], or for all tokens, ne [n_embd, n_tokens]."""
    inpL = build_inp_embd(b)
    for il in range(n_layer):
        cur = build_norm(b, inpL, "enc.attn_norm", "attn_norm", il)
        cur = _self_attn(b, "enc", cur, il)
        if not all_rows:
            cur, inpL = build_out_rows(b, il, cur, inpL)
        ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)
        cur = _ffn(b, "enc", build_norm(b, ffn_inp, "enc.ffn_norm", "ffn_norm", il), il)
        inpL = b.cb(gg.add(cur, ffn_inp), "l_out", il)
    return build_norm(b, inpL, "enc.output_norm", "result_norm")


def _self_attn(b: Build[RelativeHParams], side: str, cur: Tensor, il: int) -> Tensor:
    n = b.hparams.layer(il)
    Qcur, Kcur, Vcur = (
        b.linear(f"{side}.attn_{x}", cur, size, f"{x.upper()}cur", il)
        for x, size in zip("qkv", (n.n_embd_q, n.n_embd_k_gqa, n.n_embd_v_gqa), strict=True)
    )
    Qcur = gg.reshape_3d(Qcur, n.n_embd_head_k, n.n_head, b.n_tokens)
    Kcur = gg.reshape_3d(Kcur, n.n_embd_head_k, n.n_head_kv, b.n_tokens)
    bias = _rel_bias(b, f"{side}.attn_rel_b", il)
    cur = build_attn(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il, bias=bias))
    return b.linear(f"{side}.attn_o", cur, b.hparams.n_embd, "kqv_out", il)


def _rel_bias(b: Build[RelativeHParams], role: str, il: int) -> Tensor:
    """What is added to the scores of layer `il` by the distances of tokens: ne [n_kv, n_tokens, n_head], of the layer's
    own weight of that role, ne [n_head, n_rel_attn_bkts], or the first layer's."""
    hp = b.hparams
    ne = (hp.layer(il).n_head, hp.n_rel_attn_bkts)
    own = b.optional(role, ne, il) if il else b.weight(role, ne, 0)
    name = f"pos_bias-{il if own is not None else 0}"
    if name not in b.masks:
        n_kv = b.use(il).n_kv

        def fill(u: UBatch, memory: Memory) -> Ints:
            cells = memory.caches[0]
            return relative_buckets(hp, cells.seen_pos(u.pos), u.pos, cells.causal)

        bucket = b.input("inp_pos_bucket", DType.I32, (n_kv * b.n_tokens,), fill)
        rows = gg.get_rows(b.weight(role, ne, 0) if own is None else own, bucket)
        bias = gg.permute(gg.reshape_3d(rows, ne[0], n_kv, b.n_tokens), 2, 0, 1, 3)
        b.masks[name] = b.cb(gg.dup(bias), name)  # not cont, which notes its ne: one graph could not serve several n_kv
    return b.masks[name]


def relative_buckets(hp: RelativeHParams, cells: Ints, pos: Ints, causal: bool) -> Ints:
    """int32 [n_tokens, n_kv]: the bucket of the distance of each of the `cells`, int32 [n_kv] positions, to each of the
    tokens at `pos` (T5's `_relative_position_bucket`; arXiv 1910.10683).

    When tokens see those after them (not `causal`), the later tokens have the second half of the buckets. Of the
    buckets of one direction, the first half holds one distance each; the others hold larger and larger ranges, by the
    logarithm, up to `n_rel_attn_max_distance`.
    """
    distance, n = cells[None, :].astype(np.int64) - pos[:, None], hp.n_rel_attn_bkts
    bucket = np.zeros_like(distance)
    if causal:
        distance = np.maximum(-distance, 0)
    else:
        n //= 2
        bucket += n * (distance > 0)
        distance = np.abs(distance)
    exact = n // 2
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    far = exact + (ratio / np.float32(np.log(hp.n_rel_attn_max_distance / exact)) * (n - exact)).astype(np.int64)
    return (bucket + np.where(distance < exact, distance, np.minimum(far, n - 1))).astype(np.int32)


def _ffn(b: Build, side: str, cur: Tensor, il: int) -> Tensor:
    n_ff = b.hparams.layer(il).n_ff
    up = b.linear(f"{side}.ffn_up", cur, n_ff, "ffn_up", il)
    if b.optional(f"{side}.ffn_gate", (cur.ne[0], n_ff), il) is None:
        par = b.cb(gg.relu(up), "ffn_relu", il)
    else:
        gate = b.linear(f"{side}.ffn_gate", cur, n_ff, "ffn_gate", il)
        par = b.cb(gg.mul(b.cb(gg.gelu(gate), "ffn_gelu", il), up), "ffn_gate_par", il)
    return b.linear(f"{side}.ffn_down", par, cur.ne[0], "ffn_out", il)


ARCHITECTURES = (
    Architecture(("t5encoder",), build_t5encoder, _read_encoder, "none", False),
    Architecture(("t5",), build_t5, _read, "cross", encode=build_t5_encode),
)
