"""Split a batch into parts that run at once: `SBatch` sorts a batch and hands out its parts, each a `UBatch`.

The splits are llama.cpp's: simple (for attention models: any tokens in order), equal (for recurrent models: several
sequences, equally many tokens of each), by sequence (tokens of one sequence).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pyggml.errors import BatchError
from pyggml.models.memory.memory import Memory
from pyggml.models.ubatch import UBatch, UMedia
from pyggml.types import Ints

from .batch import Batch, MediaRow, Sequences, check_positions

_NONE = np.empty(0, np.int32)
FIRST = np.zeros(1, np.int32)  # the index, and the sequence, of the one token of most decodes
FIRST.flags.writeable = False


@dataclass(slots=True)
class SeqGroup:
    """The tokens ids[offset : offset + length] of an SBatch, which all belong to the same `n_seq_id` sequences `seq_id`
    (in a simple split to any, and `seq_id` is empty). Tokens that were handed out are no longer in the group."""

    n_seq_id: int
    seq_id: tuple[int, ...]
    offset: int
    length: int


class SBatch:
    """A batch in the order of evaluation, handed out in parts (llama_sbatch).

    ids       batch indices in the order of evaluation
    seq       groups that are still to be handed out, the next one first
    out_ids   batch indices of the tokens handed out whose logits are wanted, in that order
    n_tokens  tokens still to be handed out

    With `simple_split` the order of evaluation is the batch's own, or by position when the tokens of a sequence are not
    in order. Otherwise tokens that several sequences share come first, then tokens are sorted by sequence ids, then by
    position; shared groups come first, then shorter ones.
    """

    def __init__(self, batch: Batch, simple_split: bool = True) -> None:
        n = len(batch)
        if n == 0:
            raise BatchError("the batch is empty")
        self.token = np.array(batch.tokens, np.int32) if batch.tokens else None
        self.embd = np.array(batch.embd, np.float32) if batch.embd else None
        self.pos = np.array(batch.pos, np.int32)
        self.seq_ids: list[tuple[int, ...]] = batch.seq_ids
        self.output = np.array(batch.logits, np.bool_)
        shared = max(map(len, batch.seq_ids)) > 1
        self.sets = batch.seq_ids if shared else None
        self.first = np.array([ids[0] for ids in batch.seq_ids], np.int32)
        self.simple_split, self.n_tokens, self.out_ids = simple_split, n, _NONE
        self.media = _media(batch.media, self.pos, self.first) if batch.media else None
        if self.media is not None and self.media.given is not None and self.token is not None:
            self.token[self.media.given] = 0
        if simple_split:
            self.ids, self._in_order = self._simple_order()
            self._done = 0  # tokens handed out
            self._whole = self._cuts()
            self.seq = [SeqGroup(0, (), 0, n)]
        else:
            order = sorted(range(n), key=lambda i: (-len(self.seq_ids[i]), self.seq_ids[i], batch.pos[i]))
            self.ids, self._in_order = np.array(order, np.int32), False
            self.seq = self._groups()

    def check(self, memory: Sequences) -> None:
        """Raises BatchError when the sequences do not exist, or do not continue what is in the memory."""
        check_positions(self.pos, self.first, self.sets, memory)

    # -- splits ---------------------------------------------------------------------------------------------------

    def split_simple(self, n_ubatch: int) -> UBatch:
        """The next tokens, at most `n_ubatch` of them. Only for an SBatch with `simple_split`."""
        self._expect(simple=True)
        group = self.seq[0]
        n = min(group.length, n_ubatch)
        if self._whole is not None:
            may = np.flatnonzero(self._whole[self._done : self._done + n])
            if not len(may):
                size = int(np.argmax(self._whole[self._done :])) + 1
                raise BatchError(f"{size} tokens see each other, but only n_ubatch = {n_ubatch} run together")
            n = int(may[-1]) + 1
        self._done += n
        return self._take([(group, n)])

    def split_equal(self, n_ubatch: int) -> UBatch:
        """Take equally many tokens from each of the next sequences, at most `n_ubatch` in all. The number is that of
        the first sequence, which has the fewest. Tokens that belong to several sequences run alone.
        """
        self._expect(simple=False)
        length, n = 0, 0
        parts: list[tuple[SeqGroup, int]] = []
        for group in self.seq:
            length = length or min(group.length, n_ubatch)
            if parts and (group.n_seq_id > 1 or n + length > n_ubatch):
                break
            parts.append((group, length))
            n += length
            if group.n_seq_id > 1:
                break
        return self._take(parts)

    def split_seq(self, n_ubatch: int) -> UBatch:
        """The next tokens of one sequence, at most `n_ubatch`."""
        self._expect(simple=False)
        group = self.seq[0]
        return self._take([(group, min(group.length, n_ubatch))])

    def turn(self, memory: Memory) -> None:
        """In a model whose tokens have positions in time, height and width: find these, as they follow from what the
        sequences hold. Does nothing when all are equal to `pos`."""
        cells = memory.caches[0]
        if not cells.drift.any() and self.media is None:
            return
        n = len(self.pos)
        own = np.zeros((3, n), np.int32) if self.media is None or self.media.turns is None else self.media.turns
        step = np.zeros(n, np.int32) if self.media is None or self.media.drift is None else self.media.drift
        drift = np.empty(n, np.int32)
        for s in np.unique(self.first).tolist():
            of = np.flatnonzero(self.first == s)
            of = of[np.argsort(self.pos[of], kind="stable")]
            drift[of] = cells.end_drift(s) + np.cumsum(step[of])
        media = UMedia() if self.media is None else self.media
        self.media = replace(media, turns=own + self.pos + drift - step, drift=drift)

    def parts(self, n_ubatch: int) -> Iterator[UBatch]:
        """Simple (or equal) splits until nothing is left."""
        while self.n_tokens:
            yield self.split_simple(n_ubatch) if self.simple_split else self.split_equal(n_ubatch)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _expect(self, simple: bool) -> None:
        if not self.n_tokens:
            raise BatchError("nothing of the batch is left")
        if self.simple_split is not simple:
            raise BatchError(f"the batch was sorted for {'simple' if self.simple_split else 'equal'} splits")

    def _simple_order(self) -> tuple[Ints, bool]:
        """The order of a simple split, and whether it is the batch's own."""
        ids = np.arange(len(self.pos), dtype=np.int32)
        if (self.pos[1:] >= self.pos[:-1]).all():
            return ids, True
        latest: dict[int, int] = {}
        for pos, seqs in zip(self.pos.tolist(), self.seq_ids, strict=True):
            for s in seqs:
                if pos < latest.get(s, -1):
                    return np.argsort(self.pos, kind="stable").astype(np.int32), False
                latest[s] = pos
        return ids, True

    def _cuts(self) -> npt.NDArray[np.bool_] | None:
        """For each token in the order of evaluation, whether a ubatch may end with it: no tokens that see each other
        are on both sides. None: after any token. Raises BatchError when such tokens are not all in the batch."""
        group = None if self.media is None else self.media.group
        if group is None:
            return None
        n = len(self.ids)
        last = np.arange(n)
        for g in range(int(group.max()) + 1):
            of = np.flatnonzero(group[self.ids] == g)
            last[of] = of[-1]
        return np.maximum.accumulate(last) == np.arange(n)

    def _groups(self) -> list[SeqGroup]:
        groups: list[SeqGroup] = []
        ids: list[int] = self.ids.tolist()
        for offset, i in enumerate(ids):
            seq_id = self.seq_ids[i]
            if groups and groups[-1].seq_id == seq_id:
                groups[-1].length += 1
            else:
                groups.append(SeqGroup(len(seq_id), seq_id, offset, 1))
        return sorted(groups, key=lambda g: (-g.n_seq_id, g.length))

    def _take(self, parts: Sequence[tuple[SeqGroup, int]]) -> UBatch:
        """A ubatch of the first tokens of some groups."""
        ids: Ints = np.concatenate([self.ids[g.offset : g.offset + n] for g, n in parts])
        for g, n in parts:
            g.offset += n
            g.length -= n
        self.seq = [g for g in self.seq if g.length]
        n_tokens = len(ids)
        self.n_tokens -= n_tokens
        equal = not self.simple_split
        n_seqs = len(parts) if equal else n_tokens
        u = UBatch(
            equal_seqs=equal,
            n_tokens=n_tokens,
            n_seq_tokens=n_tokens // n_seqs,
            n_seqs=n_seqs,
            token=self.token,
            embd=self.embd,
            pos=self.pos,
            seq=self.first,
            sets=self.sets,
            outputs=self.output[ids].nonzero()[0].astype(np.int32),
            ids=ids,
        )
        if n_tokens < len(self.pos) or not self._in_order:
            u.token = None if u.token is None else u.token[ids]
            u.embd = None if u.embd is None else u.embd[ids]
            u.pos, u.seq = u.pos[ids], u.seq[ids]
            indices: list[int] = ids.tolist()
            u.sets = None if u.sets is None else [u.sets[i] for i in indices]
        if self.media is not None:
            u.media = _of_tokens(self.media, ids)
        self.out_ids = np.concatenate((self.out_ids, ids[u.outputs]))
        return u


def _media(rows: Mapping[int, MediaRow], pos: Ints, seq: Ints) -> UMedia:
    """What a batch of tokens at `pos` of sequences `seq` has of pictures and sounds. `rows` are by the index of the
    token. Raises BatchError when tokens that see each other are not all in the batch."""
    n = len(pos)
    given = {i: m.row for i, m in rows.items() if m.row is not None}
    deep = {i: m.deepstack for i, m in rows.items() if m.deepstack is not None}
    media = UMedia()
    if given:
        media.rows = np.zeros((n, len(next(iter(given.values())))), np.float32)
        media.rows[list(given)] = list(given.values())
        media.given = np.zeros(n, np.bool_)
        media.given[list(given)] = True
    if deep:
        levels, width = next(iter(deep.values())).shape
        media.deepstack = np.zeros((levels, n, width), np.float32)
        for i, values in deep.items():
            media.deepstack[:, i] = values
    groups: dict[tuple[int, int], list[int]] = {}
    for i, m in rows.items():
        if m.group >= 0:
            groups.setdefault((int(seq[i]), m.group), []).append(i)
    for g, of in enumerate(groups.values()):
        if len(of) != rows[of[0]].n_group:
            text = f"{rows[of[0]].n_group} tokens see each other, but only {len(of)} of them are in the batch"
            raise BatchError(f"from position {pos[of[0]]} on {text}")
        if media.group is None:
            media.group = np.full(n, -1, np.int32)
        media.group[of] = g
    if any(m.drift or any(m.turn) for m in rows.values()):
        media.turns, media.drift = np.zeros((3, n), np.int32), np.zeros(n, np.int32)
        for i, m in rows.items():
            media.turns[:, i], media.drift[i] = m.turn, m.drift
    return media


def _of_tokens(media: UMedia, ids: Ints) -> UMedia:
    """What these tokens have of it."""
    given = None if media.given is None else media.given[ids]
    some = given is not None and given.any()
    return UMedia(
        rows=media.rows[ids] if some and media.rows is not None else None,
        given=given if some else None,
        deepstack=media.deepstack[:, ids] if some and media.deepstack is not None else None,
        group=None if media.group is None else media.group[ids],
        turns=None if media.turns is None else media.turns[:, ids],
        drift=None if media.drift is None else media.drift[ids],
    )


class _Nothing:
    """The sequences of an empty memory."""

    def __init__(self, n_seq_max: int) -> None:
        self.n_seq_max, self.pos_max = n_seq_max, np.full(n_seq_max, -1, np.int32)


def texts_of(batch: Batch | Sequence[int], n_seq_max: int) -> SBatch:
    """The whole texts of sequences (plain token ids: sequence 0), with outputs of all tokens. Raises BatchError."""
    texts = SBatch(batch if isinstance(batch, Batch) else Batch.prompt(batch))
    texts.check(_Nothing(n_seq_max))
    texts.output[:] = True
    return texts


def ubatches_of_tokens(tokens: Ints, start: int, n_ubatch: int) -> Iterator[UBatch]:
    """Tokens of sequence 0 from position `start` on, at most `n_ubatch` at a time, with logits of the last. The result
    is the same as an SBatch's equal splits, without the work of making one."""
    n = len(tokens)
    if n == 1:
        yield UBatch(True, 1, 1, 1, tokens, None, np.array((start,), np.int32), FIRST, None, FIRST, FIRST)
        return
    for i in range(0, n, n_ubatch):
        m = min(n_ubatch, n - i)
        ids = np.arange(i, i + m, dtype=np.int32)
        outputs = np.array([m - 1] * (i + m == n), np.int32)
        yield UBatch(
            True, m, m, 1, tokens[i : i + m], None, ids + np.int32(start), np.zeros(m, np.int32), None, outputs, ids
        )
