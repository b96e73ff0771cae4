"""Qwen 4 experimental (llama.cpp's `qwen4exp`, https://github.com/ggml-org/llama.cpp): Qwen3-Next with embeddings of
n-grams and with hyper-connections (see `hyper.py`).

The weights of its hyper-connections are products of low rank. They norm the streams too, so that blocks have no norms
of their own.

Before one layer each token looks up rows of a table. Its n-grams (the token and those before it) choose the rows. A key
and a value are products of these rows. The value is multiplied by a gate for each stream, which is large when the key
is like the stream. What results is added to the streams, once as it is and once convolved over time.

Layers with attention attend to blocks of tokens that an indexer chooses (see `indexer.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor
from pyggml.types import Ints

from .architecture import Architecture
from .block_keys import TokenBlocks, build_block_keys
from .blocks import Build, build_inp_kq_mask, build_inp_pos, build_norm
from .blocks.states import as_f32, by_sequence, read_state, slot_of_states, store_state
from .hparams import MAX_INT, StateShape
from .hyper import HyperHParams, Mix, Put, build_hyper, read_streams
from .indexer import (
    ChosenBlocks,
    Indexer,
    build_chosen_blocks,
    index_projections,
    index_rope,
    index_scores,
    must_choose,
    read_indexer,
    store_index_as_is,
)
from .mamba import read_ssm
from .memory.memory import Memory
from .metadata import Reader, read_hparams, read_recurrent, read_rope_sections
from .qwen3next import Qwen3Next, QwenHParams
from .ubatch import UBatch

_RANK, _RATIOS = "{arch}.hyper_connection.low_rank", "{arch}.attention.compress_ratios"
_LAYERS, _SIZE, _HEADS, _KERNEL, _MULTIPLIERS, _OFFSETS, _ROWS, _EOS, _IMAGE = (
    f"{{arch}}.ple.{key}"
    for key in (
        *("layers", "ngram_size", "heads_per_ngram", "conv_kernel", "layer_multipliers", "head_offsets"),
        *("head_vocab_sizes", "eos_token_id", "image_token_id"),
    )
)
_MAX_SIZE, _MAX_ROWS, _MAX_KERNEL, _MAX_BLOCK = 8, 64, 64, 1024
_MAX_VOCAB = 1 << 24  # states hold tokens as floats
_MIN_SCORE = 1e-6  # smaller scores count as this before their root is taken


class NGrams(NamedTuple):
    """How each token and those before it choose rows of a table.

    size         tokens of the longest n-gram; the shortest has 2
    each         how many rows each n-gram chooses
    multipliers  one for the token, one for the token before it, and so on: the products of tokens and multipliers,
                 xor'ed, are the number of an n-gram
    first        where the part of the table begins from which a row is chosen, for each row
    rows         how many rows that part has, for each row
    end          the token that ends a text: tokens before it do not count
    stand_in     the token that counts when embeddings are given instead of tokens
    """

    size: int
    each: int
    multipliers: tuple[int, ...]
    first: tuple[int, ...]
    rows: tuple[int, ...]
    end: int
    stand_in: int


@dataclass(frozen=True, kw_only=True)
class Qwen4HParams(Indexer, QwenHParams, HyperHParams):
    """Hyperparameters of Qwen 4.

    n_hc_rank     rank of the products that gate streams
    ngrams        how n-grams are looked up; None: the model has no n-grams
    ngram_layer   the layer before which n-grams are looked up; -1: the model has no n-grams
    n_ngram_embd  elements of a row of their table
    d_ngram_conv  tokens that the convolution of the looked-up values reads
    """

    n_hc_rank: int
    ngrams: NGrams | None = None
    ngram_layer: int
    n_ngram_embd: int
    d_ngram_conv: int

    @property
    def n_ngram_before(self) -> int:
        """How many earlier tokens the convolution reaches back. Its taps are as many tokens apart as an n-gram has."""
        return (self.d_ngram_conv - 1) * self.ngrams.size if self.ngrams is not None else 0

    @property
    def n_recent(self) -> int:
        return self.ngrams.size - 1 if self.ngrams is not None else 0

    def has_indexer(self, il: int) -> bool:
        return bool(self.token_blocks) and super().has_indexer(il)

    def state(self, il: int) -> StateShape:
        if self.has_indexer(il):
            return StateShape((self.token_blocks[0].n_read - 1) * self.n_indexer_embd)
        shape = super().state(il)
        n = self.n_ngram_before * self.n_stream * self.n_embd
        return shape._replace(p=n) if il == self.ngram_layer else shape


@dataclass(frozen=True, kw_only=True)
class Qwen4(Qwen3Next[Qwen4HParams]):
    """Qwen3-Next with several residual streams; see the module."""

    def build(self, b: Build[Qwen4HParams]) -> Graph:
        hp = b.hparams
        with b.ctx:
            pos = build_inp_pos(b)
            return build_hyper(
                b,
                Mix(_read_streams, _head),
                lambda cur, il: self.attention(b, cur, pos, None, il),
                lambda cur, il: self.ffn(b, cur, il),
                lambda x, il: _ngrams(b, hp, x, il) if il == hp.ngram_layer else x,
            )

    def mask(self, b: Build[Qwen4HParams], cur: Tensor, pos: Tensor, il: int) -> Tensor:
        """The mask of layer `il`: tokens see the blocks that the indexer chooses. The key of a block is the mean of the
        keys of its tokens, normed, and roped with the position of its first token."""
        hp = b.hparams
        choose, head = must_choose(b, hp, il), hp.n_indexer_embd
        q, k = index_projections(b, hp, cur, il, required=choose)
        if q is None or k is None or not hp.has_indexer(il):
            return build_inp_kq_mask(b, il)
        found = build_block_keys(b, hp.token_blocks[0], head, k, None, cur, b.states.r_l[il], "indexer_block", il)
        keys = build_norm(b, found.keys, "indexer.k_norm", "indexer_k", il)
        keys = index_rope(b, hp, gg.reshape_3d(keys, head, 1, keys.ne[1]), found.pos, "indexer_k", il)
        store_index_as_is(b, hp, found.of_tokens(keys), il)
        if not choose:
            return build_inp_kq_mask(b, il)
        q = index_rope(b, hp, build_norm(b, q, "indexer.q_norm", "indexer_q", il), pos, "indexer_q", il)
        return build_chosen_blocks(b, hp, index_scores(b, hp, q, None, il), found.end, il)


def _normed(b: Build, x: Tensor, role: str, name: str, il: int) -> Tensor:
    """The streams `x`, ne [n_embd, n_stream, n_tokens], normed, each stream with weights of its own: ne as `x`."""
    n_embd, n, _, _ = x.ne
    flat = b.weights.ne(b.name(role, il)) == (n_embd * n, 1, 1, 1)  # some files store the weights as one row
    w = b.weight(role, (n_embd * n,) if flat else (n_embd, n), il)
    return b.cb(gg.mul(build_norm(b, x, "", "norm", il), gg.reshape_2d(w, n_embd, n) if flat else w), name, il)


def _mixed(b: Build[Qwen4HParams], x: Tensor, role: str, il: int) -> tuple[Tensor, Tensor]:
    """Returns the mean of the normed and gated streams, ne [n_embd, n_tokens], and the normed streams, ne
    [n_embd * n_stream, n_tokens], from which weights are computed."""
    hp = b.hparams
    n_embd, n, n_tokens, _ = x.ne
    normed = gg.reshape_2d(_normed(b, x, f"{role}_norm", "hc_norm", il), n_embd * n, n_tokens)
    low = gg.silu(gg.scale(b.linear(f"{role}_down", normed, hp.n_hc_rank, "hc_down", il), 1.0 / n))
    gate = gg.sigmoid(b.linear(f"{role}_up", low, n_embd * n, "hc_gate", il))
    gated = gg.reshape_3d(gg.mul(normed, gate), n_embd, n, n_tokens)
    total = gg.view_2d(gated, n_embd, n_tokens, gated.nb[2], 0)
    for i in range(1, n):
        total = gg.add(total, gg.view_2d(gated, n_embd, n_tokens, gated.nb[2], i * gated.nb[1]))
    return b.cb(gg.scale(total, 1.0 / n), f"{role}_mixed", il), normed


def _read_streams(b: Build[Qwen4HParams], x: Tensor, part: str, il: int) -> tuple[Tensor, Put]:
    n = x.ne[1]
    cur, normed = _mixed(b, x, f"hc_{part}", il)
    inject = b.linear(f"hc_{part}_inject", normed, n, "hc_inject", il)
    return cur, Put(gg.scale(gg.sigmoid(gg.scale(inject, 1.0 / n)), 2.0))


def _head(b: Build[Qwen4HParams], x: Tensor) -> Tensor:
    return b.cb(_mixed(b, x, "output_hc", -1)[0], "result_norm")


def _ngrams(b: Build, hp: Qwen4HParams, x: Tensor, il: int) -> Tensor:
    """Add to the streams `x`, ne [n_embd, n_stream, n_tokens], what the n-grams of their tokens say."""
    assert hp.ngrams is not None, hp
    n_embd, n, n_tokens, _ = x.ne
    each = len(hp.ngrams.rows)
    name = b.name("per_layer_token_embd", -1)
    n_rows = (b.weights.ne(name) or (0, 0))[1]  # the table may end with rows that nothing chooses
    n_rows = max(n_rows, *(i + rows for i, rows in zip(hp.ngrams.first, hp.ngrams.rows, strict=True)))
    table = b.weight("per_layer_token_embd", (hp.n_ngram_embd, n_rows))
    embd = gg.reshape_2d(gg.get_rows(table, _inp_ngram_rows(b, hp.ngrams)), hp.n_ngram_embd * each, n_tokens)
    b.cb(embd, "ple_embd")

    key = gg.reshape_3d(b.linear("ple_key", embd, n * n_embd, "ple_key", il), n_embd, n, n_tokens)
    key, query = _normed(b, key, "ple_norm_key", "ple_key", il), _normed(b, x, "ple_norm_query", "ple_query", il)
    score = gg.scale(gg.sum_rows(gg.mul(key, query)), n_embd**-0.5)  # [1, n_stream, n_tokens]
    root = gg.mul(gg.sgn(score), gg.sqrt(gg.clamp(gg.abs(score), _MIN_SCORE, math.inf)))
    gate = b.cb(gg.reshape_3d(gg.sigmoid(root), n, 1, n_tokens), "ple_gate", il)
    value = gg.reshape_3d(b.linear("ple_value", embd, n_embd, "ple_value", il), n_embd, 1, n_tokens)
    gated = b.cb(gg.out_prod(value, gate), "ple_gated_value", il)  # [n_embd, n_stream, n_tokens]

    normed = gg.reshape_2d(_normed(b, gated, "ple_norm_conv", "ple_normed", il), n * n_embd, n_tokens)
    out = gg.silu(_conv(b, hp, normed, hp.ngrams.size, il))
    out = b.cb(gg.reshape_3d(out, n_embd, n, n_tokens), "ple_conv_out", il)
    return b.cb(gg.add(x, gg.add(gated, out)), "ple_out", il)


def _inp_ngram_rows(b: Build, g: NGrams) -> Tensor:
    """The input with the rows of the table that the tokens choose, one token after the other: I32 ne [rows of a token
    * n_tokens]. When it is filled, the last tokens of each sequence are remembered for the next run."""

    def fill(u: UBatch, memory: Memory) -> Ints:
        slot = slot_of_states(u)
        assert memory.states is not None and memory.states.recent is not None, memory
        recent = memory.states.recent.numpy()  # [cells, g.size - 1]: each token plus 1; 0: no token
        tokens = (np.full(u.n_tokens, g.stand_in, np.int32) if u.token is None else u.token).reshape(u.n_seqs, -1)
        before = recent[slot.read].astype(np.int32) - 1
        recent[slot.write] = np.concatenate((before, tokens), axis=1)[:, 1 - g.size :] + 1
        return ngram_rows(g, before, tokens)

    return b.input("inp_ngram_rows", DType.I32, (len(g.rows) * b.n_tokens,), fill, of_tokens=True)


def ngram_rows(g: NGrams, before: Ints, tokens: Ints) -> Ints:
    """The rows of the table that tokens choose: int32 [n_seqs, n, rows of a token].

    tokens  int32 [n_seqs, n]: the tokens of each sequence
    before  int32 [n_seqs, g.size - 1]: the tokens before them; negative: no token

    The number of an n-gram is the xor of its tokens, each times its multiplier (modulo 2^64). Its row is that number
    modulo the rows of a part of the table. A missing token, and each token before the end of a text, counts as the
    token that ends a text.
    """
    n, known = tokens.shape[1], np.concatenate((before, tokens), axis=1).astype(np.int64)
    of, cut = np.empty(tokens.shape, np.uint64), np.zeros(tokens.shape, np.bool_)
    rows: list[npt.NDArray[np.uint64]] = []
    for back in range(g.size):
        token = known[:, g.size - 1 - back : g.size - 1 - back + n]
        if back:
            cut |= (token < 0) | (token == g.end)
        part = np.where(cut, g.end, token).astype(np.uint64) * np.uint64(g.multipliers[back])
        of = of ^ part if back else part
        for i in range(max(back - 1, 0) * g.each, back * g.each):
            rows.append(of % np.uint64(g.rows[i]) + np.uint64(g.first[i]))
    return np.stack(rows, axis=-1).astype(np.int32)


def _conv(b: Build, hp: Qwen4HParams, cur: Tensor, step: int, il: int) -> Tensor:
    """Convolve `cur`, ne [channels, n_tokens], over time: each token reads itself and earlier tokens, `step` tokens
    apart. The result has the ne of `cur`. The rows that the next tokens need are stored."""
    channels, before, cells = cur.ne[0], hp.n_ngram_before, b.states.p_l[il]
    w = as_f32(b.weight("ple_conv1d", (hp.d_ngram_conv, channels), il))
    w = gg.cont(gg.transpose(w))  # [channels, d_ngram_conv]
    known = gg.reshape_3d(read_state(b, cells, "ple_conv_states", il), channels, before, b.n_seqs)
    window = b.cb(gg.concat(known, by_sequence(b, cur), 1), "ple_conv_input", il)
    nb = window.nb

    def tokens(n: int, first: int) -> Tensor:
        return gg.view_3d(window, channels, n, b.n_seqs, nb[1], nb[2], first * nb[1])

    store_state(b, cells, tokens(before, b.n_seq_tokens), "ple_conv_states_updated", il)
    out = None
    for k in range(hp.d_ngram_conv):
        term = gg.mul(tokens(b.n_seq_tokens, k * step), gg.view_1d(w, channels, k * w.nb[1]))
        out = term if out is None else gg.add(out, term)
    assert out is not None, hp
    return gg.reshape_2d(out, channels, b.n_tokens)


def _read_ngrams(r: Reader) -> dict[str, object]:
    """Read what a file says of n-grams. Raises ModelError."""
    layers: tuple[int, ...] = _array(r, _LAYERS, 0) if r.get(_LAYERS, None) is not None else ()
    if not layers:
        return {"ngram_layer": -1, "n_ngram_embd": 0, "d_ngram_conv": 0}
    layer, *more = layers
    if more:
        r.fail(_LAYERS, f"names {len(layers)} layers; supported is one")
    size, each, kernel = r.integer(_SIZE), r.integer(_HEADS), r.integer(_KERNEL)
    for key, value, least, most in ((_SIZE, size, 2, _MAX_SIZE), (_KERNEL, kernel, 2, _MAX_KERNEL)):
        if not least <= value <= most:
            r.fail(key, f"is {value}, not from {least} to {most}")
    n = (size - 1) * each
    if not 0 < n <= _MAX_ROWS:
        r.fail(_HEADS, f"makes {n} rows of a token, not 1 to {_MAX_ROWS}")
    eos = r.integer(_EOS)
    first, rows = (_array(r, key, n, MAX_INT) for key in (_OFFSETS, _ROWS))
    if min(rows) < 1 or max(map(sum, zip(first, rows, strict=True))) >= MAX_INT:
        r.fail(_ROWS, f"is {rows}: each must be positive, and end below {MAX_INT}")
    multipliers = _array(r, _MULTIPLIERS, size, 1 << 64)
    ngrams = NGrams(size, each, multipliers, first, rows, eos, r.integer(_IMAGE, 0) or eos)
    return {
        "ngrams": ngrams,
        "ngram_layer": layer,
        "n_ngram_embd": r.integer(Keys.LLM.EMBD_LENGTH_PER_LAYER_INP),
        "d_ngram_conv": kernel,
    }


def _blocks(r: Reader, sizes: set[int]) -> dict[str, Any]:
    """The hyperparameters of blocks that the indexer has one key for. Without `sizes`, tokens see all tokens."""
    if not sizes:
        return {"n_chosen": MAX_INT}
    size = sizes.pop()
    if sizes or not 1 < size <= _MAX_BLOCK:
        r.fail(_RATIOS, f"holds {sorted({*sizes, size})}: supported is one number from 2 to {_MAX_BLOCK}, beside 0")
    return {"token_blocks": (TokenBlocks(size, size, 4),), "chosen_blocks": (ChosenBlocks(size, tail=True),)}


def _array(r: Reader, key: str, n: int, end: int = MAX_INT) -> tuple[int, ...]:
    """The first `n` (0: all) whole numbers of an array in the metadata; each must be below `end`."""
    value = r.get(key)
    values = cast("list[object]", value.tolist()) if isinstance(value, np.ndarray) else []
    if len(values) < n or not all(type(v) is int and 0 <= v < end for v in values):
        r.fail(key, f"must hold {n or 'some'} whole numbers below {end}")
    return tuple(cast("list[int]", values[: n or None]))


def _read(r: Reader) -> Qwen4HParams:
    ratios = _array(r, _RATIOS, 0) if r.get(_RATIOS, None) is not None else ()
    own = read_indexer(r) | _blocks(r, {*ratios} - {0})
    llm = Keys.LLM
    if not r.integer(llm.EXPERT_SHARED_FEED_FORWARD_LENGTH, 0):
        own["n_ff_shexp"] = r.integer(llm.FEED_FORWARD_LENGTH)
    if not r.per_layer(llm.EXPERT_FEED_FORWARD_LENGTH, 0):
        own["n_ff_exp"] = r.integer(llm.FEED_FORWARD_LENGTH) // max(r.integer(llm.EXPERT_USED_COUNT), 1)
    recurrent, ngrams, ssm = read_recurrent(r, 4), _read_ngrams(r), read_ssm(r)
    layer = cast("int", ngrams["ngram_layer"])
    if layer >= len(recurrent) or (layer >= 0 and not recurrent[layer]):
        r.fail(_LAYERS, f"names layer {layer}, which is no delta net")
    if ssm.d_inner != ssm.dt_rank * ssm.d_state:
        r.fail(Keys.SSM.INNER_SIZE, f"is {ssm.d_inner}, not {ssm.dt_rank} heads of {ssm.d_state}")
    hp = read_hparams(
        Qwen4HParams,
        r,
        rope_type="imrope",
        rope_sections=read_rope_sections(r),
        ssm=ssm,
        recurrent=recurrent,
        n_stream=read_streams(r),
        n_hc_rank=r.integer(_RANK),
        f_hc_eps=0.0,
        **ngrams,
        **own,
    )
    if hp.n_vocab >= _MAX_VOCAB:
        r.fail(llm.VOCAB_SIZE, f"is {hp.n_vocab}, too many for n-grams")
    return hp


_QWEN4 = Qwen4(rope_factors=False, shared_gate=True, net_gate="sigmoid", biases="none")
ARCHITECTURES = (Architecture(("qwen4exp",), _QWEN4.build, _read, "hybrid"),)
