"""`pyggml dump-dot`: the graph of a decode step, drawn without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from pyggml.inspect import dot
from pyggml.llm.model import load_model

from .options import ModelPath


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """`A:B` -> (A, B), layers A to B - 1."""
    if text is None:
        return None
    first, sep, end = text.partition(":")
    if not (sep and first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise typer.BadParameter(f"--layers takes A:B with A < B, not {text!r}")
    return int(first), int(end)


def dump_dot(
    out: Annotated[Path, typer.Option("-o", "--output", help=".dot text, or .svg/.png/.pdf to draw.", metavar="FILE")],
    model: ModelPath = None,
    n_tokens: Annotated[int, typer.Option("--n-tokens", help="Tokens in the batch.", min=1)] = 1,
    layers: Annotated[Optional[str], typer.Option("--layers", help="Only layers A to B-1.", metavar="A:B")] = None,
) -> None:
    """Write the graph of a batch of N tokens as DOT text or as a picture."""
    only = parse_layers(layers)
    graph = load_model(model).new_context(n_ctx=max(512, n_tokens)).build_graph(n_tokens)
    if out.suffix in (".svg", ".png", ".pdf"):
        dot.render(graph, out, only)
    else:
        dot.dump_dot(graph, out, only)
    print(f"{graph.n_nodes} nodes, {graph.n_leafs} leafs -> {out}")
