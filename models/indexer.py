"""Indexers: small heads beside those of attention, which choose the tokens that a token attends to (DeepSeek-V3.2,
arXiv 2512.02556).

For the indexer each token has one key, in the same cell of the cache as its K, and a query with several heads. The
score of another token is a sum over the heads: the product of query and key, when it is positive, times the weight of
the head. A token attends to the tokens with the highest scores.

When a context has no more cells than tokens are chosen, a token sees all others, and no scores are needed. The keys are
stored all the same, so that a saved state can go on in a larger context."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor
from pyggml.types import Ints

from .block_keys import TokenBlocks
from .blocks import Build, build_inp_kq_mask, build_norm, cells_of_k, rope, rotate, store_k
from .hparams import MAX_INT, HParams, LayerShape, RopeShape, RopeType
from .memory.memory import Memory
from .metadata import Reader
from .ubatch import UBatch

_TYPES = "{arch}.attention.indexer.types"
_CHOSEN = "kq_mask_chosen"
INDEX_EPS = 1e-6  # the epsilon of the norm of keys, which files do not say


class ChosenBlocks(NamedTuple):
    """Blocks of `size` consecutive tokens that an indexer chooses as a whole. A block begins at a multiple of `size`.
    In any case a token sees the last `n_own` blocks, up to its own. With `tail` (n_own is 1) it sees its own block in
    any case only until that is full, and `n_chosen` counts tokens: at least one block of them."""

    size: int
    n_own: int = 1
    tail: bool = False


@dataclass(frozen=True, kw_only=True)
class Indexer(HParams):
    """Hyperparameters of models with indexers. Layer index_layer(il) of the cache has the keys of layer il's indexer.

    n_indexer_head    heads of an indexer; 0: there are no indexers
    n_indexer_embd    elements of each head; 0: there are no indexers
    n_chosen          how many tokens, or blocks of tokens, an indexer chooses
    indexers          1 for each layer with an indexer of its own; other layers attend to the tokens that the last
                      indexer before them has chosen. Empty: all layers have an indexer
    index_rope_first  elements of a head before the roped ones
    index_rope_type   which elements of a head turn together; None: as in attention
    f_index_norm_eps  epsilon of the norm of the keys; 0: as in the model's other norms
    token_blocks      the sizes of blocks of consecutive tokens that have one key each, over all layers
    chosen_blocks     the blocks that are chosen as a whole; empty: tokens are chosen one by one
    """

    n_indexer_head: int
    n_indexer_embd: int
    n_chosen: int
    indexers: tuple[int, ...] = ()
    index_rope_first: int = 0
    index_rope_type: RopeType | None = None
    f_index_norm_eps: float = 0.0
    token_blocks: tuple[TokenBlocks, ...] = ()
    chosen_blocks: tuple[ChosenBlocks, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.n_chosen < 2 * MAX_INT:
            raise ModelError(f"an indexer chooses {self.n_chosen}: it must choose something")
        if self.indexers and len(self.indexers) < self.n_layer:
            raise ModelError(f"indexers are told of {len(self.indexers)} layers; there are {self.n_layer}")
        for t in self.chosen_blocks:
            if t.tail and self.n_chosen < t.size:  # a token that fills its block would see nothing
                raise ModelError(f"an indexer chooses {self.n_chosen} tokens: less than one block of {t.size}")
        for il in self.index_layers:
            r = self.rope(il)
            if r is not None and not 0 <= r.first <= self.n_indexer_embd - r.n_rot:
                raise ModelError(f"heads of {self.n_indexer_embd} of the indexer have no {r.n_rot} elements to rope")

    @property
    def fixed_positions(self) -> str:
        if self.token_blocks:
            return "blocks of tokens begin at multiples of their size"
        return super().fixed_positions

    def has_indexer(self, il: int) -> bool:
        """Whether layer `il` has an indexer of its own."""
        if not self.n_indexer_head or not self.n_indexer_embd:
            return False
        return self.has_kv(il) and not self.is_swa(il) and (not self.indexers or bool(self.indexers[il]))

    @property
    def index_from(self) -> int:
        """The first layer of the cache that may be an indexer's."""
        return self.n_layer

    def index_layer(self, il: int) -> int:
        """The layer of the cache with the keys of the indexer of layer `il`."""
        return self.index_from + il

    @property
    def index_layers(self) -> Iterable[int]:
        return map(self.index_layer, filter(self.has_indexer, range(self.n_layer)))

    @property
    def cache_layers(self) -> Iterable[int]:
        return (*super().cache_layers, *self.index_layers)

    def has_kv(self, il: int) -> bool:
        return il >= self.index_from or super().has_kv(il)

    def is_swa(self, il: int) -> bool:
        return il < self.index_from and super().is_swa(il)

    def layer(self, il: int) -> LayerShape:
        if il < self.index_from:
            return super().layer(il)
        n = self.n_indexer_embd
        return super().layer(0)._replace(n_head=1, n_head_kv=1, n_embd_head_k=n, n_embd_head_v=0, n_embd_q=n,
                                         n_embd_k_gqa=n, n_embd_v_gqa=0, n_embd_out=0)  # fmt: skip

    def rope(self, il: int) -> RopeShape | None:
        if il < self.index_from:
            return super().rope(il)
        shape = self.rope(il - self.index_from)
        return shape and shape._replace(first=self.index_rope_first, type=self.index_rope_type)


def read_indexer(r: Reader, *, optional: bool = False) -> dict[str, Any]:
    """What a file says of the indexer. `optional`: the file may say nothing."""
    keys = Keys.Attention.Indexer
    if optional and not r.integer(keys.TOP_K, 0):
        return {"n_indexer_head": 0, "n_indexer_embd": 0, "n_chosen": MAX_INT}
    return {
        "n_indexer_head": r.integer(keys.HEAD_COUNT),
        "n_indexer_embd": r.integer(keys.KEY_LENGTH),
        "n_chosen": r.integer(keys.TOP_K),
        "indexers": r.flags(_TYPES) if r.get(_TYPES, None) is not None else (),
    }


def must_choose(b: Build, hp: Indexer, il: int, size: int = 1) -> bool:
    """Whether the cache of layer `il` has more cells than are chosen, so that indexers must choose. `size`: tokens of a
    block, when blocks are chosen."""
    return b.use(il).kv.size > hp.n_chosen * size


def build_chosen_mask(b: Build, hp: Indexer, cur: Tensor, q_row: Tensor, pos: Tensor, il: int) -> Tensor:
    """The mask of layer `il`, as from `build_inp_kq_mask`, in which only the tokens are visible that the layer's
    indexer chooses. `cur`, ne [n_embd, n_tokens], is the input of attention; `q_row`, ne [n_lora_q, n_tokens], is the
    row that its Q is a product of."""
    mask = build_inp_kq_mask(b, il)
    if not hp.n_indexer_head or hp.is_swa(il):
        return mask
    choose = must_choose(b, hp, il)
    if not hp.has_indexer(il):
        return chosen_before(b, il) if choose else mask
    k = index_key(b, hp, cur, il, required=choose)
    if k is None:
        return mask
    store_index(b, hp, gg.reshape_3d(k, hp.n_indexer_embd, 1, b.n_tokens), pos, il)
    score = index_scores_of_row(b, hp, cur, q_row, pos, il, required=choose)
    if not choose or score is None:
        return mask
    b.masks[_CHOSEN] = b.cb(gg.top_k_mask(score, mask, hp.n_chosen), _CHOSEN, il)
    return b.masks[_CHOSEN]


def index_key(b: Build, hp: Indexer, cur: Tensor, il: int, *, required: bool) -> Tensor | None:
    """The keys of the tokens, ne [n_indexer_embd, n_tokens], before they are roped; None when a file lacks their
    weights, unless they are `required`."""
    ask, head = b.weight if required else b.optional, hp.n_indexer_embd
    there = [ask("indexer.attn_k", (hp.n_embd, head), il), ask("indexer.k_norm", (head,), il)]
    b.optional("indexer.k_norm", (head,), il, "bias")
    if None in there:
        return None
    k = b.linear("indexer.attn_k", cur, head, "indexer_k", il)
    return build_norm(b, k, "indexer.k_norm", "indexer_k", il, "layer", eps=hp.f_index_norm_eps)


def index_scores_of_row(
    b: Build, hp: Indexer, cur: Tensor, q_row: Tensor, pos: Tensor, il: int, *, required: bool
) -> Tensor | None:
    """As `index_scores`, when queries are a product of `q_row`, ne [n_lora_q, n_tokens], and the weights of heads a
    product of `cur`. None when scores are not `required`."""
    ask, head, n_head = b.weight if required else b.optional, hp.n_indexer_embd, hp.n_indexer_head
    ask("indexer.attn_q_b", (q_row.ne[0], n_head * head), il)
    ask("indexer.proj", (hp.n_embd, n_head), il)
    if not required:
        return None
    q = gg.reshape_3d(b.linear("indexer.attn_q_b", q_row, n_head * head, "indexer_q", il), head, n_head, b.n_tokens)
    w = gg.scale(b.linear("indexer.proj", cur, n_head, "indexer_weights", il), 1.0 / math.sqrt(head * n_head))
    return index_scores(b, hp, index_rope(b, hp, q, pos, "indexer_q", il), w, il)


def chosen_before(b: Build, il: int) -> Tensor:
    """The mask that the last indexer before layer `il` made. Raises ModelError when there is none."""
    if _CHOSEN not in b.masks:
        raise ModelError(f"layer {il} has no indexer, and none before it has")
    return b.masks[_CHOSEN]


def build_inp_chosen_blocks(b: Build, t: ChosenBlocks) -> tuple[Tensor, ...]:
    """The blocks of the first n_kv cells, ne [n_kv], and those that each token sees in any case, ne
    [n_own, n_tokens]."""
    leafs = {
        f"inp_cell_blocks_{t.size}": (DType.I32, (b.n_kv[0],)),
        f"inp_own_blocks_{t.size}": (DType.I32, (t.n_own, b.n_tokens)),
    }

    def fill(u: UBatch, memory: Memory) -> tuple[Ints, Ints]:
        return chosen_block_inputs(t, u.pos, memory.caches[0].seen_pos(u.pos))

    return b.input_group(leafs, fill)


def chosen_block_inputs(t: ChosenBlocks, pos: Ints, cells: Ints) -> tuple[Ints, Ints]:
    """The numbers of blocks, which are below n_kv. `cells`, int32 [n_kv], are the positions of the cells, `pos` those
    of the tokens. Returns the block of each cell, int32 [n_kv] (0 for an empty cell), and the blocks that each token
    sees in any case, int32 [n_tokens, n_own] (negative: no block)."""
    of: Ints = np.maximum(cells, 0) // t.size
    own: Ints = pos[:, None] // t.size - np.arange(t.n_own, dtype=np.int32)
    if of.max() >= len(of):  # positions go far beyond the number of cells: number the blocks that are there
        known = np.unique(of)
        of = np.searchsorted(known, of).astype(np.int32)
        at = np.minimum(np.searchsorted(known, own), len(known) - 1)
        own = np.where(known[at] == own, at, -1).astype(np.int32)
    if t.tail:
        own = np.where((pos[:, None] + 1) % t.size == 0, np.int32(-1), own)
    return of, own


def build_chosen_blocks(b: Build, hp: Indexer, score: Tensor, end: Tensor, il: int) -> Tensor:
    """The mask of layer `il`: a token sees the blocks that the indexer chooses, and its own block as long as that is
    not full. `score`, ne [n_kv, n_tokens], has a block's score in its last cell; `end`, ne [n_kv], is 0 in those cells
    and -inf in others."""
    t = hp.chosen_blocks[0]
    of, own = build_inp_chosen_blocks(b, t)
    mask = gg.top_k_mask(gg.add(score, end), build_inp_kq_mask(b, il), hp.n_chosen // t.size, of, own)
    b.masks[_CHOSEN] = b.cb(mask, _CHOSEN, il)
    return mask


def index_rope(b: Build, hp: Indexer, cur: Tensor, pos: Tensor, name: str, il: int) -> Tensor:
    """Rope `cur`, ne [n_indexer_embd, n, n_tokens]: queries or keys of the indexer of layer `il`."""
    shape = hp.rope(hp.index_layer(il))
    return cur if shape is None else b.cb(rope_from(hp, shape, cur, pos), name, il)


def rope_from(hp: HParams, shape: RopeShape, cur: Tensor, pos: Tensor, *, back: bool = False) -> Tensor:
    """Rope n_rot elements of each head of `cur`, ne [n, n_head, n_tokens], from element `shape.first` on. `back` undoes
    it."""
    first, nb = shape.first, cur.nb
    if not first:
        return rope(hp, shape, cur, pos, None, shape.attn_factor, back=back)
    rest = gg.view_3d(cur, cur.ne[0] - first, *cur.ne[1:3], *nb[1:3], first * nb[0])
    rest = rope(hp, shape, rest, pos, None, shape.attn_factor, back=back)
    return gg.concat(gg.view_3d(cur, first, *cur.ne[1:3], *nb[1:3], 0), rest, 0)


def store_index(b: Build, hp: Indexer, k: Tensor, pos: Tensor, il: int) -> None:
    """Rope the keys `k` of the indexer of layer `il`, ne [n_indexer_embd, 1, n_tokens], and put them into the cache."""
    store_index_as_is(b, hp, index_rope(b, hp, k, pos, "indexer_k", il), il)


def store_index_as_is(b: Build, hp: Indexer, k: Tensor, il: int) -> None:
    """As `store_index`, for keys that are roped already."""
    layer = hp.index_layer(il)
    store_k(b, rotate(k, b.use(layer).kv.rotation_k(layer)), layer)


def index_keys(b: Build, hp: Indexer, il: int) -> Tensor:
    """The keys of the indexer of layer `il` in the first n_kv cells: ne [n_indexer_embd, n_kv]."""
    return cells_of_k(b, hp.index_layer(il))


def index_rotated(b: Build, hp: Indexer, q: Tensor, il: int) -> Tensor:
    """Queries, rotated in the same way as the keys in the cache."""
    layer = hp.index_layer(il)
    return rotate(q, b.use(layer).kv.rotation_k(layer))


def index_projections(
    b: Build, hp: Indexer, cur: Tensor, il: int, *, required: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Queries, ne [n_indexer_embd, n_indexer_head, n_tokens], and keys, ne [n_indexer_embd, n_tokens], when both are
    products of `cur`, the input of attention; they are not normed yet. None when a file lacks their weights, unless
    they are `required`."""
    ask, head, n_head = b.weight if required else b.optional, hp.n_indexer_embd, hp.n_indexer_head
    roles = {"q_proj": (hp.n_embd, n_head * head), "k_proj": (hp.n_embd, head), "q_norm": (head,), "k_norm": (head,)}
    if None in [ask(f"indexer.{role}", ne, il) for role, ne in roles.items()]:
        return None, None
    q = b.linear("indexer.q_proj", cur, n_head * head, "indexer_q", il)
    return gg.reshape_3d(q, head, n_head, b.n_tokens), b.linear("indexer.k_proj", cur, head, "indexer_k", il)


def index_scores(b: Build, hp: Indexer, q: Tensor, w: Tensor | None, il: int) -> Tensor:
    """The score of each of the first n_kv cells for each token: ne [n_kv, n_tokens]. `q`: ne [n_indexer_embd,
    n_indexer_head, n_tokens]; `w`, the weights of the heads: ne [n_indexer_head, n_tokens]."""
    q = index_rotated(b, hp, q, il)
    return b.cb(gg.lightning_indexer(q, index_keys(b, hp, il), w), "indexer_score", il)
