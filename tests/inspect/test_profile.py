"""What a profile says adds up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml.backends.cpu import CpuBackend
from pyggml.errors import BackendError
from pyggml.inspect.profile import Profile, time_line
from pyggml.inspect.record import record
from pyggml.llm.model import load_model
from pyggml.sched import Scheduler


def test_steps_of_a_decode(tiny: Path) -> None:
    ctx = load_model(tiny).new_context(n_ctx=64, n_threads=2)
    begin = time.perf_counter_ns()
    with Profile(ctx.scheduler) as p:
        ctx.decode([5, 6, 7])
    end = time.perf_counter_ns()
    (program,) = ctx.scheduler.alloc(g := ctx.build_graph(3)).programs
    assert len(p.steps) == len(program.lowered.nodes) and g.n_nodes > len(p.steps)  # pyright: ignore
    times = [t for s in p.steps for t in s.spans.values()]
    assert all(begin <= a <= b <= end for a, b in times)
    assert sum(r.ns for r in p.table()) <= p.wall_ns * 2 and 0 <= p.idle < 1
    assert sum(r.n for r in p.table("layer")) == len(p.steps)
    assert [r.key for r in p.table("layer")] == ["", "0", "1"]
    assert {"mul_mat", "attention"} <= {r.key for r in p.table()}
    assert all(r.flops > 0 and r.n_bytes > 0 for r in p.table() if r.key in ("mul_mat", "attention"))
    with pytest.raises(BackendError, match=r"by must be one of op, layer, scope, not 'ops' .is 'op' meant"):
        p.table("ops")  # pyright: ignore[reportArgumentType]
    n = len(p.steps)
    ctx.decode([8])
    assert len(p.steps) == n  # only within the block
    events = time_line([p, p])["traceEvents"]
    assert len(events) == 2 * len(times) and min(e["ts"] for e in events) == 0


def test_one_at_a_time_and_only_the_cpu() -> None:
    scheduler = Scheduler((CpuBackend(1),))
    with Profile(scheduler), pytest.raises(BackendError, match="measured already"), Profile(scheduler):
        pass
    with Profile(scheduler):
        pass
    with pytest.raises(BackendError, match="only the cpu backend is measured; here are ref"):
        Profile(Scheduler(("ref",)))


def test_on_the_command_line(tiny: Path, tmp_path: Path) -> None:
    line = ["bench", "-m", str(tiny), "-p", "8", "-n", "4", "-r", "1", "--profile"]
    out = CliRunner().invoke(app, [*line, "--trace-json", str(tmp_path / "t.json")])
    assert out.exit_code == 0 and "pp8, by layer" in out.output and "threads idle" in out.output
    assert {e["ph"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {"X"}
    rows = json.loads(CliRunner().invoke(app, [*line, "--json"]).output)
    assert [r["test"] for r in rows] == ["pp8", "tg4"] and rows[0]["profile"]["op"][0]["ns"] > 0


def test_a_recorded_graph_runs_twice() -> None:
    """Once for the values, once for the times; only short runs are measured again."""
    runs: list[bool] = []

    def slow(out: Any, a: Any) -> None:
        runs.append(True)
        time.sleep(0.051)
        out[...] = a + 1

    y = gg.map_custom(slow, gg.Context().from_numpy(np.ones(4, np.float32)))
    run = record(gg.Graph().build_forward_expand(y))
    assert len(runs) == 2 and run.values[y].mean == 2 and run.wall_ns > 50_000_000
