"""Damaged states, most with a right checksum: each loads, or raises and has changed nothing; then there is a decode."""

from __future__ import annotations

import hashlib
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import StateError
from pyggml.llm.generate.prompt_cache import open_session
from pyggml.llm.state.save_load import load_seq_bytes, load_state_bytes, seq_bytes, state_bytes

from ..llm.state.test_state import filled, new
from ..tiny_model import write_gguf
from .workers import attack

FIXED, DIGEST = 24, 32  # bytes before the header and after the arrays
INTS = [-(2**31), -(2**16), -2, -1, 0, 1, 2, 3, 63, 64, 65, 2**15, 2**20, 2**30, 2**31 - 2, 2**31 - 1]
ODD: list[Any] = [*INTS, 2**63, -(2**70), 0.5, float("nan"), None, True, "", "x", [], {}, [[]], [{}], {"cells": 1}]


@cache
def model_of(path: Path) -> gg.Model:
    return gg.load_model(path)


def sealed(header: bytes, body: bytes) -> bytes:
    data = struct.pack("<8sIIQ", b"PGSTATE\0", 1, len(header), FIXED + len(header) + len(body) + DIGEST) + header + body
    return data + hashlib.sha256(data).digest()


def mutated_json(rng: np.random.Generator, value: Any) -> Any:
    """With one value somewhere inside replaced, missing or added."""
    if isinstance(value, dict) and value and rng.integers(8):
        key = str(rng.choice(list(value)))
        if rng.integers(6) == 0:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated_json(rng, value[key])}
    if isinstance(value, list) and value and rng.integers(8):
        i = int(rng.integers(len(value)))
        return [*value[:i], mutated_json(rng, value[i]), *value[i + int(rng.integers(2)) :]]
    if type(value) is int and rng.integers(2):
        return value + int(rng.choice([-2, -1, 1, 2, 30]))
    return ODD[int(rng.integers(len(ODD)))]


def mutated_state(rng: np.random.Generator, data: bytes) -> bytes:
    (n,) = struct.unpack_from("<I", data, 12)
    header, body = data[FIXED : FIXED + n], bytearray(data[FIXED + n : -DIGEST])
    what = int(rng.integers(8))
    if what == 0:  # as a disk may do it: the checksum tells
        d = bytearray(data)
        d[int(rng.integers(len(d)))] ^= 1 << int(rng.integers(8))
        return bytes(d) if rng.integers(2) else data[: int(rng.integers(len(data)))]
    if what == 1:
        del body[int(rng.integers(len(body))) :]
    elif what == 2:
        body += bytes(int(rng.integers(1, 400)))
    elif what <= 4:
        header = json.dumps(mutated_json(rng, json.loads(header))).encode()
    if what == 5:
        h = bytearray(header)
        h[int(rng.integers(n))] = int(rng.integers(256))
        header = bytes(h)
    elif what >= 3:
        for _ in range(int(rng.integers(0 if what < 5 else 1, 4))):
            # the positions and sequences of cells lie at the begin, logits at the end
            span = min(len(body), 400) if rng.integers(3) else len(body)
            at = int(rng.integers(max(span // 4, 1))) * 4
            body[at : at + 4] = struct.pack("<i", int(rng.choice(INTS)))
    return sealed(header, bytes(body))


def load_damaged(rng: np.random.Generator, folder: Path, source: Path, kind: str) -> str:
    model = model_of(source)
    sound = filled(model)
    data = mutated_state(rng, seq_bytes(sound, 0) if kind == "sequence" else state_bytes(sound, [1, 2, 3]))
    ctx = new(model, n_ctx=int(rng.choice([32, 64, 96])), n_seq_max=int(rng.choice([2, 3, 4])))
    ctx.decode([1, 9, 9])
    before = state_bytes(ctx), ctx.logits.copy()
    try:
        if kind == "context":
            load_state_bytes(ctx, data)
        elif kind == "sequence":
            load_seq_bytes(ctx, data, [None, 0, 1][int(rng.integers(3))])
        else:
            (folder / "session").write_bytes(data)
            open_session(ctx, folder / "session", [[], [1, 2, 3], [1, 5]][int(rng.integers(3))])
        outcome = "loaded"
    except (StateError, gg.KVCacheFull) as e:
        outcome = type(e).__name__
        assert state_bytes(ctx) == before[0] and np.array_equal(ctx.logits, before[1])
    for seq in range(2):
        try:
            batch = gg.Batch()
            batch.add(90, ctx.memory.seq_pos_max(seq) + 1, [seq], True)
            ctx.decode(batch)
        except gg.GGMLError as e:
            outcome += f", then {type(e).__name__}"
    load_state_bytes(ctx, state_bytes(ctx))
    return outcome


@pytest.mark.parametrize("kind", ["context", "sequence", "session"])
def test_states(kind: str, tmp_path: Path) -> None:
    attack(load_damaged, tmp_path, write_gguf(tmp_path / "tiny.gguf"), kind)
