"""`pyggml split` and `pyggml merge`: write a model as several GGUF files, or several files as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from pyggml.gguf_io.split import merge_model, prefix_of, split_model

from .command import Argument, Option

_UNITS = {"M": 10**6, "G": 10**9}  # decimal, as llama.cpp's
_MAX_TENSORS = 128

Source = Annotated[Path, Argument(metavar="IN", help="GGUF model to read; of several files the first.")]


def parse_size(text: str) -> int:
    """`500M` or `2G` as bytes."""
    match = re.fullmatch(r"(\d+)([MG])", text)
    if not match or not int(match[1]):
        raise click.BadParameter(f"a size is a whole number of M or G, as in 500M, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def split(
    source: Source,
    out: Annotated[str, Argument(metavar="OUT", help="What the parts' names begin with: OUT-00001-of-00003.gguf.")],
    max_size: Annotated[
        Optional[str], Option("--max-size", help="Bytes of the tensors in a part.", metavar="N(M|G)")
    ] = None,
    max_tensors: Annotated[
        Optional[int],
        Option("--max-tensors", help=f"Tensors in a part (default: {_MAX_TENSORS}).", metavar="N", min=1),
    ] = None,
) -> None:
    """Write a GGUF model as several files. They appear when all are complete."""
    if max_size is not None and max_tensors is not None:
        raise click.BadParameter("--max-size and --max-tensors cannot both be given")
    size = None if max_size is None else parse_size(max_size)
    with progress_of("split") as told:
        paths = split_model(source, prefix_of(out), size, max_tensors or _MAX_TENSORS, told)
    print(*paths, sep="\n")


def merge(
    source: Source,
    out: Annotated[Path, Argument(metavar="OUT", help="GGUF file to write; it appears when it is complete.")],
) -> None:
    """Write a GGUF model in several files as one."""
    with progress_of("merge") as told:
        file = merge_model(source, out, told)
    print(f"{out}: {len(file.parts)} parts, {len(file.tensors)} tensors")


@contextmanager
def progress_of(name: str) -> Generator[Callable[[int, int], None], None, None]:
    """A progress bar on stderr (if it is a terminal) during a `with` block. It is called with the bytes that are done,
    and all bytes."""
    columns = (TextColumn(name), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
