"""Saving and loading what a context remembers: all of it, or one sequence.

The file (container: `state_file`) has in its header

    kind      "context" or "sequence"
    model     what the model must be: `arch`, `hparams`, `rope_factors` (a tensor's name, or null), `type_k`, `type_v`,
              `weights`, a digest of the names, types and shapes of all tensors and of the values of output_norm, and
              `stage`, the first layer and the end, where it is one
    tokens    how many tokens the caller put with the state
    caches    for each cache (an interleaved memory has two) `cells`, how many are saved; `seqs`, how many sequences
              they may belong to (0 in a sequence's file); `head`, where the next search for a slot starts
    states    where recurrent layers have states: `cells`, how many are saved, and `seqs`, of how many sequences (1 in
              a sequence's file)
    outputs   rows of logits

and the arrays (C order)

    tokens    i32 [tokens]
    for each cache
      index   i32 [cells]            where in the cache the cells were, ascending
      pos     i32 [cells]
      delta   i32 [cells]            what was added to pos since K was roped
      seq     u8 [seqs, cells]       1 where the cell belongs to the sequence
      K, V    per layer, K then V: [cells, bytes of one cell], as the cache stores them; V is never transposed here
    where there are states
      pos     i32 [cells]            the last position that each has seen
      seq     u8 [seqs, cells]       1 where the sequence has that state
      states  per layer, what of its last tokens it needs and the state proper: f32 [cells, floats]
    outputs   i32 [outputs]          indices in the batch of the rows of
    logits    f32 [outputs, n_vocab]

Only cells in use are saved. A state can be loaded with another n_ctx, n_seq_max or flash_attn, as long as it fits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import KVCacheFull, StateError, whole
from pyggml.lock import Lock, changing
from pyggml.models.blocks import rope_factors
from pyggml.models.memory.kv_cache import ROTATED_TYPES, KVCache
from pyggml.models.memory.kv_cells import LAST_POS
from pyggml.models.memory.kv_rows import Array, kv_rows
from pyggml.models.memory.memory import Memory
from pyggml.types import Floats, Ints

from ..interrupt import uninterrupted
from ..loaded import LoadedModel
from . import recurrent_states, state_file
from .recurrent_states import SavedStates
from .state_file import Path, Reader


class Stateful(Protocol):
    """What of a context is saved."""

    lock: Lock
    outputs: Ints
    logits: Floats

    @property
    def model(self) -> LoadedModel: ...
    @property
    def memory(self) -> Memory: ...


# -- the whole context ------------------------------------------------------------------------------------------------


def save_state(ctx: Stateful, path: Path, tokens: Sequence[int] = ()) -> None:
    """Write the cache and the logits of the last decode to a file, and `tokens` with them (for a prompt cache).

    The file appears whole or not at all. Raises StateError where it cannot be written.
    """
    state_file.write(path, _pack(ctx, None, tokens))


def load_state(ctx: Stateful, path: Path) -> list[int]:
    """Put a context into the state in a file; returns the tokens saved with it.

    The cells go where they were, or to the first ones where the cache is smaller now. Raises StateError for a file that
    is truncated, damaged, newer, of another model or no state at all, KVCacheFull where it does not fit; then nothing
    has changed. Ctrl-C waits until the state is in place.
    """
    return load_state_bytes(ctx, state_file.read(path))


def state_bytes(ctx: Stateful, tokens: Sequence[int] = ()) -> bytes:
    """What `save_state` writes."""
    return b"".join(_pack(ctx, None, tokens))


@changing
def load_state_bytes(ctx: Stateful, data: bytes) -> list[int]:
    """Load what `state_bytes` returned, as `load_state` does."""
    state = _unpack(ctx, data, "context")
    for kv, saved in zip(ctx.memory.caches, state.caches, strict=True):
        if saved.n > kv.size:
            raise KVCacheFull(f"the state has {saved.n} cells, the KV cache {kv.size}", saved.n, kv.size)
    for members in (c.seq for c in (*state.caches, state.states) if c is not None):
        highest = max(np.flatnonzero(members.any(axis=1)), default=0)
        if highest >= ctx.memory.n_seq_max:
            raise StateError(f"the state has a sequence {highest}, but n_seq_max is {ctx.memory.n_seq_max}")
    with uninterrupted():
        for kv, saved in zip(ctx.memory.caches, state.caches, strict=True):
            fits = not saved.n or saved.index[-1] < kv.size
            seq = np.zeros((kv.n_seq_max, saved.n), np.bool_)
            n_seq = min(len(saved.seq), kv.n_seq_max)
            seq[:n_seq] = saved.seq[:n_seq]
            kv.clear()
            _put(kv, saved, saved.index if fits else np.arange(saved.n, dtype=np.int32), seq)
            kv.head = saved.head if fits and saved.head < kv.size else 0
        if ctx.memory.states is not None and state.states is not None:
            ctx.memory.states.clear()
            state.states.put(ctx.memory.states, None)
        ctx.outputs, ctx.logits = state.outputs, state.logits
    return state.tokens


# -- one sequence -----------------------------------------------------------------------------------------------------


def save_seq(ctx: Stateful, path: Path, seq: int) -> None:
    """Write the cells of one sequence to a file. Errors: see `save_state`."""
    state_file.write(path, _pack(ctx, seq, ()))


def load_seq(ctx: Stateful, path: Path, seq: int | None = None) -> int:
    """Add the sequence in a file to the cache, as sequence `seq` (replacing it), or under the first id that is free.

    Returns the id. It takes the first empty cells, side by side or not. Errors: see `load_state`; StateError also where
    no id is free.
    """
    return load_seq_bytes(ctx, state_file.read(path), seq)


def seq_bytes(ctx: Stateful, seq: int) -> bytes:
    """What `save_seq` writes."""
    return b"".join(_pack(ctx, seq, ()))


@changing
def load_seq_bytes(ctx: Stateful, data: bytes, seq: int | None = None) -> int:
    """Load what `seq_bytes` returned, as `load_seq` does."""
    state, memory = _unpack(ctx, data, "sequence"), ctx.memory
    if seq is None:
        taken = [any(kv.seq[i].any() for kv in memory.caches) for i in range(memory.n_seq_max)]
        seq = next((i for i, some in enumerate(taken) if memory.seq_pos_max(i) < 0 and not some), None)
        if seq is None:
            raise StateError(f"all {memory.n_seq_max} sequences are in use (n_seq_max = {memory.n_seq_max})")
    memory.seq_pos_max(seq)  # refuses an id that there is not
    free = [np.flatnonzero(~np.delete(kv.seq, seq, axis=0).any(axis=0)) for kv in memory.caches]
    for kv, saved, cells in zip(memory.caches, state.caches, free, strict=True):
        if saved.n > len(cells):
            text = f"{saved.n} cells are needed; {len(cells)} of the {kv.size} cells of the KV cache are free"
            raise KVCacheFull(text, saved.n, len(cells))
    with uninterrupted():
        for kv, saved, cells in zip(memory.caches, state.caches, free, strict=True):
            kv.seq_rm(seq)
            member = np.zeros((kv.n_seq_max, saved.n), np.bool_)
            member[seq] = True
            _put(kv, saved, cells[: saved.n].astype(np.int32), member)
        if ctx.memory.states is not None and state.states is not None:
            ctx.memory.states.seq_rm(seq)
            state.states.put(ctx.memory.states, seq)
    return seq


# -- contents ---------------------------------------------------------------------------------------------------------


@dataclass
class _Cells:
    """What is saved of one cache."""

    head: int
    index: Ints
    pos: Ints
    delta: Ints
    seq: Array
    rows: list[Array]

    @property
    def n(self) -> int:
        return len(self.pos)


@dataclass
class _State:
    """The contents of a file, checked."""

    tokens: list[int]
    caches: list[_Cells]
    states: SavedStates | None
    outputs: Ints
    logits: Floats


def _model_of(ctx: Stateful) -> dict[str, Any]:
    """What a state of this context must have been saved from, as JSON gives it back."""
    m, kv = ctx.model, next(iter(ctx.memory.caches), None)
    digest = hashlib.sha256()
    for name, t in sorted(m.weights.items()):
        digest.update(f"{name} {t.dtype.name} {t.ne}\n".encode())
    if "output_norm.weight" in m.weights:
        digest.update(m.weights["output_norm.weight"].tobytes())
    factors = rope_factors(m.hparams, m.weights, ctx.memory.size)  # long or short ones, by the size of the context
    fingerprint: dict[str, Any] = {
        "arch": m.arch,
        "rope_factors": factors.name if factors else None,
        "hparams": asdict(m.hparams),
        "type_k": _stored(kv.type_k) if kv else None,
        "type_v": _stored(kv.type_v) if kv else None,
        "weights": digest.hexdigest(),
    }
    if m.stage is not None:
        fingerprint["stage"] = [m.stage.start, m.stage.stop]
    return json.loads(json.dumps(fingerprint))


def _stored(dtype: DType) -> str:
    return f"{dtype.name} rotated" if dtype in ROTATED_TYPES else dtype.name


@changing
def _pack(ctx: Stateful, seq: int | None, tokens: Sequence[int]) -> list[bytes | memoryview]:
    arrays: list[Array] = [np.array([whole("a token", t, 0, LAST_POS, StateError) for t in tokens], np.int32)]
    caches: list[dict[str, int]] = []
    for kv in ctx.memory.caches:
        if seq is None:
            index = np.flatnonzero(kv.pos >= 0)
            member = kv.seq[:, index].view(np.uint8)
        else:
            kv.seq_pos_max(seq)  # refuses an id that there is not
            index = np.flatnonzero(kv.seq[seq])
            member = np.empty((0, len(index)), np.uint8)
        caches.append({"cells": len(index), "seqs": len(member), "head": kv.head})
        arrays += [index.astype(np.int32), kv.pos[index], kv.delta[index], member]
        arrays += [rows[index] for rows in kv_rows(kv)]
    states: dict[str, int] = {}
    if ctx.memory.states is not None:
        ctx.memory.seq_pos_max(seq or 0)  # as above
        states, rows = recurrent_states.pack(ctx.memory.states, seq)
        arrays += rows
    n_outputs = len(ctx.logits) if seq is None else 0
    header = {
        "kind": "context" if seq is None else "sequence",
        "model": _model_of(ctx),
        "tokens": len(tokens),
        "caches": caches,
        **({"states": states} if states else {}),
        "outputs": n_outputs,
    }
    return state_file.pack(header, (*arrays, ctx.outputs[:n_outputs], ctx.logits[:n_outputs]))


def _unpack(ctx: Stateful, data: bytes, kind: str) -> _State:
    r = Reader(data)
    found = r.header.get("kind")
    if found != kind:
        raise StateError(f"this is the state of a {found}, not of a {kind}")
    _check_model(r.header.get("model"), _model_of(ctx))
    n_vocab, n_outputs = ctx.model.hparams.n_vocab, r.count("outputs")
    tokens = r.array(np.int32, r.count("tokens"))
    headers = r.objects("caches", len(ctx.memory.caches))
    caches = [_unpack_cells(r, header, kv) for header, kv in zip(headers, ctx.memory.caches, strict=True)]
    states = None
    if ctx.memory.states is not None:
        states = recurrent_states.unpack(r, r.object("states"), ctx.memory.states)
    outputs, logits = r.array(np.int32, n_outputs), r.array(np.float32, n_outputs, n_vocab)
    r.end()
    sound = not tokens.size or 0 <= tokens.min() <= tokens.max() < n_vocab
    for cells in caches:
        sound &= bool((cells.pos >= 0).all() and cells.seq.view(np.uint8).max(initial=0) <= 1)
        sound &= _ascending(cells.index) and (kind == "sequence" or bool(cells.seq.any(axis=0).all()))
    if not sound or not _ascending(outputs):
        raise StateError("the state is damaged: its cells, tokens or outputs make no sense")
    return _State(tokens.tolist(), caches, states, np.array(outputs), np.array(logits))


def _unpack_cells(r: Reader, header: Mapping[str, Any], kv: KVCache) -> _Cells:
    n, n_seq, head = (r.count(name, header) for name in ("cells", "seqs", "head"))
    index, pos, delta = (r.array(np.int32, n) for _ in range(3))
    member = r.array(np.uint8, n_seq, n).view(np.bool_)
    return _Cells(head, index, pos, delta, member, [r.array(v.dtype, n, v.shape[1]) for v in kv_rows(kv)])


def _ascending(a: Ints) -> bool:
    return not a.size or (a[0] >= 0 and bool((a[1:] > a[:-1]).all()))


def _check_model(saved: object, here: Mapping[str, Any]) -> None:
    """Raises StateError naming what differs."""
    if saved == here:
        return
    there = _flat(saved)
    differs = [f"{k} is {there.get(k)} there and {v} here" for k, v in _flat(here).items() if there.get(k) != v]
    raise StateError("the state is of another model: " + ("; ".join(differs) or "it has keys unknown here"))


def _flat(model: object) -> dict[str, object]:
    """The fingerprint with its hparams beside the rest; empty for what is none."""
    if not isinstance(model, dict):
        return {}
    outer = cast("dict[str, object]", model)
    inner = outer.get("hparams")
    flat = {k: v for k, v in outer.items() if k != "hparams"}
    return flat | cast("dict[str, object]", inner) if isinstance(inner, dict) else flat


def _put(kv: KVCache, saved: _Cells, cells: Ints, seq: Array) -> None:
    for to, rows in zip(kv_rows(kv), saved.rows, strict=True):
        to[cells] = rows
    kv.put(cells, saved.pos, saved.delta, seq)
