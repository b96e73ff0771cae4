"""`pyggml op-bench`: every op it offers runs, and its figures add up."""

from __future__ import annotations

import json

import click
import pytest
from pyggml.tools import op_bench
from pyggml.tools.cli import main
from pyggml.tools.measure.op_cases import OP_CASES

from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.peak import KINDS, compute_rate, read_rate
from pyggml.dtypes import DType
from pyggml.opdef import opdef_of

SMALL = {
    "mul_mat": (256, 32, 2),
    "mul_mat_id": (256, 32, 4, 3),
    "out_prod": (256, 32, 2),
    "out_prod_t": (256, 32, 2),
    "flash_attn_ext": (64, 2, 4, 32, 2),
    "get_rows": (256, 8, 4),
    "rope_ext": (64, 2, 4),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_bench, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(op_bench, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr("pyggml.backends.cpu.peak._SECONDS", 0.0)


@pytest.mark.parametrize("op", sorted(OP_CASES))
def test_ops(op: str) -> None:
    case = OP_CASES[op]
    ne = SMALL.get(op, (256, 4))
    for dtype in case.default_types:
        rows = op_bench.measure(op, dtype, ne, CpuBackend(1))
        assert [r.layout for r in rows] in (["stored"], ["stored", "r16", "fast"])
        for r in rows:
            assert (r.op, r.type, tuple(r.ne)) == (op, dtype.name, ne)
            assert r.us > 0 and r.gb_s > 0 and r.limit > 0 and r.bound in ("memory", "compute")
            node = op_bench.nodes_of(case, dtype, ne)[0]
            assert r.gflops * r.us * 1e3 == pytest.approx(opdef_of(node).cost(node).flops)


def test_few_columns_meet_cold_weights() -> None:
    nodes = op_bench.nodes_of(OP_CASES["mul_mat"], DType.Q4_0, (256, 32, 1))
    assert sum(op_bench.bytes_of(t) for t in nodes) >= 1 << 16 and len({id(t.src[0]) for t in nodes}) == len(nodes)
    assert len(op_bench.nodes_of(OP_CASES["mul_mat"], DType.Q4_0, (256, 32, 64))) == 1


def test_peaks() -> None:
    for isa in isa_levels():
        assert read_rate(isa, 1 << 16, 1) > 0 and compute_rate(isa, "f32", 1) > 0
    assert all(compute_rate("generic", kind, 1) == 0 for kind in KINDS if kind != "f32")


def test_choices() -> None:
    chosen = op_bench.choose(["mul_mat", "add"], ["q4_0"], None)
    assert chosen == [("mul_mat", DType.Q4_0, ne) for ne in OP_CASES["mul_mat"].shapes]
    assert {op for op, _, _ in op_bench.choose(None, None, None)} == set(OP_CASES)
    for bad in ((["nope"], None, None), (None, ["Q9"], None), (["mul_mat"], None, ["4,4"]), (["add"], None, ["4,x"])):
        with pytest.raises(click.BadParameter):
            op_bench.choose(*bad)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["op-bench", "--op", "mul_mat", "--type", "Q4_0", "--ne", "256,32,1", "--isa", "generic", "-t", "1"]
    with pytest.raises(SystemExit) as e:
        main([*args, "--json"])
    assert e.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["type"], r["isa"], r["n_threads"]) for r in rows] == [("Q4_0", "generic", 1)]
    with pytest.raises(SystemExit):
        main(args)
    shown = capsys.readouterr().out
    assert "GFLOPS" in shown and "of limit" in shown and "256,32,1" in shown
