"""`pyggml chat`: talk with a model, at a terminal or through pipes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Optional, TextIO

import click

from pyggml import limits
from pyggml.errors import GGMLError, KVCacheFull, ModelError
from pyggml.llm.generate.chat import ChatSession
from pyggml.llm.generate.engine import Token
from pyggml.llm.generate.named_templates import TEMPLATES
from pyggml.llm.generate.templates import find_template
from pyggml.llm.samplers import SamplerChain, SamplingParams
from pyggml.small_file import parse_json, read_text

from . import summary
from .adapters import Adapters
from .command import Option
from .media import Media
from .options import ContextShift, CtxSize, Escape, Json, Special, TraceSampling, usage
from .outputs import print_json
from .plain import for_terminal, plain
from .prompt_text import read_bytes, unescape
from .running import Run
from .sampling import Sampling, Stop, declared

_PROMPT, _MORE = "> ", ". "
_HISTORY = 1000  # lines that stay for the next chat
KeepOfChat = Annotated[
    int, Option("--keep", help="Tokens of the start that a context shift keeps; -1: the system message.", min=-1)
]


def chat(
    sampling: Sampling,
    adapters: Adapters,
    run: Run,
    media: Media,
    system: Annotated[str, Option("-sys", "--system-prompt", help="The system message.")] = "",
    system_file: Annotated[
        Optional[Path], Option("-sysf", "--system-prompt-file", help="... from a file.", metavar="FILE")
    ] = None,
    template: Annotated[
        Optional[str],
        Option(
            "--chat-template",
            help=f"A Jinja file, or {', '.join(TEMPLATES)} (default: the model's own, else chatml).",
            metavar="NAME|FILE",
        ),
    ] = None,
    n_predict: Annotated[int, declared("n_predict", "Tokens of a reply; -1: until it ends.")] = -1,
    stop: Stop = None,
    ctx_size: CtxSize = None,
    escape: Escape = True,
    special: Special = False,
    trace_sampling: TraceSampling = False,
    context_shift: ContextShift = False,
    keep: KeepOfChat = -1,
    lookup: Annotated[bool, declared("lookup")] = True,
    as_json: Json = False,
) -> None:
    """Talk with a model: a line is a message, a line that begins with / is a command (/help). A line that ends with \\
    goes on in the next one, and so does a text that is pasted. Ctrl-C ends a reply; while the program waits for a
    message, it ends the program. With --json each reply or error is a line with one JSON
    object, and an error ends the program with exit code 1."""
    start = perf_counter()
    if escape:
        system, stop = unescape(system), [unescape(text) for text in stop or ()]
    if system_file is not None:
        system = read_bytes(system_file).decode("utf-8", "replace")
    try:
        context = run.context()
        m = run.load(media.towers)
        adapters.apply(m)
        ctx = m.new_context(ctx_size or m.hparams.n_ctx_train, **context)
        with usage():
            chain = SamplerChain(SamplingParams(**sampling), m.vocab)
        with usage(ModelError):
            chat_template = find_template(template, m.kv)
    except (GGMLError, OSError) as e:
        if as_json:
            print_json(_error(e))
        raise
    chain.traces = [] if trace_sampling else None
    session = ChatSession(ctx, chain, chat_template, system, n_predict, tuple(stop or ()), context_shift, keep)
    session.special, session.lookup = special, lookup
    console = _Console(session, as_json, perf_counter() - start, media=media.things)
    read = _reader(sys.stdin, as_json)
    while not console.done and (line := read()) is not None:
        if line.startswith("/"):
            console.command(line)
        elif line.strip():
            console.reply(line)
    if console.failed and not sys.stdin.isatty():
        raise click.exceptions.Exit(1)


@dataclass
class _Console:
    """Does what the user types: messages and commands."""

    session: ChatSession
    as_json: bool
    load: float  # seconds
    took: float = 0.0
    done: bool = False
    failed: bool = False
    media: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # of the next message

    def reply(self, line: str) -> None:
        """Show the reply to a message as it comes."""
        tokens, self.media = self.session.say(line, self.media), []
        self._show_reply(tokens)

    def _show_reply(self, tokens: Generator[Token, None, None]) -> None:
        start, reason = perf_counter(), "interrupted"
        made: list[str] = []
        try:
            with closing(tokens):
                for token in tokens:
                    made.append(token.text)
                    self._show(token.text)
                    if token.trace:
                        print(summary.trace_lines(token.trace, self.session.ctx.model.vocab), file=sys.stderr)
                    reason = token.finish_reason or reason
        except KeyboardInterrupt:
            pass
        except GGMLError as e:
            hint = " (/reset forgets the chat)" if isinstance(e, KVCacheFull) else ""
            self._fail(" ".join(str(e).split()) + hint, e)
            return
        self.took = perf_counter() - start
        if self.as_json and self.session.generation:
            times = summary.timings(self.session.generation, self.load, self.took)
            out = {"role": "assistant", "content": "".join(made), "finish_reason": reason, "timings": times}
            print_json(out)
        self._show("\n")
        memory = self.session.ctx.memory
        if reason == "length" and memory.used >= memory.size:
            text = (
                f"the context is full ({memory.size} tokens): /undo or /reset make room, or begin with --context-shift"
            )
            print(f"pyggml: {text}", file=sys.stderr)

    def command(self, line: str) -> None:
        """Do what a line with / asks for."""
        name, _, argument = line[1:].strip().partition(" ")
        entry = _COMMANDS.get(name)
        if entry is None:
            self._fail(f"no command /{name}; /help lists them")
        else:
            entry[1](self, argument.strip())

    def _fail(self, text: str, error: Exception | None = None) -> None:
        self.failed = True
        print(f"pyggml: {plain(text)}", file=sys.stderr)
        if self.as_json:
            print_json(_error(error or GGMLError(text)))

    def help(self, _: str) -> None:
        for name, (text, _do) in _COMMANDS.items():
            print(f"/{name:<8} {text}", file=sys.stderr)

    def reset(self, _: str) -> None:
        self.session.reset()

    def system(self, text: str) -> None:
        self.session.reset(text)

    def regen(self, _: str) -> None:
        try:
            tokens = self.session.again()
        except ModelError as e:
            self._fail(str(e), e)
        else:
            self._show_reply(tokens)

    def undo(self, _: str) -> None:
        if self.session.undo() is None:
            self._fail("there is no message yet that could be taken back")

    def load_messages(self, name: str) -> None:
        try:
            self.session.load(parse_json(name, read_text(name, limits.TEXT_FILE_BYTES, ModelError), ModelError))
        except (GGMLError, OSError) as e:
            self._fail(str(e), e)

    def save(self, name: str) -> None:
        if not name:
            self._fail("/save needs a file name")
            return
        try:
            Path(name).write_text(json.dumps(self.session.messages, indent=2, ensure_ascii=False), encoding="utf-8")
        except OSError as e:
            self._fail(str(e), e)

    def image(self, path: str) -> None:
        self._attach("image", path)

    def audio(self, path: str) -> None:
        self._attach("audio", path)

    def _attach(self, kind: str, path: str) -> None:
        if not path:
            self._fail(f"/{kind} needs a file name")
        elif not Path(path).is_file():
            self._fail(f"/{kind}: there is no file {path}")
        else:
            self.media.append((kind, path))

    def timings(self, _: str) -> None:
        if self.session.generation:
            print(summary.table(self.session.generation, self.load, self.took), file=sys.stderr)

    def quit(self, _: str) -> None:
        self.done = True

    def _show(self, text: str) -> None:
        if not self.as_json:
            sys.stdout.write(for_terminal(text))
            sys.stdout.flush()


_COMMANDS: dict[str, tuple[str, Callable[[_Console, str], None]]] = {
    "help": ("this list", _Console.help),
    "reset": ("forget the chat, keep the system message", _Console.reset),
    "system": ("forget the chat, take this system message", _Console.system),
    "image": ("a picture (PATH) for the next message", _Console.image),
    "audio": ("a sound (PATH) for the next message", _Console.audio),
    "regen": ("another reply to the last message", _Console.regen),
    "undo": ("take back the last message and its reply", _Console.undo),
    "save": ("write the messages to a JSON file (PATH)", _Console.save),
    "load": ("go on with the messages of such a file", _Console.load_messages),
    "timings": ("of the last reply", _Console.timings),
    "quit": ("end (also Ctrl-D)", _Console.quit),
}


def _keep_history() -> None:
    """Let lines be edited, with those of earlier chats; a text that is pasted is one message."""
    import atexit

    try:
        import readline  # gives input() editing and a history
    except ImportError:  # Windows' Python has none: its terminal edits lines by itself
        return
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_history_length(_HISTORY)
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pyggml" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)

    def write() -> None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)

    atexit.register(write)


def _error(e: Exception) -> dict[str, dict[str, str]]:
    return {"error": {"type": type(e).__name__, "message": " ".join(str(e).split())}}


def _reader(stdin: TextIO, as_json: bool) -> Callable[[], str | None]:
    """A function that reads a line; it returns None at the end of the input, or on Ctrl-C. At a terminal it shows a
    prompt, and the line can be edited."""
    tty = stdin.isatty()
    if tty:
        _keep_history()

    def read() -> str | None:
        try:
            lines = [input("" if as_json or not tty else _PROMPT)]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(input("" if as_json or not tty else _MORE))
            return "\n".join(lines)
        except (EOFError, KeyboardInterrupt):
            if tty:
                print(file=sys.stderr)
            return None

    return read
