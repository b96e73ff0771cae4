"""`pyggml op-bench`: how close each kernel comes to what this machine can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Optional

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pyggml.backends.cpu import CpuBackend
from pyggml.backends.cpu.isa import isa_name
from pyggml.backends.cpu.peak import KINDS, compute_rate, read_rate
from pyggml.backends.cpu.repack import be_fast, can_repack, repack, repack_in_passing
from pyggml.buffers.alloc import steps_of
from pyggml.buffers.buffer import Buffer
from pyggml.dtypes import DType
from pyggml.opdef import opdef_of
from pyggml.tensor import Context, Tensor

from .command import Option
from .measure.op_cases import OP_CASES, Ne, OpCase
from .options import Json, Threads
from .outputs import print_json

COLD_BYTES = 96 << 20  # bytes of weights that no cache holds, for products of few columns: decoding reads a whole model
COLD_COLUMNS = 8
MIN_SECONDS = 0.2  # each row is measured at least so long
TABLE_WIDTH = 110


@dataclass(frozen=True)
class Row:
    """One measurement. `limit` is the share of the machine's limit that was reached; `bound` names that limit."""

    op: str
    type: str
    ne: list[int]
    isa: str
    layout: str  # "stored", "r16" for repacked weights, "fast" for the same in the fast form
    n_threads: int
    us: float
    gflops: float
    gb_s: float
    bound: str
    limit: float


def nodes_of(case: OpCase, dtype: DType, ne: Ne) -> list[Tensor]:
    """The op on random sources; products of few columns several times, each with its own weights."""
    with Context() as ctx:
        nodes = [case.build(ctx, dtype, ne)]
        if case.is_product and ne[-1] <= COLD_COLUMNS:
            while sum(bytes_of(t) for t in nodes) < COLD_BYTES:
                nodes.append(case.build(ctx, dtype, ne))
    for t in nodes:
        t.buffer = Buffer.allocate(t.nbytes) if t.view_src is None else None
    return nodes


def bytes_of(t: Tensor) -> int:
    """Bytes that a node reads and writes."""
    cost = opdef_of(t).cost(t)
    return cost.read + cost.written


def seconds_of(run: Callable[[], None]) -> float:
    """The shortest time of the runs that fit into MIN_SECONDS (at least three), after a first run that is not
    counted."""
    run()
    best, end, n = float("inf"), time.perf_counter() + MIN_SECONDS, 0
    while n < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        n += 1
    return best


def limit_of(isa: str, n_threads: int, t: Tensor, case: OpCase, n_nodes: int) -> tuple[float, str]:
    """The least seconds that the node can take: the larger of the time to read its bytes from the memory or cache that
    holds them, and the time of its operations in the fastest arithmetic that the instruction set has for its types."""
    kinds = ["f32"]
    source = t.src[0].dtype if t.src[0] is not None else t.dtype
    if case.is_product and source is not DType.F32:
        kinds += ["int8", "bf16"]
    rate = max(compute_rate(isa, kind, n_threads) for kind in kinds)
    nbytes = bytes_of(t)
    in_memory = 1 << (nbytes * n_nodes).bit_length()
    memory = nbytes / read_rate(isa, in_memory, n_threads)
    compute = opdef_of(t).cost(t).flops / rate
    return max((memory, "memory"), (compute, "compute"))


def measure(op: str, dtype: DType, ne: Ne, backend: CpuBackend) -> list[Row]:
    """One row, and two more when the backend repacks these weights."""
    case = OP_CASES[op]
    nodes = nodes_of(case, dtype, ne)
    least, bound = limit_of(backend.isa, backend.n_threads, nodes[0], case, len(nodes))
    flops, nbytes = opdef_of(nodes[0]).cost(nodes[0]).flops, bytes_of(nodes[0])

    def row(layout: str) -> Row:
        t = seconds_of(backend.compile(steps_of(nodes), lambda t: t).run) / len(nodes)
        us, gflops, gb_s = t * 1e6, flops / t / 1e9, nbytes / t / 1e9
        return Row(op, dtype.name, list(ne), backend.isa, layout, backend.n_threads, us, gflops, gb_s, bound, least / t)

    weights = [t.src[0] for t in nodes if case.is_product and t.src[0] is not None]
    repack_in_passing(weights)
    rows = [row("stored")]
    if weights and all(can_repack(backend.isa, w) for w in weights):
        repack(weights, isa=backend.isa)
        rows.append(row("r16"))
        be_fast(weights)
        rows.append(row("fast"))
    return rows


def parse_ne(text: str) -> Ne:
    """`4096,4096,1` -> its numbers."""
    parts = text.split(",")
    if not all(p.isdigit() and int(p) for p in parts):
        raise click.BadParameter(f"--ne takes positive numbers with commas between, not {text!r}")
    return tuple(map(int, parts))


def choose(ops: list[str] | None, types: list[str] | None, shapes: list[str] | None) -> list[tuple[str, DType, Ne]]:
    """The cases to measure: each op with its usual types and shapes, or with those asked for that it takes."""
    for name in ops or []:
        if name not in OP_CASES:
            raise click.BadParameter(f"unknown op {name!r}: known are {', '.join(OP_CASES)}")
    for name in types or []:
        if name.upper() not in DType.__members__:
            raise click.BadParameter(f"unknown type {name!r}")
    wanted = [DType[name.upper()] for name in types or []]
    nes = [parse_ne(text) for text in shapes or []]
    out: list[tuple[str, DType, Ne]] = []
    for op in ops or OP_CASES:
        case = OP_CASES[op]
        n_dims = len(case.shapes[0])
        if any(len(ne) != n_dims and case.dims != "ne" for ne in nes):
            raise click.BadParameter(f"--ne of {op} is {case.dims}")
        for dtype in [t for t in wanted if t in case.types] if wanted else case.default_types:
            out += [(op, dtype, ne) for ne in nes or case.shapes]
    if not out:
        raise click.BadParameter("none of these ops takes these types")
    return out


def print_limits(console: Console, isa: str, n_threads: int) -> None:
    """Print the machine's limits, which the rows are compared with."""
    rates = [f"{k} {r / 1e9:.0f}" for k in KINDS if (r := compute_rate(isa, k, n_threads))]
    sizes = {"L2": 1 << 19, "DRAM": 1 << 28}
    reads = [f"{name} {read_rate(isa, n * n_threads, n_threads) / 1e9:.0f}" for name, n in sizes.items()]
    limits = f"{', '.join(rates)} GFLOPS; read {', '.join(reads)} GB/s"
    console.print(f"{isa}, {n_threads} threads: {limits}", soft_wrap=True)


_OP_HELP = f"Measure this op (again for more): {', '.join(OP_CASES)}. Default: all."
_NE_HELP = "Shape (again for more): " + "; ".join(f"{op}: {c.dims}" for op, c in OP_CASES.items()) + "."


def op_bench(
    op: Annotated[Optional[list[str]], Option("--op", help=_OP_HELP)] = None,
    type_: Annotated[Optional[list[str]], Option("--type", help="Type of the first source, or weights.")] = None,
    ne: Annotated[Optional[list[str]], Option("--ne", help=_NE_HELP, metavar="N,N..")] = None,
    isa: Annotated[
        Optional[list[str]],
        Option("--isa", help="CPU level (again for more). Default: the one in use.", check=isa_name),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure kernels: GB/s, GFLOPS, and how much of this machine's measured limit that is.

    Products of up to 8 columns read weights that no cache holds, as decoding does; all else runs with warm caches. The
    limit is the larger of two times: for the bytes, read from what holds them, and for the operations.
    """
    todo = choose(op, type_, ne)
    console = Console()
    rows: list[Row] = []
    for level in isa or [isa_name()]:
        backend = CpuBackend(threads, level)
        if not as_json:
            print_limits(console, backend.isa, backend.n_threads)
        for name, dtype, shape in todo:
            rows += measure(name, dtype, shape, backend)
    if as_json:
        print_json([asdict(r) for r in rows])
        return
    table = Table("op", "type", "shape", "isa", "layout", "us", "GFLOPS", "GB/s", "of limit", box=SIMPLE_HEAD)
    for r in rows:
        shape = ",".join(map(str, r.ne))
        share = f"{r.limit:.0%} {r.bound}"
        table.add_row(r.op, r.type, shape, r.isa, r.layout, f"{r.us:.1f}", f"{r.gflops:.1f}", f"{r.gb_s:.1f}", share)
    Console(width=max(console.width, TABLE_WIDTH)).print(table)
