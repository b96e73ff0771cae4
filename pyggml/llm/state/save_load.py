"""Save and load what a context remembers: all of it, or one sequence.

The file (container: `state_file`) has in its header

    kind      "context" or "sequence"
    model     the model that the state belongs to: `arch`, `hparams`, `rope_factors` (a tensor's name, or null),
              `type_k`, `type_v`; `weights`, a digest of the names, types and shapes of all tensors and of the values of
              output_norm; for a stage `stage`, its first layer and its end; and when a sequence was evaluated with
              adapters that `save_seq` was told, `adapters`
    tokens    how many tokens the caller put with the state
    caches    for each cache (an interleaved memory has two) `cells`, how many are saved; `seqs`, how many sequences
              they may belong to (0 in a sequence's file); `head`, where the next search for a slot starts; `drift`,
              when the cells have one
    states    for a model with recurrent layers: `cells`, how many states are saved, and `seqs`, of how many sequences
              (1 in a sequence's file)
    outputs   rows of logits

and the arrays (C order)

    tokens    i32 [tokens]
    for each cache (`KVCache.save`)
      index   i32 [cells]            where in the cache the cells were, ascending
      pos     i32 [cells]
      delta   i32 [cells]            what was added to pos since K was roped
      drift   i32 [cells]            with `drift`: how far positions of the rope are from pos behind the cell
      seq     u8 [seqs, cells]       1 where the cell belongs to the sequence
      K, V    per layer, K then V: [cells, bytes of one cell], as the cache stores them; V is never transposed here
    of states (`RecurrentCells.save`)
      pos     i32 [cells]            the last position that each has seen
      seq     u8 [seqs, cells]       1 where the sequence has that state
      states  per layer, the part of the last tokens that it needs, then the state: f32 [cells, floats]
    outputs   i32 [outputs]          for each row of logits, the index of its token in the batch
    logits    f32 [outputs, n_vocab]

Only cells in use are saved. A state can be loaded with another n_ctx, n_seq_max or flash_attn, as long as it fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, cast

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import StateError, whole
from pyggml.lock import Lock, changing
from pyggml.models.blocks import rope_factors
from pyggml.models.memory import state_file
from pyggml.models.memory.kv_cache import ROTATED_TYPES
from pyggml.models.memory.kv_cells import LAST_POS
from pyggml.models.memory.memory import Memory
from pyggml.models.memory.state_file import Array, Path, StateReader, ascending
from pyggml.types import Floats, Ints

from ..interrupt import uninterrupted
from ..loaded import LoadedModel


class Stateful(Protocol):
    """The part of a context that is saved."""

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

    The file appears whole or not at all. Raises StateError when it cannot be written.
    """
    state_file.write(path, _pack(ctx, None, tokens))


def load_state(ctx: Stateful, path: Path) -> list[int]:
    """Put a context into the state in a file; returns the tokens saved with it.

    Cells go to the places that they had, or to the first places when the cache is smaller now. Raises StateError for a
    file that is truncated, damaged, newer, of another model or not a state at all, KVCacheFull when it does not fit;
    then nothing has changed. When memory ends in the middle (MemoryError), the context is empty. Ctrl-C waits until the
    state is in place.
    """
    return load_state_bytes(ctx, state_file.read(path))


def state_bytes(ctx: Stateful, tokens: Sequence[int] = ()) -> bytes:
    """What `save_state` writes."""
    return b"".join(_pack(ctx, None, tokens))


@changing
def load_state_bytes(ctx: Stateful, data: bytes) -> list[int]:
    """Load what `state_bytes` returned, as `load_state` does."""
    r = _opened(ctx, data, "context")
    tokens, puts, outputs, logits = _read(ctx, r, None)
    with uninterrupted():
        try:
            for put in puts:
                put()
        except BaseException:  # no memory: a part of the state is in place, which is no state
            ctx.memory.clear()
            raise
        ctx.outputs, ctx.logits = outputs, logits
    return tokens


# -- one sequence -----------------------------------------------------------------------------------------------------


def save_seq(
    ctx: Stateful, path: Path, seq: int, tokens: Sequence[int] = (), adapters: Sequence[tuple[str, float]] = ()
) -> None:
    """Write the cells of one sequence to a file, and `tokens` with them. `adapters`: digests and scales of those
    that they were evaluated with, which must be the same when the file is loaded. Errors: see `save_state`."""
    state_file.write(path, _pack(ctx, seq, tokens, adapters=adapters))


def load_seq(ctx: Stateful, path: Path, seq: int | None = None) -> int:
    """Add the sequence in a file to the cache, as sequence `seq` (replacing it), or under the first id that is free.

    Returns the id. The sequence takes the first empty cells, side by side or not. Errors: see `load_state`; StateError
    also when no id is free.
    """
    return load_seq_bytes(ctx, state_file.read(path), seq)


def load_seq_tokens(ctx: Stateful, path: Path, seq: int, adapters: Sequence[tuple[str, float]] = ()) -> list[int]:
    """As `load_seq`; returns the tokens that `save_seq` put with the sequence. Raises StateError, too, unless
    `adapters` are those that `save_seq` was told."""
    return _load_seq(ctx, state_file.read(path), seq, adapters=adapters)[1]


def seq_bytes(ctx: Stateful, seq: int) -> bytes:
    """What `save_seq` writes."""
    return b"".join(_pack(ctx, seq, ()))


def load_seq_bytes(ctx: Stateful, data: bytes, seq: int | None = None) -> int:
    """Load what `seq_bytes` returned, as `load_seq` does."""
    return _load_seq(ctx, data, seq)[0]


def own_seq_bytes(ctx: Stateful, seq: int) -> bytes:
    """A sequence, to be loaded by `load_own_seq` into the same context: it does not say of which model it is."""
    return b"".join(_pack(ctx, seq, (), {}))


def load_own_seq(ctx: Stateful, data: bytes, seq: int) -> None:
    """Load what `own_seq_bytes` returned, in the place of what sequence `seq` holds. Errors: see `load_seq`."""
    _load_seq(ctx, data, seq, {})


@changing
def _load_seq(
    ctx: Stateful,
    data: bytes,
    seq: int | None,
    model: dict[str, Any] | None = None,
    adapters: Sequence[tuple[str, float]] = (),
) -> tuple[int, list[int]]:
    r, memory = _opened(ctx, data, "sequence", model, adapters), ctx.memory
    if seq is None:
        free = (i for i in range(memory.n_seq_max) if all(s.seq_pos_max(i) < 0 for s in memory.stores))
        seq = next(free, None)
        if seq is None:
            raise StateError(f"all {memory.n_seq_max} sequences are in use (n_seq_max = {memory.n_seq_max})")
    memory.seq_pos_max(seq)  # raises for an unknown id
    tokens, puts, _, _ = _read(ctx, r, seq)
    with uninterrupted():
        for put in puts:
            put()
    return seq, tokens


# -- contents ---------------------------------------------------------------------------------------------------------


def _model_of(ctx: Stateful, adapters: Sequence[tuple[str, float]] = ()) -> dict[str, Any]:
    """The description of the model that a state of this context belongs to, as JSON gives it back."""
    m, kv = ctx.model, next(iter(ctx.memory.caches), None)
    from hashlib import sha256  # which loads OpenSSL

    digest = sha256()
    for name, t in sorted(m.weights.items()):
        digest.update(f"{name} {t.dtype.name} {t.ne}\n".encode())
    if "output_norm.weight" in m.weights:
        digest.update(m.weights["output_norm.weight"].tobytes())
    factors = rope_factors(m.hparams, m.weights, ctx.memory.size)  # long or short ones: the context's size decides
    fingerprint: dict[str, Any] = {
        "arch": m.arch,
        "rope_factors": factors.name if factors is not None else None,
        "hparams": asdict(m.hparams),
        "type_k": _stored(kv.type_k) if kv else None,
        "type_v": _stored(kv.type_v) if kv else None,
        "weights": digest.hexdigest(),
        "stage": None if m.stage is None else [m.stage.start, m.stage.stop],
    }
    if adapters:
        fingerprint["adapters"] = adapters
    return json.loads(json.dumps(fingerprint))


def _stored(dtype: DType) -> str:
    return f"{dtype.name} rotated" if dtype in ROTATED_TYPES else dtype.name


@changing
def _pack(
    ctx: Stateful,
    seq: int | None,
    tokens: Sequence[int],
    model: dict[str, Any] | None = None,
    adapters: Sequence[tuple[str, float]] = (),
) -> list[bytes | memoryview]:
    """The parts of a state. `model`: the description of the model; None: `_model_of` makes it. A state that is given
    one never leaves this process, so it needs no checksum."""
    arrays: list[Array] = [np.array([whole("a token", t, 0, LAST_POS, StateError) for t in tokens], np.int32)]
    n_outputs = len(ctx.logits) if seq is None else 0
    header: dict[str, Any] = {
        "kind": "context" if seq is None else "sequence",
        "model": _model_of(ctx, adapters) if model is None else model,
        "tokens": len(tokens),
        "caches": [],
    }
    for store in ctx.memory.stores:
        arrays += store.save(header, seq)
    header["outputs"] = n_outputs
    arrays += (ctx.outputs[:n_outputs], ctx.logits[:n_outputs])
    return state_file.pack(header, arrays, checksum=model is None)


def _opened(
    ctx: Stateful,
    data: bytes,
    kind: str,
    model: dict[str, Any] | None = None,
    adapters: Sequence[tuple[str, float]] = (),
) -> StateReader:
    """Open a state. Raises StateError when it is of another kind or of another model. `model`: see `_pack`."""
    r = StateReader(data, checksum=model is None)
    found = r.header.get("kind")
    if found != kind:
        raise StateError(f"this is the state of a {found}, not of a {kind}")
    _check_model(r.header.get("model"), _model_of(ctx, adapters) if model is None else model)
    return r


def _read(ctx: Stateful, r: StateReader, seq: int | None) -> tuple[list[int], list[Callable[[], None]], Ints, Floats]:
    """Read a state without changing anything: its tokens, functions that put it into the stores, the outputs and their
    logits. Raises StateError for data that `_pack` does not write, KVCacheFull when it does not fit."""
    n_vocab, n_outputs = ctx.model.hparams.n_vocab, r.count("outputs")
    tokens = r.array(np.int32, r.count("tokens"))
    puts = [store.load(r, seq) for store in ctx.memory.stores]
    outputs, logits = r.array(np.int32, n_outputs), r.array(np.float32, n_outputs, n_vocab)
    r.end()
    if not ascending(outputs) or (tokens.size and not 0 <= tokens.min() <= tokens.max() < n_vocab):
        raise StateError("the state is damaged: its tokens or outputs make no sense")
    return tokens.tolist(), puts, np.array(outputs), np.array(logits)


def _check_model(saved: object, here: Mapping[str, Any]) -> None:
    """Raises StateError that names the difference."""
    if saved == here:
        return
    there, ours = _flat(saved), _flat(here)
    if there.get("adapters") != ours.get("adapters"):
        raise StateError("the state was saved with other adapters, or other scales of them")
    differs = [f"{k} is {there[k]} there and {v} here" for k, v in ours.items() if k in there and there[k] != v]
    if there and not differs:
        names = ", ".join(sorted(there.keys() ^ ours.keys()))
        raise StateError(f"the state was saved by another version of pyggml: only one of them knows {names}")
    raise StateError("the state is of another model: " + ("; ".join(differs) or "it says nothing about its model"))


def _flat(model: object) -> dict[str, object]:
    """The description of a model as one flat dict, with the hparams among the other entries; empty for other values."""
    if not isinstance(model, dict):
        return {}
    outer = cast("dict[str, object]", model)
    inner = outer.get("hparams")
    flat = {k: v for k, v in outer.items() if k != "hparams"}
    return flat | cast("dict[str, object]", inner) if isinstance(inner, dict) else flat
