"""Keys of blocks of consecutive tokens: sums of rows of their tokens, by a softmax for each element, or their means.

The rows that a block still needs are states. A key lies in the cell of the token that ends its block."""

from __future__ import annotations

from typing import NamedTuple

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .blocks import Build, block_ends, build_inp_blocks
from .blocks.states import by_sequence, read_state, store_state
from .hparams import TokenBlocks


class BlockKeys(NamedTuple):
    """`keys`, ne [head, n_blocks], of the blocks that the tokens of a ubatch end, `pos` of each (as `build_inp_pos`),
    `of` the block that each token ends (or any), and `end`, ne [n_kv]: 0 for cells of tokens that end one, else
    -inf."""

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
    """The keys of the blocks that the tokens end. `value`: the rows of the tokens, ne [head, n_tokens], or where blocks
    overlap of two heads, the second for a token's own block and the first for the one after it. `gate`: the weights of
    which `cur`, ne [n_embd, n_tokens], gives the scores that a softmax is of, and of what is added to them by the place
    in a block; None: all tokens count the same. What the next blocks need is stored in `cells`."""
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

        def of_block(i: int) -> Tensor:  # where blocks overlap, i = 1 is the block itself, and reads the second halves
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
