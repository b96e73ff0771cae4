"""`pyggml VERB`: registers the verbs, one per file, and turns errors into one line on stderr."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import typer

from pyggml import __version__
from pyggml.backends.cpu.isa import isa_name, n_cpus
from pyggml.errors import GGMLError

from . import (
    batch,
    bench,
    chat,
    convert,
    cvector,
    dump_dot,
    embed,
    generate,
    imatrix,
    info,
    inspect_page,
    merge_lora,
    op_bench,
    perplexity,
    quantize,
    split,
    tokenize,
    trace,
)
from .adapters import with_adapters
from .options import INTERRUPTED, with_sampling
from .running import with_running

app = typer.Typer(
    name="pyggml",
    help="Run, measure and look into GGUF models on the CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"pyggml {__version__} (Python {platform.python_version()}, {isa_name()}, {n_cpus()} CPUs)")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass


app.command("generate")(with_sampling(with_adapters(with_running(generate.generate))))
app.command("chat")(with_sampling(with_adapters(with_running(chat.chat))))
app.command("tokenize")(tokenize.tokenize)
app.command("batch")(with_sampling(with_adapters(batch.batch)))
app.command("bench")(with_adapters(bench.bench))
app.command("op-bench")(op_bench.op_bench)
app.command("embed")(embed.embed)
app.command("info")(info.info)
app.command("convert")(convert.convert)
app.command("quantize")(quantize.quantize)
app.command("split")(split.split)
app.command("merge")(split.merge)
app.command("merge-lora")(merge_lora.merge)
app.command("perplexity")(with_adapters(with_running(perplexity.perplexity_of_file)))
app.command("imatrix")(with_adapters(with_running(imatrix.imatrix)))
app.command("cvector")(cvector.cvector)
app.command("dump-dot")(dump_dot.dump_dot)
app.command("inspect")(inspect_page.inspect)
app.command("trace")(trace.trace)
app.command("diff")(trace.diff)


def main(args: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed (one line on stderr; a traceback with --debug), 2 usage."""
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv
    if debug:
        argv.remove("--debug")
    try:
        app(argv)  # exits by itself
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (GGMLError, OSError) as e:
        if debug:
            raise
        print("pyggml: " + " ".join(str(e).split()), file=sys.stderr)
        sys.exit(1)
