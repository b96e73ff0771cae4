"""`pyggml quantize`: rewrite a GGUF model in another file type, with llama.cpp's mixes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pyggml.bars import bar
from pyggml.dtypes import DType
from pyggml.errors import DTypeError
from pyggml.llm.quantize.imatrix import load_imatrix
from pyggml.llm.quantize.mixes import MIXES, find_mix
from pyggml.llm.quantize.rewrite import RewritePlan, TensorPlan, plan_quantization, write_quantized
from pyggml.tensor import rank_of

from .command import Argument, Option
from .options import Json, Threads
from .outputs import print_json
from .plain import for_rich

TABLE_WIDTH = 110  # characters, so that a narrow terminal does not cut numbers
_COPY = "COPY"
_TYPE_HELP = f"One of {', '.join(MIXES)}; COPY: as they are."


def parse_type(text: str | None) -> DType | None:
    """A tensor type by its name, in any case."""
    if text is None:
        return None
    if text.upper() not in DType.__members__:
        raise click.BadParameter(f"unknown tensor type {text!r}: known are {', '.join(DType.__members__)}")
    return DType[text.upper()]


def row_of(t: TensorPlan) -> dict[str, Any]:
    """The facts about a tensor as plain objects."""
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


def table_of(plan: RewritePlan) -> Table:
    """The tensors, one a line, with their errors if these were measured."""
    table = Table("tensor", "ne", "from", "to", "bits/weight", "RMSE", "NMSE", "max error", box=SIMPLE_HEAD)
    for t in plan.tensors:
        e = t.error
        errors = ["", "", ""] if e is None else [f"{e.rmse:.3e}", f"{e.nmse:.3e}", f"{e.max_error:.3e}"]
        ne = "x".join(map(str, t.source.ne[: rank_of(t.source.ne)]))
        table.add_row(
            for_rich(t.source.name), ne, t.source.dtype.name, t.dtype.name, f"{t.bits_per_weight:.2f}", *errors
        )
    return table


def _tensor_type(text: str) -> tuple[str, DType]:
    pattern, equals, name = text.rpartition("=")
    dtype = parse_type(name) if pattern and equals else None
    if dtype is None:
        raise click.BadParameter(f"--tensor-type is PATTERN=TYPE, not {text!r}")
    return pattern, dtype


def quantize(
    source: Annotated[Path, Argument(metavar="IN", help="GGUF model to read.")],
    out: Annotated[Path, Argument(metavar="OUT", help="GGUF file to write; it appears when it is complete.")],
    file_type: Annotated[str, Argument(metavar="TYPE", help=_TYPE_HELP)],
    threads: Threads = None,
    imatrix: Annotated[
        Optional[Path], Option("--imatrix", help="Importance matrix (llama.cpp's GGUF or .dat).", metavar="FILE")
    ] = None,
    pure: Annotated[bool, Option("--pure", help="No mix: every matrix in the same type.")] = False,
    output_tensor_type: Annotated[
        Optional[str], Option("--output-tensor-type", help="Type of output.weight.", metavar="TYPE")
    ] = None,
    token_embedding_type: Annotated[
        Optional[str], Option("--token-embedding-type", help="Type of token_embd.weight.", metavar="TYPE")
    ] = None,
    tensor_type: Annotated[
        Optional[list[str]],
        Option(
            "--tensor-type",
            help="Type of tensors in whose names this regular expression is found (repeatable, the first decides).",
            metavar="PATTERN=TYPE",
        ),
    ] = None,
    leave_output_tensor: Annotated[bool, Option("--leave-output-tensor", help="Keep output.weight as it is.")] = False,
    allow_requantize: Annotated[
        bool, Option("--allow-requantize", help="Accept tensors that are quantized already; quality suffers.")
    ] = False,
    layout: Annotated[
        Optional[str],
        Option(
            "--layout",
            help="r16: weights as the CPU's kernels read them, which need no repacking; for pyggml alone.",
            metavar="LAYOUT",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show types and sizes; write nothing.")] = False,
    report: Annotated[bool, Option("--report", help="Show each tensor's error.")] = False,
    as_json: Json = False,
) -> None:
    """Rewrite a GGUF model in another file type."""
    try:
        name = _COPY if file_type.upper() == _COPY else find_mix(file_type)[0]
    except DTypeError as e:
        raise click.BadParameter(str(e)) from None
    plan = plan_quantization(
        source,
        None if name == _COPY else name,
        tensor_types=[_tensor_type(text) for text in tensor_type or ()],
        leave_output_tensor=leave_output_tensor,
        imatrix=None if imatrix is None else load_imatrix(imatrix),
        pure=pure,
        output_tensor_type=parse_type(output_tensor_type),
        token_embedding_type=parse_type(token_embedding_type),
        allow_requantize=allow_requantize,
        report=report and not dry_run,
        layout=layout,
    )
    stderr = Console(stderr=True)
    if plan.without_imatrix:
        stderr.print(
            f"warning: {len(plan.without_imatrix)} tensors get so few bits that they want an importance matrix "
            f"(--imatrix), the first is {for_rich(plan.without_imatrix[0])}",
            soft_wrap=True,
        )
    if not dry_run:
        with bar(name) as show:
            write_quantized(plan, out, threads, show)
    bits = 8 * plan.bytes_after / max(plan.n_elements, 1)  # a vocabulary alone has no weights
    if as_json:
        about = {"in": str(source), "out": None if dry_run else str(out), "file_type": name}
        sizes = {"bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after, "bits_per_weight": bits}
        print_json({**about, **sizes, "tensors": [row_of(t) for t in plan.tensors]})
        return
    console = Console()
    if report or dry_run:
        Console(width=max(console.width, TABLE_WIDTH)).print(table_of(plan))
    sizes = f"{plan.bytes_before / 2**20:.2f} MiB -> {plan.bytes_after / 2**20:.2f} MiB, {bits:.2f} bits per weight"
    made = "(dry run)" if dry_run else out
    console.print(for_rich(f"{source} -> {made}: {name}, {sizes}"), soft_wrap=True)
