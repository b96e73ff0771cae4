"""What goes into a graph: tokens or embeddings, positions, masks, and which rows come out."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.tensor import Tensor

from ..hparams import ChosenBlocks, HParams, NGrams, TokenBlocks
from ..memory.kv_cells import Floats, Ints
from .build import Build
from .norm import build_norm

MASK_PADDING = 32  # rows of the mask are padded to a multiple


def token_embd(b: Build) -> Tensor:
    """The embeddings of all tokens: ne [n_embd, n_vocab]."""
    return b.weight("token_embd", (b.hparams.n_embd, b.hparams.n_vocab))


def build_inp_embd(b: Build) -> Tensor:
    """The embeddings of the tokens, or those that are given, scaled where the model asks for it: ne
    [n_embd, n_tokens]. Of a head: what it makes of those of tokens and of the hidden states of the tokens before them,
    which are given in the place of embeddings (DeepSeek-V3, arXiv 2412.19437, 2.2)."""
    if b.hparams.is_head:
        return _build_inp_head(b)
    if b.embd:
        cur = b.input("inp_embd", DType.F32, b.hparams.n_embd, b.n_tokens)
    else:
        w, tokens = token_embd(b), b.input("inp_tokens", DType.I32, b.n_tokens)
        cur = b.cb(b.adapters.rows(gg.get_rows(w, tokens), w.name, tokens), "inp_embd")
    scale = b.hparams.f_embedding_scale
    return b.cb(gg.scale(cur, scale), "inp_scaled") if scale else cur


def _build_inp_head(b: Build) -> Tensor:
    hidden = b.input("inp_embd", DType.F32, b.hparams.n_embd, b.n_tokens)
    embd = b.cb(gg.get_rows(token_embd(b), b.input("inp_tokens", DType.I32, b.n_tokens)), "mtp_tok_embd")
    embd = build_norm(b, embd, "nextn.enorm", "mtp_enorm", 0)
    hidden = build_norm(b, hidden, "nextn.hnorm", "mtp_hnorm", 0)
    return b.linear("nextn.eh_proj", gg.concat(embd, hidden, 0), b.hparams.n_embd, "mtp_eh_proj", 0)


def build_inp_per_layer(b: Build, inpL: Tensor, n: int) -> Tensor:
    """What the layers read of each token beside the stream, `n` elements each: an embedding of the token's own for each
    layer, and a product of its embedding `inpL`, ne [n_embd, n_tokens], normed; their sum over the root of 2: ne
    [n, n_layer, n_tokens]. Embeddings that are given are no token's: of those the first one's are taken."""
    hp = b.hparams
    size = n * hp.n_layer
    w = b.weight("per_layer_token_embd", (size, hp.n_vocab))
    if b.embd:
        own = gg.reshape_3d(gg.cast(gg.view_1d(w, size, 0), DType.F32), n, hp.n_layer, 1)
    else:
        tokens = b.input("inp_tokens", DType.I32, b.n_tokens)
        own = gg.reshape_3d(b.adapters.rows(gg.get_rows(w, tokens), w.name, tokens), n, hp.n_layer, b.n_tokens)
    own = b.cb(gg.scale(own, math.sqrt(n)), "inp_per_layer_selected")
    cur = gg.scale(b.linear("per_layer_model_proj", inpL, size, "per_layer_model_proj"), 1.0 / math.sqrt(hp.n_embd))
    cur = build_norm(b, gg.reshape_3d(cur, n, hp.n_layer, b.n_tokens), "per_layer_proj_norm", "per_layer_proj")
    return b.cb(gg.scale(gg.add(cur, own), math.sqrt(0.5)), "inp_per_layer")


def per_layer_rows(per_layer: Tensor, il: int) -> Tensor:
    """Of what `build_inp_per_layer` gives that of layer `il`: ne [n, n_tokens]."""
    return gg.view_2d(per_layer, per_layer.ne[0], per_layer.ne[2], per_layer.nb[2], il * per_layer.nb[1])


def build_inp_pos(b: Build) -> Tensor:
    """Positions of the tokens: I32 ne [n_tokens], or four times as many (first those of time, then of height ...)."""
    return b.input("inp_pos", DType.I32, b.n_tokens * b.hparams.n_pos_per_embd)


def build_pos_embd(b: Build, cur: Tensor, *, optional: bool = False) -> Tensor:
    """`cur`, ne [n_embd, n_tokens], plus the embeddings of the positions; `optional`: where the model has them."""
    ne = (cur.ne[0], b.hparams.n_ctx_train)
    embd = b.optional("position_embd", ne) if optional else b.weight("position_embd", ne)
    if embd is None:
        return cur
    return b.cb(gg.add(cur, b.cb(gg.get_rows(embd, build_inp_pos(b)), "pos_embd")), "inpL")


def build_inp_attn_scale(b: Build) -> Tensor:
    """What Q of each token is multiplied with for its position: ne [1, 1, n_tokens], see `attn_temp_scale`."""
    return b.input("inp_attn_scale", DType.F32, 1, 1, b.n_tokens)


def attn_temp_scale(hp: HParams, pos: Ints) -> Floats:
    """1 + f_attn_temp_scale * log(1 + (pos + f_attn_temp_offset) / n_attn_temp_floor_scale, rounded down), float32
    (Llama 4's temperature tuning: attention stays sharp in long texts)."""
    chunk = np.floor((pos + np.float64(hp.f_attn_temp_offset)) / hp.n_attn_temp_floor_scale)
    return (1.0 + hp.f_attn_temp_scale * np.log1p(chunk)).astype(np.float32)


def build_inp_kq_mask(b: Build, il: int, *, cross: bool = False) -> Tensor:
    """The attention mask of layer `il`, or of what the encoder gave (`cross`): ne [n_kv, n_tokens padded], F32 (F16 for
    flash attention).

    Rows lie as far apart as the cache has cells, so that they stay where they are when n_kv grows.
    """
    kv, n_kv, _, name = b.cross if cross else b.use(il)
    if name not in b.masks:
        mask = b.input(name, DType.F32, n_kv, -(-b.n_tokens // MASK_PADDING) * MASK_PADDING)
        row = 4 * kv.size
        mask.nb = (4, row, row * mask.ne[1], row * mask.ne[1])
        b.masks[name] = b.cb(gg.cast(mask, DType.F16), f"{name} (copy)") if kv.flash_attn else mask
    return b.masks[name]


def build_rel_bias(b: Build, role: str, il: int) -> Tensor:
    """What is added to the scores of layer `il` by the distances of tokens: ne [n_kv, n_tokens, n_head], of the layer's
    own weight of that role, ne [n_head, n_rel_attn_bkts], or the first layer's."""
    ne = (b.hparams.layer(il).n_head, b.hparams.n_rel_attn_bkts)
    own = b.optional(role, ne, il) if il else b.weight(role, ne, 0)
    name = f"pos_bias-{il if own is not None else 0}"
    if name not in b.masks:
        n_kv = b.use(il).n_kv
        bucket = b.input("inp_pos_bucket", DType.I32, n_kv * b.n_tokens)
        rows = gg.get_rows(b.weight(role, ne, 0) if own is None else own, bucket)
        bias = gg.permute(gg.reshape_3d(rows, ne[0], n_kv, b.n_tokens), 2, 0, 1, 3)
        b.masks[name] = b.cb(gg.dup(bias), name)  # not cont, which notes its ne: one graph could not serve several n_kv
    return b.masks[name]


def relative_buckets(hp: HParams, cells: Ints, pos: Ints, causal: bool) -> Ints:
    """int32 [n_tokens, n_kv]: the bucket of the distance of each of the `cells`, int32 [n_kv] positions, to each of the
    tokens at `pos` (T5's `_relative_position_bucket`; arXiv 1910.10683).

    Where tokens see those after them (not `causal`) these have the second half of the buckets. The first half of the
    rest holds one distance each, the other ever larger ranges, by the logarithm, up to `n_rel_attn_max_distance`.
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


def block_input_sizes(t: TokenBlocks, n_tokens: int, n_seqs: int, n_kv: int) -> dict[str, tuple[DType, int]]:
    """What the graph of a ubatch takes of the blocks that its tokens end, by name: type and elements. See
    `block_inputs`."""
    n = block_ends(t, n_tokens, n_seqs)
    return {
        f"inp_block_rows_{t.size}": (DType.I32, n * t.n_read),
        f"inp_block_mask_{t.size}": (DType.F32, n * t.n_read),
        f"inp_block_pos_{t.size}": (DType.I32, n * t.n_pos),
        f"inp_block_of_{t.size}": (DType.I32, n_tokens),
        f"inp_block_at_{t.size}": (DType.I32, n_tokens),
        f"inp_block_end_{t.size}": (DType.F32, n_kv),
    }


def block_ends(t: TokenBlocks, n_tokens: int, n_seqs: int) -> int:
    """How many blocks at most the tokens of `n_seqs` sequences, equally many of each, end."""
    return n_seqs * (n_tokens // n_seqs // t.size + 1)


def build_inp_blocks(b: Build, t: TokenBlocks) -> tuple[Tensor, ...]:
    """Of the blocks that the ubatch's tokens end: rows, mask, pos, of, at and end, see `block_inputs`."""
    sizes = block_input_sizes(t, b.n_tokens, b.n_seqs, b.n_kv[0])
    return tuple(b.input(name, dtype, n) for name, (dtype, n) in sizes.items())


def block_inputs(t: TokenBlocks, pos: Ints, cells: Ints) -> tuple[Ints | Floats, ...]:
    """Of the tokens at `pos`, int32 [n_seqs, n], and the positions of the cells, int32 [n_kv]:

    rows  [blocks, n_read]: the tokens that each block which they end is made of, where those of a sequence lie one
          after the other, with n_read - 1 that were before first. Of each sequence as many blocks as there may be
    mask  [blocks, n_read]: -inf for those before the first token of all, else 0
    pos   [n_pos, blocks]: the first position of each; of four the last is 0
    of    [n_seqs, n]: the block that a token ends, or any
    at    [n_seqs, n]: where in its block a token stands
    end   [n_kv]: 0 for the cells of tokens that end a block, else -inf
    """
    n_seqs, n = pos.shape
    n_blocks, begin = n // t.size + 1, pos[:, :1]
    seq, step = np.arange(n_seqs, dtype=np.int32)[:, None], np.arange(n, dtype=np.int32)
    last: Ints = t.size * np.arange(1, n_blocks + 1, dtype=np.int32) - 1 - begin % t.size  # [n_seqs, n_blocks]
    ends = last < n
    read: Ints = np.where(ends, last, 0)[..., None] + np.arange(t.n_read, dtype=np.int32)
    before = (begin[..., None] + read < t.n_read - 1) & ends[..., None]
    return (
        read + (seq * (n + t.n_read - 1))[..., None],
        np.where(before, np.float32(-np.inf), np.float32(0)),
        np.where((np.arange(t.n_pos) < 3)[:, None], np.where(ends, begin + last - (t.size - 1), 0).reshape(-1), 0),
        np.minimum((step + begin % t.size) // t.size, n_blocks - 1) + seq * n_blocks,
        pos % t.size,
        np.where((cells + 1) % t.size == 0, np.float32(0), np.float32(-np.inf)),
    )


def chosen_block_sizes(t: ChosenBlocks, n_tokens: int, n_kv: int) -> dict[str, tuple[DType, int]]:
    """What the graph of a ubatch takes of blocks that are chosen as a whole, by name: type and elements. See
    `chosen_block_inputs`."""
    return {
        f"inp_cell_blocks_{t.size}": (DType.I32, n_kv),
        f"inp_own_blocks_{t.size}": (DType.I32, n_tokens * t.n_own),
    }


def build_inp_chosen_blocks(b: Build, t: ChosenBlocks) -> tuple[Tensor, Tensor]:
    """The blocks of the first n_kv cells, ne [n_kv], and those that each token sees in any case, ne
    [n_own, n_tokens]."""
    cells, own = chosen_block_sizes(t, b.n_tokens, b.n_kv[0])
    return b.input(cells, DType.I32, b.n_kv[0]), b.input(own, DType.I32, t.n_own, b.n_tokens)


def chosen_block_inputs(t: ChosenBlocks, pos: Ints, cells: Ints) -> tuple[Ints, Ints]:
    """int32 [n_kv]: the numbers, below n_kv, of the blocks that cells at positions `cells`, int32 [n_kv], belong to (0
    for those that are empty); int32 [n_tokens, n_own]: of those that tokens at `pos` see in any case (negative:
    none)."""
    of: Ints = np.maximum(cells, 0) // t.size
    own: Ints = pos[:, None] // t.size - np.arange(t.n_own, dtype=np.int32)
    if of.max() >= len(of):  # positions that go far beyond the cells: their blocks are counted
        known = np.unique(of)
        of = np.searchsorted(known, of).astype(np.int32)
        at = np.minimum(np.searchsorted(known, own), len(known) - 1)
        own = np.where(known[at] == own, at, -1).astype(np.int32)
    if t.tail:
        own = np.where((pos[:, None] + 1) % t.size == 0, np.int32(-1), own)
    return of, own


def build_inp_ngrams(b: Build) -> Tensor:
    """The rows of a table that the tokens choose, one token after the other: I32 ne [rows of each * n_tokens]."""
    g = b.hparams.ngrams
    assert g is not None, b.hparams
    return b.input("inp_ngram_rows", DType.I32, len(g.rows) * b.n_tokens)


def ngram_rows(g: NGrams, before: Ints, tokens: Ints) -> Ints:
    """int32 [n_seqs, n, rows of each]: the rows that the `tokens`, int32 [n_seqs, n], of each sequence choose after
    those `before`, int32 [n_seqs, g.size - 1] (negative: none).

    An n-gram's number is the xor of its tokens times their multipliers (modulo 2^64); its row that number modulo the
    rows of a part of the table. What is missing, and all before the end of a text, counts as that end.
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


def build_inp_out_ids(b: Build) -> Tensor:
    """The rows of which logits are wanted: I32 ne [n_outputs]."""
    return b.input("inp_out_ids", DType.I32, b.n_outputs)
