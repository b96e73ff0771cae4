"""`pyggml dump-dot`: draw the graph of a batch, without running it or with the values of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import click

from pyggml.inspect import dot
from pyggml.inspect.record import record_model
from pyggml.llm.model import load_model

from .command import Option
from .options import FlashAttn, ModelPath
from .outputs import not_the_model


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """`A:B` -> (A, B), layers A to B - 1."""
    if text is None:
        return None
    first, sep, end = text.partition(":")
    if not (sep and first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise click.BadParameter(f"--layers takes A:B with A < B, not {text!r}")
    return int(first), int(end)


def dump_dot(
    out: Annotated[Path, Option("-o", "--output", help=".dot text, or .svg/.png/.pdf to draw.", metavar="FILE")],
    model: ModelPath = None,
    n_tokens: Annotated[int, Option("--n-tokens", help="Tokens in the batch.", min=1)] = 1,
    prompt: Annotated[
        Optional[str],
        Option("-p", "--prompt", help="Evaluate this text, and show times, buffers and values of its graph."),
    ] = None,
    layers: Annotated[Optional[str], Option("--layers", help="Only layers A to B-1.", metavar="A:B")] = None,
    nodes: Annotated[
        Optional[list[str]],
        Option("--nodes", help="Only nodes whose names match (repeatable).", metavar="PATTERN"),
    ] = None,
    around: Annotated[int, Option("--around", help="... and all within N edges of them.", min=0)] = 0,
    fold: Annotated[bool, Option("--fold", help="Draw layers that repeat as one box with a count.")] = False,
    against: Annotated[
        Optional[str],
        Option("--against", help="Colour and name what differs from the graph of this model.", metavar="FILE"),
    ] = None,
    legend: Annotated[bool, Option("--legend", help="Say what shapes and colours mean.")] = False,
    flash_attn: FlashAttn = False,
) -> None:
    """Write the graph of a batch of N tokens, or of a text, as DOT text or as a picture."""
    not_the_model(model, out)
    only, m = parse_layers(layers), load_model(model)
    ids = None if prompt is None else m.tokenize(prompt)
    n = n_tokens if ids is None else len(ids)
    n_ctx = max(512, n) if ids is None else n
    run = None if ids is None else record_model(m, ids, flash_attn=flash_attn)
    graph = m.new_context(n_ctx, flash_attn=flash_attn).build_graph(n) if run is None else run.graph
    old = None if against is None else load_model(against).new_context(n_ctx, flash_attn=flash_attn).build_graph(n)
    options: dot.Drawing = {"layers": only, "nodes": nodes or (), "around": around, "fold": fold}
    options |= {"run": run, "against": old, "legend": legend or old is not None}
    if out.suffix in (".svg", ".png", ".pdf"):
        dot.render(graph, out, **options)
    else:
        dot.dump_dot(graph, out, **options)
    print(f"{graph.n_nodes} nodes, {graph.n_leafs} leafs -> {out}")
