"""`pyggml VERB`: registers the verbs, one per file, and turns errors into one line on stderr."""

from __future__ import annotations

import sys

import typer

from pyggml.errors import GGMLError

from . import bench, chat, dump_dot, generate, info, op_bench, perplexity, quantize, tokenize
from .options import with_sampling

app = typer.Typer(
    name="pyggml",
    help="Run, measure and look into GGUF models on the CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(with_sampling(generate.generate))
app.command("chat")(with_sampling(chat.chat))
app.command("tokenize")(tokenize.tokenize)
app.command("bench")(bench.bench)
app.command("op-bench")(op_bench.op_bench)
app.command("info")(info.info)
app.command("quantize")(quantize.quantize)
app.command("perplexity")(perplexity.perplexity_of_file)
app.command("dump-dot")(dump_dot.dump_dot)


def main(args: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed (one line on stderr; a traceback with --debug), 2 usage."""
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv
    if debug:
        argv.remove("--debug")
    try:
        app(argv)  # exits by itself
    except (GGMLError, OSError) as e:
        if debug:
            raise
        print("pyggml: " + " ".join(str(e).split()), file=sys.stderr)
        sys.exit(1)
