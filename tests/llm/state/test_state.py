"""Saved states: what comes back is what was there; what is no good state is refused and changes nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import GGMLError, KVCacheFull, StateError
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model
from pyggml.llm.state.save_load import load_seq_bytes, load_state_bytes, seq_bytes, state_bytes

from ...tiny_model import WriteModel

IDS = [1, 70, 68, 80, 111, 35, 114]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def new(model: Model, **kwargs: Any) -> LlamaContext:
    return model.new_context(**{"n_ctx": 64, "n_seq_max": 3, "n_threads": 1, **kwargs})


def continued(ctx: LlamaContext, seqs: tuple[int, ...] = (0, 1)) -> np.ndarray:
    batch = Batch()
    for s in seqs:
        batch.add(90, ctx.memory.seq_pos_max(s) + 1, s, True)
    ctx.decode(batch)
    return ctx.logits


def filled(model: Model, **kwargs: Any) -> LlamaContext:
    """Two sequences that share a prefix, a hole, and a shift that is still to be applied."""
    ctx = new(model, **kwargs)
    ctx.decode(IDS)
    ctx.memory.seq_cp(0, 1, 0, 5)
    continued(ctx)
    ctx.memory.seq_rm(0, 6)
    ctx.memory.seq_add(0, 2, -1, 3)
    return ctx


def test_a_loaded_context_goes_on_as_the_saved_one(model: Model, tmp_path: Path) -> None:
    ctx, other = filled(model), new(model)
    logits = ctx.logits
    ctx.save_state(tmp_path / "s", [1, 2, 3])
    assert os.listdir(tmp_path) == ["s"]
    other.decode([9, 9])
    assert other.load_state(tmp_path / "s") == [1, 2, 3]
    assert other.memory.cells == ctx.memory.cells and other.memory.caches[0].head == ctx.memory.caches[0].head
    assert other.memory.caches[0].has_shift
    assert (other.logits == logits).all() and (other.logits_ith(1) == logits[1]).all()
    assert state_bytes(other, [1, 2, 3]) == (tmp_path / "s").read_bytes()
    for _ in range(3):
        assert (continued(other) == continued(ctx)).all()


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_layouts(model: Model, dtype: DType) -> None:
    """The file does not know how V lies in the cache, nor how large that is."""
    types = {"type_k": dtype, "type_v": dtype}
    ctx = filled(model, **types)
    data = state_bytes(ctx)
    expected = continued(ctx)
    for kwargs in ({"n_ctx": 32, "n_seq_max": 2}, {"n_ctx": 256, "n_seq_max": 5}, {"flash_attn": True}):
        other = new(model, **types, **kwargs)
        load_state_bytes(other, data)
        assert state_bytes(other)[-2000:-32] == data[-2000:-32]
        assert np.abs(continued(other) - expected).max() < (1e-5 if dtype is DType.F32 else 2e-2)
    assert load_state_bytes(ctx, state_bytes(new(model, **types))) == [] and ctx.memory.used == 0


def test_quantised_cache(tiny: Path, write_model: WriteModel) -> None:
    model = load_model(write_model(kv={"llama.embedding_length": 128}))
    types = {"type_k": DType.Q8_0, "type_v": DType.Q8_0, "flash_attn": True}
    ctx, other = filled(model, **types), new(model, **types)
    load_state_bytes(other, state_bytes(ctx))
    assert (continued(other) == continued(ctx)).all()


def test_cells_move_together_where_the_cache_is_smaller(model: Model) -> None:
    ctx = new(model, n_ctx=96)
    ctx.decode(list(range(3, 83)))
    ctx.memory.seq_rm(0, 4, 76)
    ctx.memory.seq_add(0, 76, -1, -72)
    other = new(model, n_ctx=32)
    load_state_bytes(other, state_bytes(ctx))
    assert other.memory.caches[0].pos[:9].tolist() == [*range(8), -1] and other.memory.caches[0].head == 0
    assert np.abs(continued(other, (0,)) - continued(ctx, (0,))).max() < 2e-2


def test_a_sequence_joins_others(model: Model, tmp_path: Path) -> None:
    ctx, other = filled(model), new(model, n_ctx=32)
    ctx.save_seq(tmp_path / "s", 1)
    other.decode([9, 8, 7])
    other.memory.seq_rm(0, 0, 1)
    assert other.load_seq(tmp_path / "s") == 1
    assert other.memory.caches[0].pos[:9].tolist() == [0, 1, 2, 1, 5, 6, 7, 5, -1]  # the hole first
    assert load_seq_bytes(other, seq_bytes(ctx, 0)) == 2
    with pytest.raises(StateError, match="all 3 sequences are in use"):
        other.load_seq(tmp_path / "s")
    assert other.load_seq(tmp_path / "s", 0) == 0
    got = continued(other, (0, 1, 2))
    expected = continued(ctx, (0, 1))
    assert np.abs(got - expected[[1, 1, 0]]).max() < 2e-2
    with pytest.raises(GGMLError, match=r"sequence 3 is outside 0\.\.2"):
        other.load_seq(tmp_path / "s", 3)
    with pytest.raises(GGMLError, match=r"sequence 3 is outside 0\.\.2"):
        other.save_seq(tmp_path / "s", 3)


def test_interleaved_caches(tiny: Path) -> None:
    """Layers with a sliding window keep other cells than those that see all; both come back."""
    model = load_model(tiny)
    model.hparams = replace(model.hparams, n_swa=6, swa_pattern=2)
    ctx, other = new(model, n_batch=16), new(model, n_batch=16)
    for _ in range(2):
        ctx.decode([*IDS, 5, 6])
    assert ctx.memory.used == 18 > ctx.memory.caches[1].used
    ctx.memory.seq_cp(0, 1)
    data, seq = state_bytes(ctx), seq_bytes(ctx, 1)
    load_state_bytes(other, data)
    assert (continued(other) == continued(ctx)).all()
    third = new(model, n_batch=16)
    third.decode([3, 4])
    assert load_seq_bytes(third, seq) == 1 and third.memory.used == 20
    expected = new(model, n_batch=16)
    load_state_bytes(expected, data)
    assert np.abs(continued(third, (1,)) - continued(expected, (1,))).max() < 2e-2
    refused(filled(load_model(tiny)), data, "n_swa is 6 there and 0 here; swa_pattern is 2 there and 0 here")


def refused(ctx: LlamaContext, data: bytes, text: str, load: Callable[..., Any] = load_state_bytes) -> None:
    before, logits = state_bytes(ctx), ctx.logits
    error = KVCacheFull if "cells" in text else StateError
    with pytest.raises(error, match=text):
        load(ctx, data)
    assert state_bytes(ctx) == before and ctx.logits is logits


def test_what_does_not_fit_changes_nothing(model: Model) -> None:
    small = new(model, n_ctx=32, n_seq_max=1)
    small.decode([5] * 20)
    large = new(model)
    large.decode(list(range(3, 43)))
    refused(small, state_bytes(large), "40 cells, the KV cache 32")
    refused(small, seq_bytes(large, 0), "all 1 sequences", load_seq_bytes)
    refused(small, seq_bytes(large, 0), "40 cells are needed; 32 of the 32", lambda *a: load_seq_bytes(*a, seq=0))
    refused(small, state_bytes(filled(model)), "a sequence 1, but n_seq_max is 1")
    refused(small, seq_bytes(filled(model), 0), "the state of a sequence, not of a context")
    refused(small, state_bytes(filled(model)), "the state of a context, not of a sequence", load_seq_bytes)


def test_other_models_are_refused(model: Model, tiny: Path, write_model: WriteModel) -> None:
    data = state_bytes(filled(model))
    longer = load_model(tiny, kv_overrides={"llama.rope.freq_base": 5000.0})
    refused(filled(longer), data, r"rope_freq_base is 10000\.0 there and 5000\.0 here")
    refused(filled(model, type_k=DType.F32), data, "type_k is F16 there and F32 here")
    trained = load_model(write_model(seed=8))
    refused(filled(trained), data, "weights is [0-9a-f]+ there and [0-9a-f]+ here")


def test_truncated_damaged_foreign_and_newer_files_are_refused(model: Model, tmp_path: Path) -> None:
    data = state_bytes(filled(model), IDS)
    ctx = filled(model)
    for n in (*range(1, 28), *range(28, len(data), 397), len(data) - 1):
        refused(ctx, data[:n], f"truncated: {n} ")
    rng = np.random.default_rng(1)
    for at in (*range(24, 64), *rng.integers(24, len(data), 60)):
        broken = bytearray(data)
        broken[at] ^= 1 << rng.integers(8)
        refused(ctx, bytes(broken), "damaged")
    refused(ctx, b"", "no saved state")
    refused(ctx, b"GGUF" + data[4:], "no saved state")
    refused(ctx, data[:8] + struct.pack("<I", 2) + data[12:], "version 2; this pyggml reads version 1")
    refused(ctx, data + b"x", "damaged")
    with pytest.raises(StateError, match=r"cannot read .*missing: No such file"):
        ctx.load_state(tmp_path / "missing")
    with pytest.raises(StateError, match="cannot read"):
        ctx.load_state(tmp_path)


def signed(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<8sIIQ", b"PGSTATE\0", 1, len(text), 24 + len(text) + len(body) + 32) + text + body
    return data + hashlib.sha256(data).digest()


def test_lies_with_a_right_checksum_are_refused(model: Model) -> None:
    ctx = filled(model)
    data = state_bytes(ctx, IDS)
    n = struct.unpack_from("<I", data, 12)[0]
    header, body = json.loads(data[24 : 24 + n]), data[24 + n : -32]
    assert load_state_bytes(ctx, signed(header, body)) == IDS
    cache = header["caches"][0]
    for change in (
        {"caches": [{**cache, "cells": 2**31 - 1}]},
        {"caches": [{**cache, "cells": -1}]},
        {"caches": [{**cache, "cells": 2.0}]},
        {"caches": [{**cache, "cells": True}]},
        {"caches": [{**cache, "seqs": 10**6}]},
        {"caches": [{**cache, "head": "a"}]},
        {"caches": [{}]},
        {"caches": [cache, cache]},
        {"caches": [cache, 1]},
        {"caches": 1},
        {"tokens": 2**40},
        {"outputs": 1},
        {"outputs": 2**31 - 1},
        {"kind": 1},
        {"model": None},
        {"model": {}},
        {"model": {**header["model"], "more": 1}},
        {"model": {**header["model"], "hparams": []}},
    ):
        refused(ctx, signed({**header, **change}, body), "state")
    for text in (b"", b"[]", b"{", b"\xff", b"[" * 100000, b"1" * 5000):
        refused(ctx, signed(text, body), "not a JSON object")
    earlier = {**header["model"], "hparams": {**header["model"]["hparams"], "n_loops": 1}}
    refused(
        ctx, signed({**header, "model": earlier}, body), "another version of pyggml: only one of them knows n_loops"
    )
    refused(ctx, signed(header, body + b"1"), "1 bytes too many")
    tokens, cells = 4 * len(IDS), 4 * cache["cells"]
    starts = np.cumsum([0, tokens, cells, cells, cells])
    beyond = 2**31 - 1  # a position that no token can have, and no operation takes away
    for at, value in (
        *((starts[0], 259), (starts[1], 10**6), (starts[2], -1), (starts[2], beyond), (starts[4], 2), (starts[4], 0)),
    ):
        broken = bytearray(body)
        if at == starts[4] and not value:  # a cell of no sequence
            for s in range(3):
                broken[at + s * cache["cells"]] = 0
        else:
            struct.pack_into("<i" if at < starts[4] else "<b", broken, at, value)
        refused(ctx, signed(header, bytes(broken)), "make no sense")


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
@pytest.mark.parametrize("named", [False, True])
def test_a_failed_write_leaves_the_file_before(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if named:
        monkeypatch.delattr(os, "O_TMPFILE")
    ctx, path = filled(model), tmp_path / "s"
    ctx.save_state(path)
    before, n_open = path.read_bytes(), len(os.listdir("/proc/self/fd"))
    ctx.decode([5])
    with monkeypatch.context() as m:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if call == "write":  # not even what is buffered can be written
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        else:
            m.setattr(os, call, fail)
        try:
            with pytest.raises(StateError, match=r"cannot write .*/s: (No space left|File too large)"):
                ctx.save_state(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["s"]
    with pytest.raises(StateError, match=r"cannot write .*/none/s: No such file"):
        ctx.save_state(tmp_path / "none" / "s")
    assert len(os.listdir("/proc/self/fd")) <= n_open  # fewer where an earlier test's model went meanwhile
