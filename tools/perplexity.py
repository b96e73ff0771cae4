"""`pyggml perplexity`: how well a model predicts a text, computed as llama.cpp does."""

from __future__ import annotations

import json
import sys
from math import isnan
from pathlib import Path
from typing import Annotated

import typer

from pyggml.llm.evaluate.perplexity import Perplexity, perplexity

from .adapters import AdapterOptions
from .bars import bar
from .options import Json
from .running import RunOptions


def perplexity_of_file(
    adapters: AdapterOptions,
    file: Annotated[Path, typer.Option("-f", "--file", help="The text; -: from stdin.")],
    run: RunOptions,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size", help="Tokens of a chunk; 0: as trained.", min=0)] = 512,
    ppl_stride: Annotated[
        int, typer.Option("--ppl-stride", help="Tokens from chunk to chunk; 0: chunks side by side.", min=0)
    ] = 0,
    chunks: Annotated[int, typer.Option("--chunks", help="Chunks to evaluate; -1: all.", min=-1)] = -1,
    as_json: Json = False,
) -> None:
    """The perplexity of a text, with its standard error. The text is cut into chunks, and the second half of each is
    predicted; with --ppl-stride, overlapping chunks and their last tokens. Progress goes to stderr."""
    data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    context = run.context()
    m = run.load()
    adapters.apply(m)
    estimates = perplexity(m, data.decode("utf-8", "replace"), ctx_size, ppl_stride, chunks, context=context)
    last: Perplexity | None = None
    with bar("perplexity") as show:
        for last in estimates:
            show(last.n_done, last.n_chunks, f"PPL = {_shown(last)}")
    assert last is not None
    if as_json:
        out = {"ppl": last.ppl, "error": None if isnan(last.error) else last.error, "nll": last.nll}
        out |= {"n_ctx": ctx_size or m.hparams.n_ctx_train, "stride": ppl_stride}
        print(json.dumps(out | {"n_chunks": last.n_chunks, "n_scored": last.n_scored}))
    else:
        print(f"Final estimate: PPL = {_shown(last)}")


def _shown(p: Perplexity) -> str:
    return f"{p.ppl:.4f} +/- {p.error:.5f}"
