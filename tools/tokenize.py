"""`pyggml tokenize`: the tokens of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from pyggml.llm.model import load_model

from .generate import read_prompt
from .options import Json, ModelPath


def tokenize(
    model: ModelPath = None,
    prompt: Annotated[Optional[str], typer.Option("-p", "--prompt", help="The text.")] = None,
    file: Annotated[Optional[Path], typer.Option("-f", "--file", help="... from a file; -: from stdin.")] = None,
    add_special: Annotated[bool, typer.Option("--bos/--no-bos", help="Add bos and eos where the model does.")] = True,
    parse_special: Annotated[bool, typer.Option("--parse-special", help="Read the names of control tokens.")] = False,
    as_json: Json = False,
) -> None:
    """Show the token ids of a text with their pieces; bytes that are no UTF-8 as \\xNN."""
    vocab = load_model(model, vocab_only=True).vocab
    ids = vocab.tokenize(read_prompt(prompt, file), add_special, parse_special)
    pieces = [vocab.token_to_piece(i, special=True).decode("utf-8", "backslashreplace") for i in ids]
    if as_json:
        print(json.dumps({"ids": ids, "pieces": pieces}))
        return
    for i, piece in zip(ids, pieces, strict=True):
        print(f"{i:6d} -> {piece!r}")
