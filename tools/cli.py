"""`pyggml VERB`: the verbs, each in a file that is imported when it is called; errors become one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from pyggml.errors import GGMLError

from .exits import INTERRUPTED

VERBS = {  # name: module and function
    "generate": "generate.generate",
    "chat": "chat.chat",
    "tokenize": "tokenize.tokenize",
    "batch": "batch.batch",
    "bench": "bench.bench",
    "op-bench": "op_bench.op_bench",
    "embed": "embed.embed",
    "info": "info.info",
    "convert": "convert.convert",
    "quantize": "quantize.quantize",
    "split": "split.split",
    "merge": "split.merge",
    "merge-lora": "merge_lora.merge",
    "perplexity": "perplexity.perplexity_of_file",
    "imatrix": "imatrix.imatrix",
    "cvector": "cvector.cvector",
    "dump-dot": "dump_dot.dump_dot",
    "inspect": "inspect_page.inspect",
    "trace": "trace.trace",
    "diff": "trace.diff",
}


def _version(asked: bool) -> None:
    if asked:
        import platform

        from pyggml import __version__
        from pyggml.backends.cpu.isa import isa_name, n_cpus

        print(f"pyggml {__version__} (Python {platform.python_version()}, {isa_name()}, {n_cpus()} CPUs)")
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass


def new_app(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """The command line with some of its verbs."""
    app = typer.Typer(
        name="pyggml",
        help="Run, measure and look into GGUF models on the CPU.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_top)
    for verb in verbs:
        module, _, function = VERBS[verb].partition(".")
        app.command(verb)(getattr(import_module(f".{module}", __package__), function))
    return app


def main(args: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed (one line on stderr; a traceback with --debug), 2 usage, 130 Ctrl-C."""
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv
    if debug:
        argv.remove("--debug")
    try:
        wanted = [argv[0]] if argv and argv[0] in VERBS else () if argv == ["--version"] else VERBS
        new_app(wanted)(argv)  # exits by itself
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (GGMLError, OSError) as e:
        if debug:
            raise
        print("pyggml: " + " ".join(str(e).split()), file=sys.stderr)
        sys.exit(1)
