"""Recurrences and convolutions that read states from cells and store them there: fused they give what their nodes give,
and leave the same in the cells."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.fusions.scan import SCANS
from pyggml.sched import Scheduler

from .test_fuse_patterns import by_fusing

N_CELLS = 5
ALL = [*isa_levels()]
MOVES = {  # cells that sequences go on from, and those that their states go to
    "other cells": ([0, 3], [1, 2]),
    "the same cells": ([4, 2], [4, 2]),
    "swapped": ([1, 2], [2, 1]),
    "one state for two, one of which keeps it": ([2, 2], [0, 2]),
    "both to one": ([0, 3], [1, 1]),
}


def floats(ctx: gg.Context, *shape: int, low: float = -1.0, high: float = 1.0) -> gg.Tensor:
    rng = np.random.default_rng([*shape])
    return ctx.from_numpy(rng.uniform(low, high, shape).astype(np.float32))


def ids_of(ctx: gg.Context, ids: list[int]) -> gg.Tensor:
    return ctx.from_numpy(np.array(ids, np.int32))


def put(cells: gg.Tensor, out: gg.Tensor, n_seqs: int, ids: gg.Tensor) -> gg.Tensor:
    """The states at the end of a result, into cells."""
    size = cells.ne[0]
    last = gg.view_2d(out, size, n_seqs, 4 * size, out.nbytes - 4 * size * n_seqs)
    return gg.set_rows(cells, gg.reshape_2d(last, size, n_seqs), ids)


def scan(ctx: gg.Context, op: str, n: int, n_tokens: int, read: list[int], write: list[int]) -> list[gg.Tensor]:
    """What the tokens of some sequences read, and the cells."""
    n_seqs, n_head = len(read), 3
    rows = 6 if op == "ssm_scan" else n
    cells = floats(ctx, N_CELLS, n * rows * n_head)
    at, to = ids_of(ctx, read), ids_of(ctx, write)
    if op == "ssm_scan":
        x, dt = floats(ctx, n_seqs, n_tokens, n_head, rows), floats(ctx, n_seqs, n_tokens, n_head)
        b, c = floats(ctx, n_seqs, n_tokens, 1, n), floats(ctx, n_seqs, n_tokens, 1, n)
        a = floats(ctx, n_head, 1, low=-1, high=0)
        out = gg.ssm_scan(gg.reshape_4d(cells, n, rows, n_head, N_CELLS), x, dt, a, b, c, at)
    elif op == "gated_delta_net":
        q, k, v = (floats(ctx, n_seqs, n_tokens, n_head, n) for _ in range(3))
        g, beta = (floats(ctx, n_seqs, n_tokens, n_head, 1, low=low, high=low + 1) for low in (-1, 0))
        state = gg.reshape_4d(gg.get_rows(cells, at), n, n, n_head, n_seqs)
        out = gg.gated_delta_net(q, k, gg.neg(v), g, beta, state)
    else:
        x = [floats(ctx, n_tokens * n_seqs, n_head, n, low=0) for _ in range(6)]
        state = gg.get_rows(cells, at)
        if op == "rwkv_wkv6":
            out = gg.rwkv_wkv6(x[0], x[1], x[2], floats(ctx, n_head, n), x[3], state)
        elif op == "rwkv_wkv7":
            out = gg.rwkv_wkv7(*x[:4], gg.neg(gg.scale(x[4], 1 / n)), x[5], state)
        else:
            out = gg.gated_linear_attn(*x[:4], state, 0.5)
    y = gg.view_1d(out, rows * n_head * n_tokens * n_seqs, 0)
    return [put(cells, out, n_seqs, to), gg.neg(y)]


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("n_tokens", [1, 3, 11])
@pytest.mark.parametrize("op", SCANS)
def test_scans(op: str, n_tokens: int, isa: str) -> None:
    """Few tokens and chunks of them, states that are whole vectors and others, wherever states come from and go to."""
    for n in (20, 64):
        for read, write in MOVES.values():
            _, fused = by_fusing(lambda ctx, n=n, r=read, w=write: scan(ctx, op, n, n_tokens, r, w), isa)
            gathered = [] if op == "ssm_scan" else ["get_rows", *["reshape"] * (op == "gated_delta_net")]
            assert fused == [[*gathered, op, "view", "reshape", "set_rows"]]


def test_scan_of_channels() -> None:
    """Mamba-1: heads of one element."""

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        n, n_head, n_tokens = 16, 20, 3
        cells = floats(ctx, N_CELLS, n * n_head)
        x, dt = floats(ctx, 2, n_tokens, n_head, 1), floats(ctx, 2, n_tokens, n_head)
        b, a = floats(ctx, 2, n_tokens, 1, n), floats(ctx, n_head, n, low=-1, high=0)
        s = gg.reshape_4d(cells, n, 1, n_head, N_CELLS)
        out = gg.ssm_scan(s, x, dt, a, b, b, ids_of(ctx, [1, 2]))
        return [put(cells, out, 2, ids_of(ctx, [2, 1])), gg.neg(gg.view_1d(out, 2 * n_tokens * n_head, 0))]

    for isa in ALL:
        _, fused = by_fusing(build, isa)
        assert len(fused) == 1


def window(ctx: gg.Context, d_conv: int, channels: int, x: gg.Tensor, read: list[int], write: list[int]) -> Result:
    n_seqs = len(read)
    cells = floats(ctx, N_CELLS, (d_conv - 1) * channels)
    before = gg.reshape_3d(gg.get_rows(cells, ids_of(ctx, read)), d_conv - 1, channels, n_seqs)
    both = gg.concat(before, gg.transpose(x), 0)
    last = gg.view_3d(both, d_conv - 1, channels, n_seqs, both.nb[1], both.nb[2], 4 * x.ne[1])
    rows = gg.reshape_2d(gg.cont(last), cells.ne[0], n_seqs)
    return both, gg.set_rows(cells, rows, ids_of(ctx, write))


Result = tuple[gg.Tensor, gg.Tensor]


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("n_tokens", [1, 2, 9])
@pytest.mark.parametrize("after", ["", "bias", "silu", "bias silu"])
def test_convolutions(after: str, n_tokens: int, isa: str) -> None:
    """Fewer tokens than a window has and more, whole blocks of channels and others; rows of x lie apart."""
    for d_conv, channels in ((2, 7), (4, 64), (5, 131)):
        for read, write in MOVES.values():

            def build(
                ctx: gg.Context, d: int = d_conv, n: int = channels, read: list[int] = read, write: list[int] = write
            ) -> list[gg.Tensor]:
                wide = floats(ctx, len(read), n_tokens, n + 3)
                x = gg.view_3d(wide, n, n_tokens, len(read), wide.nb[1], wide.nb[2], 8)
                both, stored = window(ctx, d, n, x, read, write)
                y = gg.reshape_2d(gg.ssm_conv(both, floats(ctx, n, d)), n, n_tokens * len(read))
                y = gg.add(y, floats(ctx, n)) if "bias" in after else y
                y = gg.silu(y) if "silu" in after else y
                return [stored, gg.neg(y)]

            _, fused = by_fusing(build, isa)
            ops = ["get_rows", "reshape", "transpose", "concat", "view", "cont", "reshape", "set_rows", "ssm_conv"]
            ops += ["reshape"] * bool(after) + ["add"] * ("bias" in after) + ["silu"] * ("silu" in after)
            assert fused == [ops]


def unfused(build: Callable[[gg.Context], list[gg.Tensor]]) -> bool:
    _, fused = by_fusing(build, ALL[-1])
    return not any({"set_rows", "ssm_scan"} & {*ops} for ops in fused)


@pytest.mark.parametrize("what", ["output", "all of it", "its states", "cells before", "older states", "other cells"])
def test_scans_that_others_look_at(what: str) -> None:
    """Whoever reads the states in the result, or the cells on the way, finds what the nodes give."""

    def build(ctx: gg.Context) -> list[gg.Tensor]:
        n, rows, n_head, slots = 16, 4, 2, 1 + (what == "older states")
        cells = floats(ctx, N_CELLS, n * rows * n_head)
        into = floats(ctx, N_CELLS, n * rows * n_head) if what == "other cells" else cells
        x, dt, b = floats(ctx, 1, 1, n_head, rows), floats(ctx, 1, 1, n_head), floats(ctx, 1, 1, 1, n)
        s = gg.reshape_4d(cells, n, rows, n_head, N_CELLS)
        out = gg.ssm_scan(s, x, dt, gg.neg(floats(ctx, n_head, 1)), b, b, ids_of(ctx, [1]), slots)
        y = gg.view_1d(out, rows * n_head, 0)
        more = {
            "output": lambda: [out],
            "all of it": lambda: [gg.neg(out)],
            "its states": lambda: [gg.neg(gg.view_1d(out, rows * n_head + 1, 0))],
            "cells before": lambda: [gg.neg(cells)],
        }.get(what, list)
        if what == "cells before":  # between the scan and what it stores
            return [gg.neg(y), *more(), put(into, out, 1, ids_of(ctx, [1]))]
        return [put(into, out, 1, ids_of(ctx, [1])), gg.neg(y), *more()]

    assert unfused(build)


@pytest.mark.parametrize("what", ["window", "product", "stored"])
def test_convolutions_that_others_look_at(what: str) -> None:
    def build(ctx: gg.Context) -> list[gg.Tensor]:
        both, stored = window(ctx, 4, 8, floats(ctx, 1, 3, 8), [0], [1])
        conv = gg.ssm_conv(both, floats(ctx, 8, 4))
        if what == "window":
            return [stored, gg.silu(conv), gg.neg(both)]
        if what == "product":
            return [stored, conv, gg.silu(conv)]
        return [gg.neg(stored), gg.silu(conv)]

    _, fused = by_fusing(build, ALL[-1])
    assert fused == ([[*fused[0][:-1], "ssm_conv"]] if what == "product" else [])


@pytest.mark.parametrize(("read", "write", "bad"), [([0, 7], [1, 2], 7), ([0, 1], [-1, 2], -1), ([0, 1], [1, 5], 5)])
@pytest.mark.parametrize("op", ["ssm_scan", "rwkv_wkv7"])
def test_a_cell_that_is_not_there(op: str, read: list[int], write: list[int], bad: int) -> None:
    with gg.Context() as ctx:
        g = gg.Graph()
        for t in scan(ctx, op, 16, 2, read, write):
            g.build_forward_expand(t.set_output())
    with pytest.raises(gg.BackendError, match=f"set_rows.*row index {bad} is out of range"):
        Scheduler([CpuBackend(2)]).alloc(g).run()


def test_memory_is_given_back() -> None:
    """What only the views inside a step lead to does not live on."""

    def size(n: int) -> int:
        with gg.Context() as ctx:
            g, x = gg.Graph(), gg.neg(floats(ctx, 1, 9, 64))
            for _ in range(n):
                both, stored = window(ctx, 4, 64, x, [0], [1])
                g.build_forward_expand(stored)
                x = gg.neg(gg.silu(gg.ssm_conv(both, floats(ctx, 64, 4))))
            g.build_forward_expand(x.set_output())
        scheduler = Scheduler([CpuBackend(1)])
        scheduler.alloc(g)
        return scheduler.buffer_size("cpu")

    assert size(20) == size(4)
