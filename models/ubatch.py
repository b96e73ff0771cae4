"""The tokens that a graph computes at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyggml.types import Floats, Ints

from .memory.kv_cells import SeqSets
from .memory.recurrent import StateSlot


@dataclass(slots=True)
class UMedia:
    """What a ubatch has of pictures and sounds, besides its tokens. A part that no token needs is None.

    rows        float32 [n_tokens, n_embd]: the embeddings of the tokens in `given`; other rows are not read
    given       bool [n_tokens]: tokens whose embeddings are given; `token` is 0 there
    deepstack   float32 [n_levels, n_tokens, n_embd]: added to what the first layers give (0 for tokens of text)
    group       int32 [n_tokens]: tokens of the same group see each other, whichever comes first; -1: of no group
    turns       int32 [3, n_tokens]: positions for the rope in time, height and width, when they are not `pos`
    drift       int32 [n_tokens]: what the cells keep of these, see `KVCells.drift`
    """

    rows: Floats | None = None
    given: npt.NDArray[np.bool_] | None = None
    deepstack: Floats | None = None
    group: Ints | None = None
    turns: Ints | None = None
    drift: Ints | None = None


@dataclass(slots=True)
class UBatch:
    """Tokens that are computed together.

    equal_seqs    True when `n_seqs` sequences have `n_seq_tokens` tokens each, one sequence after the other. False when
                  every token counts as a sequence of its own: then n_seqs is n_tokens, and n_seq_tokens is 1
    token         int32 [n_tokens]; None when the batch has embeddings only
    embd          float32 [n_tokens, n_embd]; None when the batch has tokens only (for both, see `Batch.add_hidden`)
    pos           int32 [n_tokens]
    seq           int32 [n_tokens]: the (first) sequence of each token
    sets          all sequences of each token; None when each has one
    outputs       the indices of the tokens whose logits are wanted, ascending
    ids           int32 [n_tokens]: the index of each token in the batch
    media         what it has of pictures and sounds; None for nothing but text
    states        the cells of a recurrent memory that the sequences read and write; None without such a memory
    """

    equal_seqs: bool
    n_tokens: int
    n_seq_tokens: int
    n_seqs: int
    token: Ints | None
    embd: Floats | None
    pos: Ints
    seq: Ints
    sets: SeqSets | None
    outputs: Ints
    ids: Ints
    states: StateSlot | None = None
    media: UMedia | None = None

    @property
    def seq_id(self) -> list[tuple[int, ...]]:
        """The sequences of each of the `n_seqs` groups of tokens (of each token when `equal_seqs` is False)."""
        sets = [(s,) for s in self.seq.tolist()] if self.sets is None else self.sets
        return [tuple(s) for s in sets[:: self.n_seq_tokens]]

    @property
    def n_seq_id(self) -> list[int]:
        """How many sequences each of `seq_id` names."""
        return [len(ids) for ids in self.seq_id]

    @property
    def last_pos(self) -> Ints:
        """int32 [n_seqs]: the last position of each sequence."""
        return self.pos[self.n_seq_tokens - 1 :: self.n_seq_tokens]
