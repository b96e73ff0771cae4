"""What goes into a graph: tokens or embeddings, positions, masks, and which rows come out. Each input says how it is
filled (`Build.input`)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.tensor import Tensor
from pyggml.types import Floats, Ints
from pyggml.var import largest

from ..hparams import AttnTemperature
from ..memory.kv_mask import KVMask
from ..memory.memory import Memory
from ..ubatch import UBatch
from .build import Build
from .norm import build_norm

MASK_PADDING = 32  # rows of the mask are padded to a multiple
_FIRST_ROW = np.zeros(1, np.int32)


def token_embd(b: Build) -> Tensor:
    """The embeddings of all tokens: ne [n_embd, n_vocab]."""
    return b.weight("token_embd", (b.hparams.n_embd, b.hparams.n_vocab))


def build_inp_tokens(b: Build) -> Tensor:
    """The ids of the tokens: I32 ne [n_tokens]."""
    return b.input("inp_tokens", DType.I32, (b.n_tokens,), _tokens, of_tokens=True)


def _tokens(u: UBatch, memory: Memory) -> Ints:
    assert u.token is not None, u
    return u.token


def _build_inp_given_embd(b: Build) -> Tensor:
    """Embeddings that are given instead of tokens: F32 ne [n_embd, n_tokens]."""
    return b.input("inp_embd", DType.F32, (b.hparams.n_embd, b.n_tokens), given_embd)


def given_embd(u: UBatch, memory: Memory) -> Floats:
    """The embeddings of a ubatch, float32 [n_tokens, n_embd]."""
    assert u.embd is not None, u
    return u.embd


def build_inp_embd(b: Build) -> Tensor:
    """The embeddings of the tokens, or those that are given, scaled when the model asks for it: ne
    [n_embd, n_tokens]. In the graph of a draft head they are made of two things (DeepSeek-V3, arXiv 2412.19437, 2.2):
    the embeddings of tokens, and the hidden states of the tokens before them, which are given as embeddings are."""
    if b.hparams.is_head:
        return _build_inp_head(b)
    if b.embd:
        cur = _build_inp_given_embd(b)
    else:
        w, tokens = token_embd(b), build_inp_tokens(b)
        cur = b.cb(b.adapters.rows(gg.get_rows(w, tokens), w.name, tokens), "inp_embd")
    scale = b.hparams.f_embedding_scale
    cur = b.cb(gg.scale(cur, scale), "inp_scaled") if scale else cur
    return _build_inp_mixed(b, cur) if b.mixed else cur


def _build_inp_mixed(b: Build, cur: Tensor) -> Tensor:
    """The embeddings of tokens `cur`, ne [n_embd, n_tokens], and in their places the given rows of pictures and sounds,
    which are not scaled. They are chosen in the graph, so that a token's embedding has the same bits in any company."""
    given = b.input("inp_media", DType.F32, (b.hparams.n_embd, b.n_tokens), _media_rows)
    return b.cb(gg.get_rows(gg.concat(cur, given, 1), build_inp_which(b, b.n_tokens)), "inp_mixed")


def build_inp_which(b: Build, n: int) -> Tensor:
    """The rows to take from `n` rows for text, followed by `n` rows for pictures: I32 ne [n]. `n`: all tokens of the
    ubatch, or those that go on to the end of the graph (`build_inp_out_ids`)."""
    if n == b.n_tokens:
        return b.input("inp_which", DType.I32, (n,), lambda u, memory: _which(u, _all_rows(u, memory)))
    return b.input("inp_which_out", DType.I32, (n,), lambda u, memory: _which(u, _wanted_rows(u, memory)))


def _media_rows(u: UBatch, memory: Memory) -> Floats:
    assert u.media is not None and u.media.rows is not None, u
    return u.media.rows


def _which(u: UBatch, tokens: Ints) -> Ints:
    assert u.media is not None and u.media.given is not None, u
    n = len(tokens)
    return np.arange(n, dtype=np.int32) + n * u.media.given[tokens].astype(np.int32)


def build_inp_deepstack(b: Build, level: int) -> Tensor:
    """What a tower adds to the output of layer `level`: F32 ne [n_embd, n_tokens], 0 for tokens of text."""
    n_embd = b.hparams.n_embd

    def fill(u: UBatch, memory: Memory) -> Floats:
        deep = None if u.media is None else u.media.deepstack
        return np.zeros((u.n_tokens, n_embd), np.float32) if deep is None else deep[level]

    return b.input(f"inp_deepstack_{level}", DType.F32, (n_embd, b.n_tokens), fill)


def _build_inp_head(b: Build) -> Tensor:
    hidden = _build_inp_given_embd(b)
    embd = b.cb(gg.get_rows(token_embd(b), build_inp_tokens(b)), "mtp_tok_embd")
    embd = build_norm(b, embd, "nextn.enorm", "mtp_enorm", 0)
    hidden = build_norm(b, hidden, "nextn.hnorm", "mtp_hnorm", 0)
    return b.linear("nextn.eh_proj", gg.concat(embd, hidden, 0), b.hparams.n_embd, "mtp_eh_proj", 0)


def build_inp_per_layer(b: Build, inpL: Tensor, n: int) -> Tensor:
    """The `n` elements that each layer reads of each token beside the residual: ne [n, n_layer, n_tokens]. They are the
    sum, divided by the root of 2, of an embedding that the token has for the layer and of a normed product of its
    embedding `inpL`, ne [n_embd, n_tokens]. When embeddings are given instead of tokens, the layer embeddings of token
    0 are taken."""
    hp = b.hparams
    size = n * hp.n_layer
    w = b.weight("per_layer_token_embd", (size, hp.n_vocab))
    if b.embd:
        own = gg.reshape_3d(gg.cast(gg.view_1d(w, size, 0), DType.F32), n, hp.n_layer, 1)
    else:
        tokens = build_inp_tokens(b)
        own = gg.reshape_3d(gg.get_rows(w, tokens), n, hp.n_layer, b.n_tokens)
    own = b.cb(gg.scale(own, math.sqrt(n)), "inp_per_layer_selected")
    cur = gg.scale(b.linear("per_layer_model_proj", inpL, size, "per_layer_model_proj"), 1.0 / math.sqrt(hp.n_embd))
    cur = build_norm(b, gg.reshape_3d(cur, n, hp.n_layer, b.n_tokens), "per_layer_proj_norm", "per_layer_proj")
    return b.cb(gg.scale(gg.add(cur, own), math.sqrt(0.5)), "inp_per_layer")


def per_layer_rows(per_layer: Tensor, il: int) -> Tensor:
    """The part for layer `il` of the output of `build_inp_per_layer`: ne [n, n_tokens]."""
    return gg.view_2d(per_layer, per_layer.ne[0], per_layer.ne[2], per_layer.nb[2], il * per_layer.nb[1])


def build_inp_pos(b: Build) -> Tensor:
    """Positions of the tokens: I32 ne [n_tokens], or [4 * n_tokens] when a token has four positions (first those in
    time of all tokens, then those of height, width, and a fourth)."""
    n = b.hparams.n_pos_per_embd
    fill = {"mrope": _four_positions, "imrope": _three_positions}.get(b.hparams.rope_type, _positions)
    return b.input("inp_pos", DType.I32, (b.n_tokens * n,), fill)


def _positions(u: UBatch, memory: Memory) -> Ints:
    return u.pos


def _turns(u: UBatch) -> tuple[Ints, Ints, Ints]:
    """The positions of tokens in time, height and width. They are equal for text."""
    turns = None if u.media is None else u.media.turns
    return (u.pos, u.pos, u.pos) if turns is None else (turns[0], turns[1], turns[2])


def _four_positions(u: UBatch, memory: Memory) -> Ints:
    """The four positions of tokens: the fourth is 0."""
    return np.concatenate((*_turns(u), np.zeros_like(u.pos)))


def _three_positions(u: UBatch, memory: Memory) -> Ints:
    """The four positions of tokens with an interleaved rope. Pairs that belong to neither height nor width turn by
    time. `rope_multi` takes the fourth position for some of them, so that is the one in time, too."""
    turns = _turns(u)
    return np.concatenate((*turns, turns[0]))


def build_pos_embd(b: Build, cur: Tensor, *, optional: bool = False) -> Tensor:
    """`cur`, ne [n_embd, n_tokens], plus the embeddings of the positions. `optional`: the model may lack them."""
    ne = (cur.ne[0], b.hparams.n_ctx_train)
    embd = b.optional("position_embd", ne) if optional else b.weight("position_embd", ne)
    if embd is None:
        return cur
    return b.cb(gg.add(cur, b.cb(gg.get_rows(embd, build_inp_pos(b)), "pos_embd")), "inpL")


def build_inp_attn_scale(b: Build, t: AttnTemperature) -> Tensor:
    """The factor of Q of each token, which follows from the token's position: ne [1, 1, n_tokens], see
    `attn_temp_scale`."""
    return b.input("inp_attn_scale", DType.F32, (1, 1, b.n_tokens), lambda u, memory: attn_temp_scale(t, u.pos))


def attn_temp_scale(t: AttnTemperature, pos: Ints) -> Floats:
    """1 + t.scale * log(1 + (pos + t.offset) / t.floor_scale, rounded down), float32 (Llama 4's temperature tuning:
    attention stays sharp in long texts)."""
    chunk = np.floor((pos + np.float64(t.offset)) / t.floor_scale)
    return (1.0 + t.scale * np.log1p(chunk)).astype(np.float32)


def build_inp_kq_mask(b: Build, il: int, *, cross: bool = False) -> Tensor:
    """The attention mask of layer `il`, or with `cross` of the encoded text: ne [n_kv, n_tokens padded], F32 (F16 for
    flash attention).

    Rows lie as far apart as the cache has cells, so that they stay where they are when n_kv grows.
    """
    kv, n_kv, _, name = b.cross if cross else b.use(il)
    if name not in b.masks:
        mask = b.input(name, DType.F32, (n_kv, -(-largest(b.n_tokens) // MASK_PADDING) * MASK_PADDING), None)
        row = 4 * kv.size
        mask.nb = (4, row, row * mask.ne[1], row * mask.ne[1])
        b.masks[name] = b.cb(gg.cast(mask, DType.F16), f"{name} (copy)") if kv.flash_attn else mask
    return b.masks[name]


def build_inp_own_mask(b: Build, il: int) -> Tensor:
    """Of the attention mask of layer `il`, over a transient cache, the parts in which a sequence sees its own tokens:
    ne [n_seq_tokens, n_seq_tokens, 1, n_seqs], F32 (F16 for flash attention). All of the mask would be n_seqs times as
    large."""
    kv, name = b.use(il).kv, f"{b.use(il).mask}_own"
    n, n_seqs, alibi = b.n_seq_tokens, b.n_seqs, b.hparams.f_max_alibi_bias > 0

    def fill(u: UBatch, memory: Memory) -> npt.NDArray[np.float32]:
        own = np.empty((n_seqs, n, n), np.float32)
        mask = KVMask(kv, own[0], kv.causal, kv.n_swa, alibi, kv.swa_type)
        for i in range(n_seqs):
            at = slice(i * n, (i + 1) * n)
            mask.write_cells(u.pos[at], u.seq[at], i * n, own[i])
        return own

    if name not in b.masks:
        mask = b.input(name, DType.F32, (n, n, 1, n_seqs), fill)
        b.masks[name] = b.cb(gg.cast(mask, DType.F16), f"{name} (copy)") if kv.flash_attn else mask
    return b.masks[name]


def build_inp_out_ids(b: Build) -> Tensor:
    """The rows that go on to the end of the graph, I32 ne [n_outputs]: the tokens whose logits are wanted, or all
    tokens in a graph of hidden states."""
    return b.input("inp_out_ids", DType.I32, (b.n_outputs,), _all_rows if b.n_logits else _wanted_rows)


def build_out_rows(b: Build, il: int, *cur: Tensor) -> tuple[Tensor, ...]:
    """In the last layer the rows of each tensor, ne [n, n_tokens], that go on to the end of the graph: ne
    [n, n_outputs]. In the layers before it the tensors as they are."""
    if il < b.hparams.n_layer - 1:
        return cur
    ids = build_inp_out_ids(b)
    return tuple(gg.get_rows(t, ids) for t in cur)


def build_out_streams(b: Build, il: int, cur: Tensor) -> Tensor:
    """As `build_out_rows`, of a tensor of ne [n, m, n_tokens]."""
    n, m, n_tokens, _ = cur.ne
    if il < b.hparams.n_layer - 1:
        return cur
    return gg.reshape_3d(gg.get_rows(gg.reshape_2d(cur, n * m, n_tokens), build_inp_out_ids(b)), n, m, b.n_outputs)


def build_inp_logit_ids(b: Build) -> Tensor:
    """The rows whose logits are wanted, in a graph of hidden states: I32 ne [n_logits]."""
    return b.input("inp_logit_ids", DType.I32, (b.n_logits,), _wanted_rows)


def _wanted_rows(u: UBatch, memory: Memory) -> Ints:
    return u.outputs if len(u.outputs) else _FIRST_ROW  # a graph has at least one


def _all_rows(u: UBatch, memory: Memory) -> Ints:
    return np.arange(u.n_tokens, dtype=np.int32)
