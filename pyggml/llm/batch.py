"""What `decode` takes: tokens (or embeddings), their positions and sequences, and which of them want logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyggml.errors import BatchError, whole
from pyggml.models.hparams import HParams
from pyggml.models.memory.kv_cells import INT32_MAX, LAST_POS
from pyggml.types import Floats, Ints


class Sequences(Protocol):
    """What a batch is checked against: the sequences of a memory."""

    @property
    def n_seq_max(self) -> int:
        """Sequences are 0 .. n_seq_max - 1."""
        ...

    @property
    def pos_max(self) -> Ints:
        """int32 [n_seq_max]: the last position of each sequence, -1 where it is empty."""
        ...


@dataclass(frozen=True, slots=True)
class MediaRow:
    """A token of a prompt with pictures or sounds (`MediaPrompt`), beyond its id.

    row        float32 [n_embd]: the embedding that takes the token's place; None: the token keeps its own
    deepstack  float32 [n_levels, n_embd]: what is added to the outputs of the first layers
    group      tokens of its sequence with the same group see each other, whichever comes first; -1: of no group
    n_group    how many tokens the group has, which must all be in one batch
    turn       how far its positions in time, height and width (in the rope) are from that of a token of text here
    drift      how far the token moves the positions of those behind it
    """

    row: Floats | None = None
    deepstack: Floats | None = None
    group: int = -1
    n_group: int = 0
    turn: tuple[int, int, int] = (0, 0, 0)
    drift: int = 0


class Batch:
    """Tokens of any sequences: position, sequence ids, whether logits are wanted (llama_batch).

    A batch holds tokens (`tokens`) or embeddings (`embd`, rows of n_embd numbers), not both. Only a batch for a head
    that drafts holds both: each token and the hidden state of the token before it (`add_hidden`). `pos`, `seq_ids` and
    `logits` have an entry for each token; `media` has entries (by index) for those that are part of a picture or sound.
    Tokens may stand in any order: they are evaluated by their positions.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.embd: list[Floats] = []
        self.pos: list[int] = []
        self.seq_ids: list[tuple[int, ...]] = []
        self.logits: list[bool] = []
        self.media: dict[int, MediaRow] = {}

    @classmethod
    def prompt(cls, tokens: Iterable[int], pos: int = 0, seq_ids: int | Sequence[int] = 0) -> Batch:
        """The tokens of one prompt from position `pos` on, logits of the last wanted."""
        batch = cls()
        first = whole("pos", pos, 0, LAST_POS, BatchError)
        if not isinstance(tokens, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BatchError(f"tokens must be whole numbers, not {tokens!r:.40}")
        for i, token in enumerate(tokens):
            batch.add(token, first + i, seq_ids)
        if batch.logits:
            batch.logits[-1] = True
        return batch

    @classmethod
    def one(cls, token: int, pos: int, seq_ids: int | Sequence[int] = 0) -> Batch:
        """A single token, its logits wanted."""
        return cls.prompt((token,), pos, seq_ids)

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def n_tokens(self) -> int:
        """Tokens or embeddings in it."""
        return len(self.pos)

    @property
    def n_seq_id(self) -> list[int]:
        """How many sequences each token belongs to."""
        return [len(ids) for ids in self.seq_ids]

    def add(self, token: int, pos: int, seq_ids: int | Sequence[int] = 0, logits: bool = False) -> None:
        """Append a token at position `pos` of one or several sequences. Raises BatchError for a value that is no id."""
        if self.embd:
            raise BatchError("the batch holds embeddings; a token cannot be added to it")
        token = whole("token", token, 0, INT32_MAX, BatchError)
        self._place(pos, seq_ids, logits)
        self.tokens.append(token)

    def extend(self, tokens: Sequence[int], pos: Sequence[int], seqs: Sequence[int], n_outputs: int = 1) -> None:
        """Append tokens, each at its position of its one sequence; logits of the last `n_outputs` are wanted. Raises
        BatchError as `add`, with nothing appended."""
        if self.embd:
            raise BatchError("the batch holds embeddings; a token cannot be added to it")
        ids = [whole("token", t, 0, INT32_MAX, BatchError) for t in tokens]
        places = [whole("pos", p, 0, LAST_POS, BatchError) for p in pos]
        sequences = [(whole("seq_ids", s, 0, INT32_MAX, BatchError),) for s in seqs]
        self.tokens += ids
        self.pos += places
        self.seq_ids += sequences
        self.logits += [False] * (len(ids) - n_outputs) + [True] * n_outputs

    def add_embd(self, row: Any, pos: int, seq_ids: int | Sequence[int] = 0, logits: bool = False) -> None:
        """Append an embedding, n_embd finite numbers, instead of a token. Raises BatchError for other values."""
        if self.tokens:
            raise BatchError("the batch holds tokens; an embedding cannot be added to it")
        values = self._row(row, pos)
        self._place(pos, seq_ids, logits)
        self.embd.append(values)

    def add_hidden(
        self, token: int, row: Floats, pos: int, seq_ids: int | Sequence[int] = 0, logits: bool = False
    ) -> None:
        """Append a token together with the hidden state of the token before it, a row of `LlamaContext.hidden`. Raises
        BatchError."""
        if len(self.tokens) != len(self.embd):
            raise BatchError("the batch holds tokens or embeddings alone; it cannot have both of one")
        token, values = whole("token", token, 0, INT32_MAX, BatchError), self._row(row, pos)
        self._place(pos, seq_ids, logits)
        self.tokens.append(token)
        self.embd.append(values)

    def clear(self) -> None:
        """Remove all tokens."""
        for items in (self.tokens, self.embd, self.pos, self.seq_ids, self.logits):
            items.clear()
        self.media.clear()

    def _row(self, row: Any, pos: int) -> Floats:
        try:
            with np.errstate(over="ignore"):
                values = np.array(row, np.float32)
        except (ValueError, TypeError, OverflowError):
            values = np.empty(0, np.float32)
        if values.ndim != 1 or not len(values) or (self.embd and len(values) != len(self.embd[0])):
            raise BatchError(f"an embedding must be a row of n_embd numbers, not of shape {list(values.shape)}")
        if not np.isfinite(values).all():
            raise BatchError(f"the embedding at position {pos} holds numbers that are not finite")
        return values

    def _place(self, pos: int, seq_ids: int | Sequence[int], logits: bool) -> None:
        pos = whole("pos", pos, 0, LAST_POS, BatchError)
        several = seq_ids if isinstance(seq_ids, Iterable) else (seq_ids,)
        ids = tuple(sorted({whole("seq_ids", s, 0, INT32_MAX, BatchError) for s in several}))
        if not ids:
            raise BatchError(f"the token at position {pos} belongs to no sequence: seq_ids is empty")
        self.pos.append(pos)
        self.seq_ids.append(ids)
        self.logits.append(bool(logits))


def token_ids(ids: Sequence[int]) -> npt.NDArray[np.integer[Any]]:
    """Token ids as an array of integers. Raises BatchError when they are not ids, and for an empty sequence."""
    try:
        tokens = np.array(ids)
    except (ValueError, TypeError, OverflowError):
        tokens = np.array(None)
    if tokens.ndim == 1 and not len(tokens):
        raise BatchError("the batch is empty")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise BatchError("tokens must be a sequence of whole numbers of 64 bits")
    return tokens


def check_size(n: int, n_batch: int, n_ubatch: int, together: bool) -> None:
    """Raises BatchError for more than `n_batch` tokens. When all tokens see each other (`together`), they must also fit
    one ubatch of `n_ubatch` tokens."""
    if n > n_batch:
        raise BatchError(f"{n} tokens in one batch, where n_batch is {n_batch}")
    if n > n_ubatch and together:
        raise BatchError(f"{n} tokens that all see each other, but only n_ubatch = {n_ubatch} run together")


def check_values(tokens: npt.NDArray[np.integer[Any]] | None, embd: Floats | None, hp: HParams, first: int = 0) -> None:
    """Raises BatchError for ids outside the vocabulary, for embeddings of another length or with values that are not
    finite, for hidden states when the model reads none, for missing hidden states when it reads them, and for tokens
    when a stage begins after layer 0."""
    n_vocab, n_embd = hp.n_vocab, hp.n_embd
    if (tokens is not None and embd is not None) is not hp.is_head:
        what = "reads hidden states beside its tokens" if hp.is_head else "reads tokens or embeddings, not both"
        raise BatchError(f"the model {what} (see Batch.add_hidden)")
    if tokens is not None:
        if first:
            raise BatchError(f"layers from {first} on take what the one before gave, not tokens")
        low, high = (tokens.min(), tokens.max()) if len(tokens) > 1 else (tokens.item(0),) * 2
        if low < 0 or high >= n_vocab:
            raise BatchError(f"token {low if low < 0 else high} is outside the vocabulary of {n_vocab}")
    if embd is not None:
        if embd.shape[1] != n_embd:
            raise BatchError(f"embeddings of {embd.shape[1]} numbers, but n_embd is {n_embd}")
        if not np.isfinite(embd).all():
            row = int(np.flatnonzero(~np.isfinite(embd).all(axis=1))[0])
            raise BatchError(f"embedding {row} of the batch holds numbers that are not finite")


def check_positions(pos: Ints, seq: Ints, sets: Sequence[tuple[int, ...]] | None, memory: Sequences) -> None:
    """Each sequence of a batch must continue where it ends in the memory: no gap, no position twice.

    Token i stands at pos[i] of sequence seq[i]; when `sets` is given, of all sequences in sets[i]. Raises BatchError.
    """
    if sets is not None:
        pos = np.repeat(pos, [len(ids) for ids in sets])
        seq = np.array([s for ids in sets for s in ids], np.int32)
    largest = seq.max()
    if largest >= memory.n_seq_max:
        raise BatchError(f"sequence {largest} is outside 0..{memory.n_seq_max - 1} (n_seq_max = {memory.n_seq_max})")
    if (pos == memory.pos_max[seq] + 1).all() and len(set(seq.tolist())) == len(seq):
        return  # the next token of each of several sequences, as in most steps
    order = np.lexsort((pos, seq))
    p, s = pos[order], seq[order]
    first = np.ones(len(s), np.bool_)
    first[1:] = s[1:] != s[:-1]
    follows = np.empty(len(s), np.int64)
    follows[1:] = p[:-1] + 1
    last = memory.pos_max[s[first]]
    follows[first] = np.where(last >= 0, last + 1, p[first])
    wrong = np.flatnonzero(follows != p)
    if len(wrong):
        i = int(wrong[0])
        if p[i] == follows[i] - 1 and not first[i]:
            raise BatchError(f"position {p[i]} of sequence {s[i]} is in the batch twice")
        raise BatchError(f"sequence {s[i]} continues at position {follows[i]}, but the batch has position {p[i]}")
