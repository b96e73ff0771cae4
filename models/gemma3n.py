"""Gemma 3n (Google, huggingface.co/google/gemma-3n-E2B-it).

Each token has several streams of n_embd elements (AltUp, arXiv 2301.13310). A layer first predicts each stream, as a
mixture of all. Then it works on one of them, the active one. Last it corrects all predictions by how much the active
one has changed.

Beside attention runs a product of low rank (LAuReL, arXiv 2411.07501). In the first layers the network is sparse: a
gate opens only when it is well above the mean of the token's gates. Each layer also reads an embedding that the token
has for this layer. Q, K and V are normed (V without weights), and scores are not scaled. Most layers have a window. The
last layers have no K and V of their own: they attend to those of an earlier layer of their kind.

As in the transformers library, a stream that a product makes almost 0 is not scaled up to the length of the others, and
the standard deviation of n gates divides by n. llama.cpp divides by n - 1, which changes the cutoff of 16384 gates by
3e-5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import (
    KV,
    Build,
    build_ffn,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_per_layer,
    build_inp_pos,
    build_lm_head,
    build_norm,
    build_out_rows,
    build_out_streams,
    build_qkv,
    build_rope,
    llm_build_kv,
    per_layer_rows,
)
from .blocks.ffn import ACTIVATIONS
from .gemma4 import Gemma4HParams, read_shared_kv
from .metadata import Reader, read_hparams, read_window

_N_KV = 20  # layers with K and V, when files do not say
_N_SPARSE, _SPARSE = 10, 1.6448533535003662  # layers with sparse gates (95 % of gates close), when files do not say
_LAUREL_RANK = 64
_MIN_MEAN = 1e-5  # a stream whose mean square is smaller is scaled as if it had this one


@dataclass(frozen=True, kw_only=True)
class Gemma3nHParams(Gemma4HParams):
    """Hyperparameters that Gemma 3n has and Gemma 4 does not.

    n_altup      streams of a token
    i_altup_act  the active stream, which layers work on
    f_sparsity   by layer: gates open when they are this many standard deviations above the mean; -inf: all are open
    """

    n_altup: int
    i_altup_act: int
    f_sparsity: tuple[float, ...]


def build_gemma3n(b: Build[Gemma3nHParams]) -> Graph:
    """Build the graph of one ubatch; its last node is `result_output`, ne [n_vocab, n_outputs]. The nodes `l_out` are
    the first stream, ne [n_embd, n_tokens]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        per_layer = build_inp_per_layer(b, inpL, hp.n_embd_per_layer)
        streams = _spread(b, inpL)
        for il in range(hp.n_layer):
            predictions = _predict(b, streams, il)
            active = b.cb(_stream(predictions, hp.i_altup_act), "active_prediction", il)
            cur = build_norm(b, active, "attn_norm", "attn_norm", il)
            laurel = _laurel(b, cur, il)
            cur = llm_build_kv(b, _kv(b, cur, inp_pos, il))
            own = per_layer_rows(per_layer, il)
            cur, active, laurel, own = build_out_rows(b, il, cur, active, laurel, own)
            predictions = build_out_streams(b, il, predictions)
            cur = build_norm(b, cur, "post_attention_norm", "attn_post_norm", il)
            cur = gg.add(b.cb(gg.add(cur, active), "attn_gated", il), laurel)
            attn_laurel = b.cb(gg.scale(cur, math.sqrt(0.5)), "attn_laurel", il)
            cur = _ffn(b, build_norm(b, attn_laurel, "ffn_norm", "ffn_norm", il), il)
            cur = build_norm(b, cur, "post_ffw_norm", "ffn_post_norm", il)
            activated = b.cb(gg.add(cur, attn_laurel), "attn_ffw_laurel_gated", il)
            streams = _correct(b, predictions, activated, active, il)
            streams = _add_own(b, streams, own, il)
        return build_lm_head(b, build_norm(b, _merge(b, streams), "output_norm", "result_norm"))


def _stream(streams: Tensor, i: int) -> Tensor:
    """Stream `i` of `streams`, ne [n_embd, n_altup, n_tokens]: ne [n_embd, n_tokens]."""
    return gg.cont(gg.view_2d(streams, streams.ne[0], streams.ne[2], streams.nb[2], i * streams.nb[1]))


def _others(streams: Tensor) -> Tensor:
    """The streams after the first: ne [n_embd, n_altup - 1, n_tokens], a view."""
    n_embd, n_altup, n_tokens, _ = streams.ne
    return gg.view_3d(streams, n_embd, n_altup - 1, n_tokens, streams.nb[1], streams.nb[2], streams.nb[1])


# -- between one stream and several ------------------------------------------------------------------------------------


def _spread(b: Build[Gemma3nHParams], inpL: Tensor) -> Tensor:
    """Make the streams of the embeddings `inpL`, ne [n_embd, n_tokens]. The first stream is `inpL`; the others are
    products of it, scaled to the same length. The result has ne [n_embd, n_altup, n_tokens]."""
    first = gg.reshape_3d(inpL, inpL.ne[0], 1, inpL.ne[1])
    added = _as_long(b, "altup_proj", gg.reshape_3d(inpL, *inpL.ne[:2], 1), first)
    return b.cb(gg.concat(first, added, 1), "inp_stacked")


def _merge(b: Build[Gemma3nHParams], streams: Tensor) -> Tensor:
    """Make one row of the streams: the mean of the first stream and products of the others, which are scaled to the
    length of the first. The result has ne [n_embd, n_outputs]."""
    n_embd, n_altup, n, _ = streams.ne
    first = gg.reshape_3d(_stream(streams, 0), n_embd, 1, n)
    others = gg.cont(gg.permute(_others(streams), 0, 2, 1, 3))
    others = b.cb(_as_long(b, "altup_unembd_proj", others, first), "altup_unembd")
    total = gg.reshape_2d(first, n_embd, n)
    for i in range(n_altup - 1):
        total = gg.add(total, gg.view_2d(others, n_embd, n, others.nb[2], i * others.nb[1]))
    return b.cb(gg.scale(total, 1.0 / n_altup), "unembd_merged")


def _as_long(b: Build[Gemma3nHParams], role: str, cur: Tensor, like: Tensor) -> Tensor:
    """Products of `cur`, ne [n_embd, n_tokens, 1 or n_altup - 1], and the matrices of `role`. Each row is scaled to the
    length of the token's row in `like`, ne [n_embd, 1, n_tokens]. The result has ne [n_embd, n_altup - 1,
    n_tokens]."""
    n = b.hparams.n_altup - 1
    w = b.weight(role, (cur.ne[0], cur.ne[0], n))
    out = b.mul_mat(w, cur if cur.ne[2] == n else gg.repeat_4d(cur, *cur.ne[:2], n, 1))
    out = gg.cont(gg.permute(out, 0, 2, 1, 3))
    length = gg.sqrt(gg.clamp(gg.mean(gg.sqr(out)), _MIN_MEAN, math.inf))
    return gg.mul(out, gg.div(gg.repeat_4d(gg.sqrt(gg.mean(gg.sqr(like))), *length.ne), length))


# -- a layer -----------------------------------------------------------------------------------------------------------


def _modalities(b: Build[Gemma3nHParams], cur: Tensor, il: int) -> Tensor:
    """Numbers from which the weights of the streams are computed, ne [n_altup, n_tokens], made of one stream `cur`, ne
    [n_embd, n_tokens]."""
    cur = gg.scale(build_norm(b, cur, "altup_router_norm", "altup_router_normed", il), 1.0 / cur.ne[0])
    return b.cb(gg.tanh(b.linear("altup_router", cur, b.hparams.n_altup, "altup_router", il)), "modalities", il)


def _predict(b: Build[Gemma3nHParams], streams: Tensor, il: int) -> Tensor:
    """The layer's prediction of the streams, ne [n_embd, n_altup, n_tokens]: each stream plus a mixture of all."""
    n, n_tokens = streams.ne[1], streams.ne[2]
    by = _modalities(b, _stream(streams, b.hparams.i_altup_act), il)
    coefs = gg.reshape_3d(b.linear("altup_predict_coef", by, n * n, "all_coefs", il), n, n, n_tokens)
    mixed = gg.mul_mat(gg.cont(gg.permute(streams, 1, 0, 2, 3)), coefs)
    return b.cb(gg.add(mixed, streams), "predictions", il)


def _correct(b: Build[Gemma3nHParams], predictions: Tensor, activated: Tensor, active: Tensor, il: int) -> Tensor:
    """The corrected predictions, ne [n_embd, n_altup, n_outputs]: to each is added a part of `activated` - `active`,
    which is how much the layer has changed the active stream."""
    n_embd, n, n_tokens, _ = predictions.ne
    innovation = b.cb(gg.sub(activated, active), "innovation", il)
    by = b.linear("altup_correct_coef", _modalities(b, activated, il), n, "correct_coefs", il)
    coefs = gg.reshape_3d(gg.scale_bias(by, 1.0, 1.0), 1, n, n_tokens)
    parts = gg.mul(gg.repeat_4d(gg.reshape_3d(innovation, n_embd, 1, n_tokens), n_embd, n, n_tokens, 1), coefs)
    return b.cb(gg.add(parts, predictions), "corrected", il)


def _laurel(b: Build[Gemma3nHParams], cur: Tensor, il: int) -> Tensor:
    """`cur`, ne [n_embd, n_tokens], plus its product with a matrix of low rank, which is normed."""
    rank = (b.weights.ne("blk.0.laurel_l.weight") or (0, _LAUREL_RANK))[1]
    out = b.linear("laurel_r", b.linear("laurel_l", cur, rank, "laurel_l", il), cur.ne[0], "laurel_r", il)
    return b.cb(gg.add(build_norm(b, out, "laurel_post_norm", "laurel_normed", il), cur), "laurel_out", il)


def _kv(b: Build[Gemma3nHParams], cur: Tensor, pos: Tensor, il: int) -> KV:
    """Q, K, V and the mask of attention in layer `il`, made of `cur`, ne [n_embd, n_tokens]."""
    hp, n, mask = b.hparams, b.hparams.layer(il), build_inp_kq_mask(b, il)
    if not hp.has_kv(il):
        for role, ne in (
            ("attn_k", (cur.ne[0], n.n_embd_k_gqa)),
            ("attn_v", (cur.ne[0], n.n_embd_v_gqa)),
            ("attn_k_norm", (n.n_embd_head_k,)),
        ):
            b.optional(role, ne, il)  # declared so that the loader does not report it as unused
        Qcur = gg.reshape_3d(b.linear("attn_q", cur, n.n_embd_q, "Qcur", il), n.n_embd_head_k, n.n_head, b.n_tokens)
        return KV(_normed(b, Qcur, "q", pos, il), None, None, mask, il)
    Qcur, Kcur, Vcur = build_qkv(b, cur, il)
    Qcur, Kcur = _normed(b, Qcur, "q", pos, il), _normed(b, Kcur, "k", pos, il)
    Vcur = build_norm(b, gg.reshape_3d(Vcur, n.n_embd_head_v, n.n_head_kv, b.n_tokens), "", "Vcur_normed", il)
    return KV(Qcur, Kcur, gg.reshape_2d(Vcur, n.n_embd_v_gqa, b.n_tokens), mask, il)


def _normed(b: Build[Gemma3nHParams], cur: Tensor, part: str, pos: Tensor, il: int) -> Tensor:
    """Norm and rope Q or K (`part` is "q" or "k"), ne [n_embd_head_k, n_head or n_head_kv, n_tokens]."""
    name = f"{part.upper()}cur"
    cur = build_norm(b, cur, f"attn_{part}_norm", f"{name}_normed", il)
    return build_rope(b, cur, pos, None, f"{name}_pos", il)


def _ffn(b: Build[Gemma3nHParams], cur: Tensor, il: int) -> Tensor:
    """The feed-forward network. In sparse layers a gate opens only when it is well above the mean of its token's
    gates."""
    hp = b.hparams
    act, by = ACTIVATIONS[hp.act or "gelu"], hp.f_sparsity[il]

    def sparse(gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        above = gg.sub(gate, gg.mean(gate))
        cutoff = gg.scale(gg.sqrt(gg.mean(gg.sqr(above))), by)
        return gg.mul(act(b.cb(gg.relu(gg.sub(above, cutoff)), "ffn_gate_sparse", il)), up)

    return build_ffn(b, cur, il, "gelu" if math.isinf(by) else sparse)


def _add_own(b: Build[Gemma3nHParams], streams: Tensor, own: Tensor, il: int) -> Tensor:
    """Let the embedding that tokens have for layer `il`, `own`, gate the active stream, and add the result to all
    streams but the first. A control vector is added to all streams, as in llama.cpp (to the first by `b.cb`)."""
    hp, (n_embd, _, n_tokens, _) = b.hparams, streams.ne
    cur = gg.mul(_stream(streams, hp.i_altup_act), b.weight("altup_correct_scale", (n_embd,), il))
    gate = ACTIVATIONS[hp.act or "gelu"](b.linear("inp_gate", cur, own.ne[0], "per_layer_gate", il))
    cur = b.linear("proj", b.cb(gg.mul(gate, own), "first_prediction_scaled", il), n_embd, "per_layer_proj", il)
    cur = build_norm(b, cur, "post_norm", "first_prediction_out", il)
    others = gg.add(_others(streams), gg.reshape_3d(cur, n_embd, 1, n_tokens))
    if il in b.adapters.control:
        others = gg.add(others, b.adapters.control[il])
    first = b.cb(_stream(streams, 0), "l_out", il)
    return b.cb(gg.concat(gg.reshape_3d(first, n_embd, 1, n_tokens), others, 1), "streams", il)


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def _sparsity(r: Reader, n_layer: int) -> tuple[float, ...]:
    key = Keys.LLM.ACTIVATION_SPARSITY_SCALE
    found = r.get(key, None)
    if found is None:
        return tuple(_SPARSE if il < _N_SPARSE else -math.inf for il in range(n_layer))
    values = cast("list[float]", found.tolist()) if isinstance(found, np.ndarray) else []
    if len(values) != n_layer or not all(type(v) is float and v < math.inf for v in values):
        r.fail(key, f"must hold {n_layer} numbers, one for each layer")
    return tuple(values)


def _read(r: Reader) -> Gemma3nHParams:
    n_layer = r.integer(Keys.LLM.BLOCK_COUNT)
    n_altup, active = r.integer(Keys.LLM.ALTUP_NUM_INPUTS, 4), r.integer(Keys.LLM.ALTUP_ACTIVE_IDX, 0)
    if not active < n_altup or n_altup < 2:
        r.fail(Keys.LLM.ALTUP_ACTIVE_IDX, f"is {active}, of {n_altup} streams")
    return read_hparams(
        Gemma3nHParams,
        r,
        rope_type="neox",
        f_embedding_scale=math.sqrt(r.integer(Keys.LLM.EMBEDDING_LENGTH)),
        f_attention_scale=1.0,
        f_final_logit_softcapping=r.number(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, 30.0),
        n_layer_kv_from_start=read_shared_kv(r, max(n_layer - _N_KV, 0)),
        n_altup=n_altup,
        i_altup_act=active,
        n_embd_per_layer=r.integer(Keys.LLM.EMBD_LENGTH_PER_LAYER_INP, 256),
        f_sparsity=_sparsity(r, n_layer),
        **read_window(r, 5, plain_rope=True),
    )


ARCHITECTURES = (Architecture(("gemma3n",), build_gemma3n, _read),)
