"""Inputs that fill themselves: a page of one's own asks for some, and nothing outside of it knows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyggml.models.blocks import Build, build_inp_embd, build_inp_out_ids, build_lm_head
from pyggml.models.memory.memory import Memory
from pyggml.models.ubatch import UBatch

import pyggml as gg
from pyggml.graph import Graph
from pyggml.types import Floats

PERIOD = 5


def _page(b: Build) -> Graph:
    """Embeddings, plus the token's place in its week, plus a number for each of the week's days."""

    def fill(u: UBatch, memory: Memory) -> tuple[Floats, Floats]:
        day = (u.pos % PERIOD).astype(np.float32)
        return day, np.tile(10.0 * np.arange(PERIOD, dtype=np.float32), (u.n_tokens, 1))

    with b.ctx:
        cur = build_inp_embd(b)
        leafs = {"inp_day": (gg.F32, (1, b.n_tokens)), "inp_week": (gg.F32, (PERIOD, b.n_tokens))}
        day, week = b.input_group(leafs, fill)
        cur = gg.add(gg.add(cur, day), gg.sum_rows(week))
        return build_lm_head(b, gg.get_rows(cur, build_inp_out_ids(b)))


@pytest.mark.parametrize("n_ubatch", [1, 3, 16])
def test_a_page_has_inputs_of_its_own(tiny: Path, n_ubatch: int) -> None:
    model = gg.load_model(tiny, repack=False)
    model.__dict__["architecture"] = replace(model.architecture, build=_page)
    w = {name: model.weights[f"{name}.weight"].numpy().astype(np.float64) for name in ("token_embd", "output")}
    ids = list(range(3, 33))
    days = np.arange(len(ids))[:, None] % PERIOD + 10.0 * sum(range(PERIOD))
    expected = (w["token_embd"][ids] + days) @ w["output"].T
    ctx = model.new_context(64, n_ubatch=n_ubatch, n_threads=1)
    rows = []
    for part in np.split(np.array(ids), [1, 2, 18, 21, 22]):  # of more tokens, and of fewer than before
        batch = gg.Batch.prompt(part.tolist(), ctx.memory.seq_pos_max(0) + 1, 0)
        batch.logits = [True] * len(part)
        ctx.decode(batch)
        rows.append(ctx.logits)
    got = np.concatenate(rows)
    np.testing.assert_allclose(got, expected[: len(got)], rtol=1e-4, atol=1e-3)
