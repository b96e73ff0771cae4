"""`pyggml quantize`: rewrite a GGUF model in another file type, with llama.cpp's mixes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from pyggml.dtypes import DType
from pyggml.errors import DTypeError
from pyggml.llm.quantize.imatrix import load_imatrix
from pyggml.llm.quantize.mixes import MIXES, find_mix
from pyggml.llm.quantize.rewrite import Plan, TensorPlan, plan_quantization, write_quantized
from pyggml.tensor import rank_of

from .options import Json, Threads

TABLE_WIDTH = 110  # figures are not cut where the terminal is narrower, or none
_TYPE_HELP = f"One of {', '.join(MIXES)}."


def parse_type(text: str | None) -> DType | None:
    """A tensor type by its name, in any case."""
    if text is None:
        return None
    if text.upper() not in DType.__members__:
        raise typer.BadParameter(f"unknown tensor type {text!r}: known are {', '.join(DType.__members__)}")
    return DType[text.upper()]


def row_of(t: TensorPlan) -> dict[str, Any]:
    """What is known of a tensor as plain objects."""
    row: dict[str, Any] = {
        "name": t.source.name,
        "ne": list(t.source.ne),
        "from": t.source.dtype.name,
        "to": t.dtype.name,
        "bits_per_weight": t.bits_per_weight,
    }
    if t.error is not None:
        row.update(rmse=t.error.rmse, nmse=t.error.nmse, max_error=t.error.max_error)
    return row


def table_of(plan: Plan) -> Table:
    """The tensors, one per line, with their errors where they were measured."""
    table = Table("tensor", "ne", "from", "to", "bits/weight", "RMSE", "NMSE", "max error", box=SIMPLE_HEAD)
    for t in plan.tensors:
        e = t.error
        errors = ["", "", ""] if e is None else [f"{e.rmse:.3e}", f"{e.nmse:.3e}", f"{e.max_error:.3e}"]
        ne = "x".join(map(str, t.source.ne[: rank_of(t.source.ne)]))
        table.add_row(t.source.name, ne, t.source.dtype.name, t.dtype.name, f"{t.bits_per_weight:.2f}", *errors)
    return table


def with_bar(name: str, run: Callable[[Callable[[int, int], None]], object]) -> None:
    """Run something that reports (done, in all), with a bar on a terminal."""
    stderr = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        run(lambda done, total: bar.update(task, completed=done, total=total))


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="GGUF model to read.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write; it appears when it is complete.")],
    file_type: Annotated[str, typer.Argument(metavar="TYPE", help=_TYPE_HELP)],
    threads: Threads = None,
    imatrix: Annotated[
        Optional[Path], typer.Option("--imatrix", help="Importance matrix (llama.cpp's GGUF or .dat).", metavar="FILE")
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="No mix: every matrix in the same type.")] = False,
    output_tensor_type: Annotated[
        Optional[str], typer.Option("--output-tensor-type", help="Type of output.weight.", metavar="TYPE")
    ] = None,
    token_embedding_type: Annotated[
        Optional[str], typer.Option("--token-embedding-type", help="Type of token_embd.weight.", metavar="TYPE")
    ] = None,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Accept tensors that are quantized already; quality suffers.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show types and sizes; write nothing.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Show each tensor's error.")] = False,
    as_json: Json = False,
) -> None:
    """Rewrite a GGUF model in another file type."""
    try:
        name, _ = find_mix(file_type)
    except DTypeError as e:
        raise typer.BadParameter(str(e)) from None
    plan = plan_quantization(
        source,
        name,
        imatrix=None if imatrix is None else load_imatrix(imatrix),
        pure=pure,
        output_tensor_type=parse_type(output_tensor_type),
        token_embedding_type=parse_type(token_embedding_type),
        allow_requantize=allow_requantize,
        report=report and not dry_run,
    )
    stderr = Console(stderr=True)
    if plan.without_imatrix:
        stderr.print(
            f"warning: {len(plan.without_imatrix)} tensors get so few bits that they want an importance matrix "
            f"(--imatrix), the first is {plan.without_imatrix[0]}",
            soft_wrap=True,
        )
    if not dry_run:
        with_bar(name, lambda progress: write_quantized(plan, out, threads, progress))
    bits = 8 * plan.bytes_after / plan.n_elements
    if as_json:
        about = {"in": str(source), "out": None if dry_run else str(out), "file_type": name}
        sizes = {"bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after, "bits_per_weight": bits}
        print(json.dumps({**about, **sizes, "tensors": [row_of(t) for t in plan.tensors]}))
        return
    console = Console()
    if report or dry_run:
        Console(width=max(console.width, TABLE_WIDTH)).print(table_of(plan))
    sizes = f"{plan.bytes_before / 2**20:.2f} MiB -> {plan.bytes_after / 2**20:.2f} MiB, {bits:.2f} bits per weight"
    console.print(f"{source} -> {'(dry run)' if dry_run else out}: {name}, {sizes}", soft_wrap=True)
