"""`pyggml VERB`: the verbs, each in a file that is imported when it is called; errors become one line on stderr."""

from __future__ import annotations

import gc
import io
import sys
import warnings
from importlib import import_module

import click

from pyggml.errors import GGMLError, nearest

from .command import WholeOptions, configured, verb
from .exits import INTERRUPTED
from .plain import plain

_COLLECT_AFTER = 50_000  # new objects; a model and its graphs have fewer, which all stay alive

VERBS = {  # name: module and function
    "generate": "generate.generate",
    "chat": "chat.chat",
    "tokenize": "tokenize.tokenize",
    "serve": "serve.serve",
    "batch": "batch.batch",
    "bench": "bench.bench",
    "op-bench": "op_bench.op_bench",
    "embed": "embed.embed",
    "transcribe": "transcribe.transcribe",
    "info": "info.info",
    "pull": "hub.pull",
    "list": "hub.list_models",
    "rm": "hub.rm",
    "convert": "convert.convert",
    "quantize": "quantize.quantize",
    "split": "split.split",
    "merge": "split.merge",
    "merge-lora": "merge_lora.merge",
    "finetune": "finetune.finetune",
    "train": "finetune.train",
    "perplexity": "perplexity.perplexity_of_file",
    "imatrix": "imatrix.imatrix",
    "cvector": "cvector.cvector",
    "dump-dot": "dump_dot.dump_dot",
    "inspect": "inspect_page.inspect",
    "trace": "trace.trace",
    "diff": "trace.diff",
}


class _App(WholeOptions, click.Group):
    """All verbs. The module of a verb is imported when the verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name a verb that is spelt like an unknown one."""
        if args[0] not in VERBS and (like := nearest(args[0], VERBS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {like[0]!r}?")
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, click.Command) and name is not None:
            ctx.default_map = {**(ctx.default_map or {}), name: configured(name, command, VERBS)}
        return name, command, rest

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        if cmd_name not in self.commands:
            module, _, function = VERBS[cmd_name].partition(".")
            self.commands[cmd_name] = verb(cmd_name, getattr(import_module(f".{module}", __package__), function))
        return self.commands[cmd_name]


def _version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked:
        import platform

        from pyggml import __version__
        from pyggml.backends.cpu.isa import isa_name
        from pyggml.native.threads import n_cpus

        print(f"pyggml {__version__} (Python {platform.python_version()}, {isa_name()}, {n_cpus()} CPUs)")
        ctx.exit()


app = _App(
    "pyggml",
    help="Run, measure and look into GGUF models on the CPU. --debug shows where an error comes from.",
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
        )
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main(args: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed (one line on stderr; a traceback with --debug), 2 usage, 130 Ctrl-C."""
    if args is None:  # as a program: collect garbage less often, because it slows short runs down
        warnings.showwarning = _show_warning
        _write_any_text()
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv
    if debug:
        argv.remove("--debug")
    try:
        sys.exit(app.main(argv or ["--help"], "pyggml", standalone_mode=False) or 0)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except click.ClickException as e:
        if debug:
            raise
        at = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else "pyggml"
        _fail(at, e.format_message().removeprefix("Invalid value: "), e.exit_code)
    except (GGMLError, OSError) as e:
        if debug:
            raise
        _fail("pyggml", str(e), 1)
    except MemoryError as e:
        if debug:
            raise
        _fail("pyggml", f"memory is full: {e}".removesuffix(": "), 1)


def _write_any_text() -> None:
    """Let stdout have texts that its encoding lacks (of LC_ALL=C, or of a file on Windows): with backslashes, as stderr
    has them."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"pyggml: warning: {plain(str(message))}", file=sys.stderr)


def _fail(at: str, text: str, code: int) -> None:
    print(f"{at}: {' '.join(plain(text).split())}", file=sys.stderr)
    sys.exit(code)
