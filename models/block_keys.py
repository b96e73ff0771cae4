"""Keys of blocks of consecutive tokens. The key of a block is made of one row for each of its tokens: a sum weighted by
a softmax (a softmax for each element), or the mean.

Rows of a block that is not full yet are kept as states. A key lies in the cell of the token that ends its block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import BatchError
from pyggml.tensor import Tensor
from pyggml.types import Floats, Ints

from .blocks import Build
from .blocks.states import by_sequence, read_state, slot_of_states, store_state
from .memory.memory import Memory
from .memory.recurrent import NOTHING
from .ubatch import UBatch


class TokenBlocks(NamedTuple):
    """Blocks of `size` consecutive tokens that attention sees through one key each. A block begins at a multiple of
    `size`. Its key is made of the last `n_read` tokens up to its end: more than `size` when blocks overlap."""

    size: int
    n_read: int
    n_pos: int = 1  # positions of the first token


def block_ends(t: TokenBlocks, n_tokens: int, n_seqs: int) -> int:
    """The largest number of blocks that `n_tokens` tokens of `n_seqs` sequences, equally many of each, can end."""
    return n_seqs * (n_tokens // n_seqs // t.size + 1)


def build_inp_blocks(b: Build, t: TokenBlocks) -> tuple[Tensor, ...]:
    """The inputs that describe the blocks which end in the ubatch: rows, mask, pos, of, at and end, see
    `block_inputs`."""
    n = block_ends(t, b.n_tokens, b.n_seqs)
    leafs = {
        f"inp_block_rows_{t.size}": (DType.I32, (n * t.n_read,)),
        f"inp_block_mask_{t.size}": (DType.F32, (n * t.n_read,)),
        f"inp_block_pos_{t.size}": (DType.I32, (n * t.n_pos,)),
        f"inp_block_of_{t.size}": (DType.I32, (b.n_tokens,)),
        f"inp_block_at_{t.size}": (DType.I32, (b.n_tokens,)),
        f"inp_block_end_{t.size}": (DType.F32, (b.n_kv[0],)),
    }

    def fill(u: UBatch, memory: Memory) -> tuple[Ints | Floats, ...]:
        pos = u.pos.reshape(u.n_seqs, -1)
        if pos[slot_of_states(u).read == NOTHING, 0].any():
            raise BatchError("a sequence must begin at position 0: this model counts blocks of tokens from there")
        return block_inputs(t, pos, memory.caches[0].seen_pos(u.pos))

    return b.input_group(leafs, fill)


def block_inputs(t: TokenBlocks, pos: Ints, cells: Ints) -> tuple[Ints | Floats, ...]:
    """The values of the inputs that describe the blocks which end in a ubatch. `pos`, int32 [n_seqs, n], are the
    positions of its tokens, `cells`, int32 [n_kv], those of the cells. Each sequence has room for as many blocks as can
    end in n tokens.

    rows  [blocks, n_read]: which rows each block reads. The rows of a sequence lie one after the other: n_read - 1 rows
          of earlier tokens, then those of the ubatch
    mask  [blocks, n_read]: -inf for rows before the first token of the sequence, 0 for others
    pos   [n_pos, blocks]: the position of the first token of each block; when n_pos is 4, the last of the four is 0
    of    [n_seqs, n]: the block that a token ends; any block when it ends none
    at    [n_seqs, n]: the place of a token in its block
    end   [n_kv]: 0 for cells of tokens that end a block, -inf for others
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


class BlockKeys(NamedTuple):
    """The keys of the blocks that the tokens of a ubatch end.

    keys  ne [head, n_blocks]
    pos   the position of each block (as `build_inp_pos`)
    of    the block that each token ends, or any block when the token ends none
    end   ne [n_kv]: 0 for cells of tokens that end a block, else -inf
    """

    keys: Tensor
    pos: Tensor
    of: Tensor
    end: Tensor

    def of_tokens(self, keys: Tensor) -> Tensor:
        """What is stored of each token: ne [head, n_tokens]."""
        return gg.get_rows(gg.reshape_2d(keys, keys.ne[0], keys.n_elements // keys.ne[0]), self.of)


def build_block_keys(
    b: Build,
    t: TokenBlocks,
    head: int,
    value: Tensor,
    gate: tuple[str, str] | None,
    cur: Tensor,
    cells: Tensor,
    name: str,
    il: int,
) -> BlockKeys:
    """The keys of the blocks that the tokens end. What the next blocks need is stored in `cells`.

    value  the rows that keys are sums of: ne [head, n_tokens]. When blocks overlap, [2 * head, n_tokens]: the second
           half of a row is for the token's own block, the first half for the block after it
    gate   the roles of two weights. The first gives each token a score, as a product with `cur`, ne [n_embd, n_tokens];
           the second is added to the scores by the token's place in its block. Rows are summed by a softmax of the
           scores. None: all tokens count the same
    """
    rows, mask, pos, of, at, end = build_inp_blocks(b, t)
    n, before = value.ne[0], t.n_read - 1
    n_blocks = block_ends(t, b.n_tokens, b.n_seqs)
    if gate is not None:
        score = b.linear(gate[0], cur, n, f"{name}_score", il)
        score = gg.add(score, gg.get_rows(b.weight(gate[1], (n, t.size), il), at))
        value = gg.concat(value, score, 0)
    row = value.ne[0]
    known = gg.reshape_3d(read_state(b, cells, f"{name}_states", il), row, before, b.n_seqs)
    window = b.cb(gg.concat(known, by_sequence(b, value), 1), f"{name}_rows", il)
    nb = window.nb
    last = gg.view_3d(window, row, before, b.n_seqs, nb[1], nb[2], b.n_seq_tokens * nb[1])
    store_state(b, cells, last, f"{name}_states_updated", il)
    window = gg.reshape_2d(window, row, window.ne[1] * b.n_seqs)
    read = gg.reshape_3d(gg.get_rows(window, rows), row, t.n_read, n_blocks)

    def part(first: int) -> Tensor:  # ne [n_read, head, n_blocks]
        size, row_size = read.nb[0], read.nb[1]

        def of_block(i: int) -> Tensor:  # when blocks overlap, i = 1 is the block itself, and reads the second halves
            at = i * t.size * row_size + (first + i * head) * size
            return gg.view_3d(read, head, t.size, n_blocks, row_size, read.nb[2], at)

        both = of_block(0) if t.n_read == t.size else gg.concat(of_block(0), of_block(1), 1)
        return gg.cont(gg.permute(both, 1, 0, 2, 3))

    if gate is None:
        keys = gg.mean(part(0))
    else:
        weights = gg.soft_max(gg.add(part(n), gg.reshape_3d(mask, t.n_read, 1, n_blocks)))
        keys = gg.sum_rows(gg.mul(part(0), weights))
    return BlockKeys(b.cb(gg.reshape_2d(keys, head, n_blocks), f"{name}_pooled", il), pos, of, end)
