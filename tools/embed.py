"""`pyggml embed`: the vectors of texts, and how alike they are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import click
import numpy as np

from pyggml.llm.embed import normalized
from pyggml.llm.model import TowerModel

from .command import Argument, Option
from .options import Json
from .outputs import print_json
from .prompt_text import read_prompt
from .running import Run

_SHOWN, _WIDTH = 8, 40  # shown at most: numbers of a vector, characters of a text
_COMPARED = 1 << 10  # texts that are compared with each other


def embed(
    run: Run,
    texts: Annotated[Optional[list[str]], Argument(help="The texts.")] = None,
    file: Annotated[
        Optional[Path], Option("-f", "--file", help="... a text in each line of this file; -: of stdin.")
    ] = None,
    pooling: Annotated[
        Optional[str], Option("--pooling", help="mean, cls, last or rank (default: the file's, else mean).")
    ] = None,
    normalize: Annotated[
        float,
        Option(
            "--embd-normalize",
            help="-1: no; 0: to 32760 at most; 1: sum; 2: length; or another norm.",
            check=partial(normalized, np.zeros((0, 1), np.float32)),
        ),
    ] = 2.0,
    layer: Annotated[int, Option("--layer", help="Of this layer; -1: of the last, normed.")] = -1,
    query: Annotated[
        Optional[str], Option("-q", "--query", help="Score the texts as answers to this, with a reranker.")
    ] = None,
    out: Annotated[
        Optional[Path], Option("-o", "--output", help="Write the vectors to this .npy file.", metavar="NPY")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the first numbers of each text's vector, and the cosine of each pair of vectors (of the first 1,024). With
    --query, show the score of each text."""
    lines = list(texts or ())
    if file is not None:
        lines += [line for line in read_prompt(None, file).splitlines() if line.strip()]
    if not lines:
        raise click.BadParameter("give texts, or a file with one in each line")
    context = run.context()
    n_ubatch = run.ubatch_size
    with run.load() as m:
        if query is not None:
            scores = m.rerank(query, lines, n_ubatch=n_ubatch, context=context)
            if as_json:
                print_json({"query": query, "texts": lines, "scores": scores.tolist()})
                return
            for i in np.argsort(-scores, kind="stable"):
                print(f"{scores[i]:10.4f}  {lines[i]}")
            return
        if isinstance(m, TowerModel):  # of CLIP or SigLIP, whose towers have nothing to choose
            rows = m.embed(lines, normalize, run.threads)
        else:
            rows = m.embed(lines, pooling, normalize, layer, n_ubatch=n_ubatch, context=context)
    unit = normalized(rows[:_COMPARED])
    cosines = np.array(unit @ unit.T, np.float32)
    if out is not None:
        np.save(out, rows)
    if as_json:
        print_json({"texts": lines, "embeddings": rows.tolist(), "cosines": cosines.tolist()})
        return
    for text, row in zip(lines, rows, strict=True):
        more = " ..." if len(row) > _SHOWN else ""
        print(f"{text:.{_WIDTH}}: " + " ".join(f"{x:.6f}" for x in row[:_SHOWN]) + more)
    print("cosines:")
    for row in cosines.tolist():
        print(" ".join(f"{x:6.3f}" for x in row))
