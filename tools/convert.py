"""`pyggml convert`: a Hugging Face folder as a GGUF file, quantised on the way, and a GGUF file as a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import click
from rich.console import Console

from pyggml.bars import bar
from pyggml.errors import DTypeError, ModelError
from pyggml.gguf_io.read import is_whisper_file
from pyggml.hf.export import export_folder
from pyggml.llm.ggml_whisper import write_gguf
from pyggml.llm.quantize.imatrix import load_imatrix
from pyggml.llm.quantize.mixes import MIXES, file_type_name, find_mix
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from .command import Argument, Option
from .convert_lora import convert_lora
from .options import Json, Threads
from .outputs import print_json
from .plain import for_rich
from .quantize import TABLE_WIDTH, row_of, table_of
from .split import parse_size

_TYPE_HELP = f"One of {', '.join(MIXES)}; without it tensors stay as they are."


def convert(
    source: Annotated[
        Path, Argument(metavar="IN", help="Hugging Face folder, or a file of whisper.cpp; with --hf a GGUF file.")
    ],
    out: Annotated[
        Optional[Path],
        Argument(metavar="OUT", help="What to write (not with --mmproj); it appears when it is complete."),
    ] = None,
    file_type: Annotated[Optional[str], Option("--type", metavar="TYPE", help=_TYPE_HELP)] = None,
    threads: Threads = None,
    imatrix: Annotated[
        Optional[Path], Option("--imatrix", help="Importance matrix (llama.cpp's GGUF or .dat).", metavar="FILE")
    ] = None,
    split_size: Annotated[
        Optional[str], Option("--split-size", metavar="N(M|G)", help="Parts of so many bytes, as `split` makes.")
    ] = None,
    vocab_only: Annotated[bool, Option("--vocab-only", help="Metadata and vocabulary, no weights.")] = False,
    lora: Annotated[bool, Option("--lora", help="IN is a PEFT folder: write its adapter.")] = False,
    base: Annotated[
        Optional[Path], Option("--base", metavar="MODEL", help="What the adapter is for (default: as it says).")
    ] = None,
    to_hf: Annotated[bool, Option("--hf", help="The way back: GGUF file IN to folder OUT, in BF16.")] = False,
    mmproj: Annotated[
        Optional[Path],
        Option("--mmproj", metavar="OUT", help="Write the part of IN that sees or hears, in F32, F16 or BF16."),
    ] = None,
    report: Annotated[bool, Option("--report", help="Show each tensor's error.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face folder to a GGUF file that pyggml and llama.cpp load, or back."""
    console = Console()
    if mmproj is not None:
        if imatrix or split_size or vocab_only or report or lora or base or to_hf or out is not None:
            raise click.BadParameter("--mmproj takes its own OUT, and of the other options --type alone")
        _write_tower(source, mmproj, file_type, as_json)
        return
    if out is None:
        raise click.UsageError("Missing argument 'OUT'.")
    if to_hf:
        if file_type or imatrix or split_size or vocab_only or report or lora:
            raise click.BadParameter("--hf takes none of --type, --imatrix, --split-size, --vocab-only, --report")
        with bar("to folder") as show:
            _export(source, out, show)
        print_json({"in": str(source), "out": str(out)}) if as_json else print(f"{source} -> {out}")
        return
    if lora:
        if file_type or imatrix or split_size or vocab_only or report:
            raise click.BadParameter("--lora takes none of --type, --imatrix, --split-size, --vocab-only, --report")
        made = convert_lora(source, out, base)
        about = {"in": str(source), "out": str(out), "tensors": len(made.pairs)}
        print_json(about) if as_json else print(f"{source} -> {out}: {len(made.pairs)} tensors")
        return
    if is_whisper_file(source):
        if file_type or imatrix or split_size or vocab_only or report:
            raise click.BadParameter("a file of whisper.cpp becomes a GGUF as it is; `pyggml quantize` rewrites that")
        write_gguf(source, out)
        print_json({"in": str(source), "out": str(out)}) if as_json else print(f"{source} -> {out}")
        return
    if not source.is_dir():
        raise ModelError(f"{source}: is no folder; `pyggml quantize` rewrites a GGUF file, --hf makes a folder of one")
    try:
        name = None if file_type is None else find_mix(file_type)[0]
    except DTypeError as e:
        raise click.BadParameter(str(e)) from None
    matrix = None if imatrix is None else load_imatrix(imatrix)
    plan = plan_quantization(source, name, vocab_only=vocab_only, imatrix=matrix, report=report)
    size = None if split_size is None else parse_size(split_size)
    with bar(name or "convert") as show:
        paths = write_quantized(plan, out, threads, show, size)
    written = name or file_type_name(plan.file_type)
    if as_json:
        about = {
            "in": str(source),
            "out": paths[0],
            "parts": len(paths),
            "file_type": written,
            "bytes": plan.bytes_after,
        }
        print_json({**about, "tensors": [row_of(t) for t in plan.tensors]})
        return
    if report:
        Console(width=max(console.width, TABLE_WIDTH)).print(table_of(plan))
    about = "the vocabulary" if vocab_only else f"{written}, {plan.bytes_after / 2**20:.2f} MiB"
    console.print(for_rich(f"{source} -> {' '.join(paths)}: {about}"), soft_wrap=True)


def _export(source: Path, out: Path, show: Callable[[int, int], None]) -> None:
    """Write a GGUF file, or one of whisper.cpp, as a folder."""
    if not is_whisper_file(source):
        export_folder(source, out, show)
        return
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as made:
        gguf = Path(made) / "m.gguf"
        write_gguf(source, gguf)
        export_folder(gguf, out, show)


def _write_tower(source: Path, out: Path, file_type: str | None, as_json: bool) -> None:
    from pyggml.hf.towers.mmproj import TYPES, write_mmproj

    types = {t.name: t for t in TYPES}
    if file_type is not None and file_type.upper() not in types:
        raise click.BadParameter(f"the type of an mmproj file is one of {', '.join(types)}, not {file_type!r:.40}")
    tower, known = write_mmproj(source, out, None if file_type is None else types[file_type.upper()])
    about = {"in": str(source), "out": str(out), "tower": tower, "llama_cpp": known, "bytes": out.stat().st_size}
    text = f"{source} -> {out}: the tower {tower}" + ("" if known else ", which llama.cpp has no projector for")
    print_json(about) if as_json else print(text)
