"""`pyggml tokenize`: the tokens of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import click
from rich.console import Console
from rich.text import Text

from pyggml.llm.model import load_model

from .command import Argument, Option
from .options import Json, ModelPath
from .outputs import print_json
from .prompt_text import read_prompt

_COLOURS = ("black on cyan", "black on yellow", "black on green", "black on magenta")


def tokenize(
    text: Annotated[Optional[str], Argument(help="The text.")] = None,
    model: ModelPath = None,
    prompt: Annotated[Optional[str], Option("-p", "--prompt", help="The text, as in other commands.")] = None,
    file: Annotated[Optional[Path], Option("-f", "--file", help="... from a file; -: from stdin.")] = None,
    add_special: Annotated[bool, Option("--bos/--no-bos", help="Add bos and eos where the model does.")] = True,
    parse_special: Annotated[bool, Option("--parse-special", help="Read the names of control tokens.")] = False,
    as_json: Json = False,
) -> None:
    """Show the token ids of a text with their pieces. A piece whose bytes are not UTF-8 is shown as b'\\xNN', in
    JSON as a list of numbers. On a terminal the text comes first, each token in a colour."""
    if text is not None and prompt is not None:
        raise click.BadParameter("the text and -p cannot both be given")
    vocab = load_model(model, vocab_only=True).vocab
    ids = vocab.tokenize(read_prompt(prompt if text is None else text, file), add_special, parse_special)
    pieces = [_piece(vocab.token_to_piece(i, special=True)) for i in ids]
    if as_json:
        print_json({"ids": ids, "pieces": [list(p) if isinstance(p, bytes) else p for p in pieces]})
        return
    console = Console()
    if console.is_terminal:
        coloured = Text()
        for i, piece in enumerate(pieces):
            text = piece.decode("utf-8", "backslashreplace") if isinstance(piece, bytes) else piece
            visible = "".join([c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text])
            coloured.append(visible, _COLOURS[i % len(_COLOURS)])
        console.print(coloured)
    for i, piece in zip(ids, pieces, strict=True):
        print(f"{i:6d} -> {piece!r}")


def _piece(stored: bytes) -> str | bytes:
    """The text of a token, or its bytes when they are only a part of a character."""
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return stored
