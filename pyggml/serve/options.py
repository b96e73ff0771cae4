"""The options of the server, each declared once: `tools/serve.py` makes the flags of `pyggml serve` of them.

Names and defaults are llama-server's, unless `docs/server.md` says why not.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from pyggml import limits
from pyggml.errors import ModelError, one_of, whole
from pyggml.llm.openai.formats import REASONING_FORMATS
from pyggml.llm.samplers import TextParams
from pyggml.small_file import read_text
from pyggml.stream.sizes import memory_size

if TYPE_CHECKING:
    from pyggml.llm.model import Model

T = TypeVar("T")
POOLINGS = ("none", "mean", "cls", "last", "rank")


class Flag(NamedTuple):
    """How an option is given on the command line: its flags, as click takes them, its help, its least value."""

    flags: tuple[str, ...]
    help: str
    min: float | None


def _option(default: T, flags: str, help: str, min: float | None = None, shown: bool = True) -> T:
    """A field with a flag. `shown`: whether the record shows its value when it is printed."""
    return field(default=default, repr=shown, metadata={"flag": Flag(tuple(flags.split()), help, min)})


@dataclass(frozen=True)
class ServeOptions:
    """What a server offers, and to whom. Raises ModelError for values that make no sense.

    ram       bytes, or "2GiB", for weights, K and V, and texts that are kept (`serve/budget.py`); None: no limit
    defaults  how texts are sampled when a request does not say otherwise
    context   further arguments of the context (`ContextOptions`)
    """

    n_ctx: int = _option(
        0, "-c --ctx-size", "Tokens of all slots together; 0: for each as many as trained, 4096 at most.", 0
    )
    n_parallel: int = _option(4, "-np --parallel", "Slots: texts that are continued side by side.", 1)
    cache_ram: int = _option(
        1024, "-cram --cache-ram", "MiB for texts that slots have no room for: prompts that begin alike use them.", 0
    )
    ctx_checkpoints: int = _option(
        32,
        "-ctxcp --ctx-checkpoints",
        "Checkpoints of prompts, for windows and states, within --cache-ram.",
        0,
    )
    context_shift: bool = _option(
        False, "--context-shift/--no-context-shift", "Where a slot is full, drop the oldest text and go on."
    )
    n_keep: int = _option(0, "--keep", "Tokens at the start that --context-shift keeps; -1: the whole prompt.", -1)
    n_queue: int = _option(256, "--queue", "Requests that wait for a slot; further ones are answered 503.", 0)
    model_draft: str | None = _option(
        None, "-md --model-draft --spec-draft-model", "File of a smaller model, which guesses tokens."
    )
    lookup: bool | None = _option(
        None, "--lookup/--no-lookup", "Guess that texts repeat themselves (default: one alone, where that is faster)."
    )
    mtp: bool = _option(False, "--mtp", "Let the heads in the model's file guess (MTP layers), with -np 1.")
    draft_max: int = _option(3, "--draft-max --spec-draft-n-max", "Tokens guessed at a time, at most.", 1)
    draft_min: int = _option(0, "--draft-min --spec-draft-n-min", "... and at least.", 0)
    draft_p_min: float = _option(
        0.0, "--draft-p-min --spec-draft-p-min", "A draft ends where no token is this likely.", 0
    )
    models_dir: str | None = _option(None, "--models-dir", "Folder of models: the model of a request chooses.")
    models_max: int = _option(4, "--models-max", "Models that are loaded at a time; 0: any number.", 0)
    models_autoload: bool = _option(
        True, "--models-autoload/--no-models-autoload", "Load models when requests name them (or by /models/load)."
    )
    sleep_idle_seconds: int = _option(
        -1, "--sleep-idle-seconds", "Unload a model that had nothing to do for so long, until it has; -1: never.", -1
    )
    alias: str = _option("", "-a --alias", "Names of the model, joined by commas; answers have the first (its file's).")
    embeddings: bool = _option(False, "--embedding --embeddings", "Serve embeddings alone.")
    reranking: bool = _option(False, "--rerank --reranking", "Serve scores of a reranker alone.")
    pooling: str | None = _option(None, "--pooling", f"Of embeddings: {', '.join(POOLINGS)} (default: the file's).")
    chat_template: str | None = _option(
        None, "--chat-template", "Name of a chat template, Jinja, or a file with it (default: the model's own)."
    )
    chat_template_file: str | None = _option(None, "--chat-template-file", "... or a file with Jinja.")
    chat_template_kwargs: str | None = _option(
        None, "--chat-template-kwargs", "Variables of the chat template, as a JSON object."
    )
    reasoning_format: str = _option(
        "auto", "--reasoning-format", f"Where reasoning goes: {', '.join(REASONING_FORMATS)}; auto is deepseek."
    )
    reasoning_budget: int = _option(
        -1, "--reasoning-budget", "Tokens that a model may reason for; -1: any number; 0: chats ask it not to.", -1
    )
    reasoning_budget_message: str = _option(
        "", "--reasoning-budget-message", "Text that ends the reasoning when the budget is spent."
    )
    prefill_assistant: bool = _option(
        True,
        "--prefill-assistant/--no-prefill-assistant",
        "Where a chat ends with a message of the assistant, go on writing it.",
    )
    jinja: bool = _option(True, "--jinja", "Chat templates are always Jinja.")
    slot_save_path: str | None = _option(None, "--slot-save-path", "Folder for the texts of slots (default: none).")
    batches_dir: str | None = _option(None, "--batches-dir", "Folder of /v1/files and /v1/batches (default: none).")
    allow_url: bool = _option(False, "--allow-url", "Fetch pictures that requests name by http(s) URLs.")
    media_path: str | None = _option(
        None, "--media-path", "Folder whose files requests may name by file: URLs (default: none)."
    )
    metrics: bool = _option(False, "--metrics", "Answer /metrics.")
    props: bool = _option(False, "--props", "Answer POST /props.")
    slots: bool = _option(True, "--slots/--no-slots", "Answer /slots.")
    lora_init_without_apply: bool = _option(
        False, "--lora-init-without-apply", "Adapters begin with scale 0 (POST /lora-adapters)."
    )
    api_key: str | None = _option(None, "--api-key", "Keys that clients must have, separated by commas.", shown=False)
    api_key_file: str | None = _option(None, "--api-key-file", "... one in each line of a file.")
    api_prefix: str = _option("", "--api-prefix", "Path before all others, as /v2.")
    path: str | None = _option(None, "--path", "Folder of static files in the place of the page.")
    ui: bool = _option(True, "--ui/--no-ui --webui/--no-webui", "Serve the page.")
    cors_origins: str = _option(
        "*", "--cors-origins", "Pages of these origins may call, separated by commas; localhost: those of this machine."
    )
    cors_methods: str = _option("GET, POST, DELETE, OPTIONS", "--cors-methods", "... with these methods.")
    cors_headers: str = _option("*", "--cors-headers", "... and these headers.")
    timeout: int = _option(3600, "-to --timeout", "Seconds that a client may take to send, or to take, a part.", 1)
    sse_ping_interval: int = _option(30, "--sse-ping-interval", "Seconds between signs of life of a stream; -1: none.")
    ram: int | str | None = None
    defaults: TextParams = field(default_factory=lambda: TextParams(n_predict=-1))
    context: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.pooling is not None:
            one_of("pooling", self.pooling, POOLINGS, ModelError)
        one_of("reasoning_format", self.reasoning_format, REASONING_FORMATS, ModelError)
        for name, (flag, default) in flags(type(self)).items():
            if flag.min is not None and isinstance(default, int):
                whole(name, getattr(self, name), int(flag.min), error=ModelError)
        if self.api_prefix and not self.api_prefix.startswith("/"):
            raise ModelError(f"api_prefix must begin with /, not {self.api_prefix!r:.60}")
        if (self.model_draft is not None) + (self.lookup is True) + self.mtp > 1:
            raise ModelError("only one of model_draft, lookup and mtp can guess")
        if self.model_draft is not None and self.models_dir is not None:
            raise ModelError("model_draft guesses for one model, not for those of models_dir")
        if self.mtp and self.n_parallel > 1:
            raise ModelError("mtp: heads follow one text at a time: n_parallel must be 1")
        for name in ("slot_save_path", "batches_dir", "models_dir", "media_path"):
            folder: str | None = getattr(self, name)
            if folder is not None and not Path(folder).is_dir():
                raise ModelError(f"{name}: there is no folder {folder!r:.80}")
        if self.ram is not None:
            memory_size(self.ram)
        _ = self.keys, self.template_variables

    @property
    def aliases(self) -> list[str]:
        """The names of the model that `alias` gives."""
        return [name for x in self.alias.split(",") if (name := x.strip())]

    def name_of(self, path: str) -> str:
        """What answers call the model of a file: the first alias, or else the file's own name."""
        return next(iter(self.aliases), Path(path).name)

    @property
    def texts(self) -> bool:
        """Whether texts are continued."""
        return not (self.embeddings or self.reranking)

    @property
    def keys(self) -> Keys:
        """The keys that clients must have."""
        found = [] if self.api_key is None else self.api_key.split(",")
        if self.api_key_file is not None:
            lines = read_text(self.api_key_file, limits.TEXT_FILE_BYTES, ModelError).splitlines()
            found += [line.strip() for line in lines if not line.startswith("#")]
            if not any(found):  # an empty file must not open the server to everybody
                raise ModelError(f"{self.api_key_file}: there is no key in it")
        return Keys(tuple(key.encode() for key in found if key))

    @property
    def template(self) -> str | None:
        """The chat template, as `find_template` takes it."""
        if self.chat_template_file is None:
            return self.chat_template
        return read_text(self.chat_template_file, limits.TEXT_FILE_BYTES, ModelError)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        try:
            found = json.loads(self.chat_template_kwargs or "{}")
        except (ValueError, RecursionError) as e:
            raise ModelError(f"chat_template_kwargs is no JSON: {e}") from None
        if not isinstance(found, dict):
            raise ModelError("chat_template_kwargs must be a JSON object")
        return cast("dict[str, Any]", found)


@dataclass(frozen=True)
class Preset:
    """One of several models that are served, with options of its own.

    path      of the model, as `load` takes it; None: that of the model of the same name in `models_dir`
    options   what the server offers for it; what concerns all models counts as the server has it
    load      loads the model by its path
    at_start  whether it is loaded when the server starts
    """

    path: str | None
    options: ServeOptions
    load: Callable[[str], Model]
    at_start: bool = False


class Keys:
    """Keys of clients, which are compared in a time that does not depend on them, and never shown."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._keys = keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def has(self, key: str) -> bool:
        """Whether this is one of the keys."""
        given = key.encode("utf-8", "surrogatepass")
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0  # all are compared


@dataclass(frozen=True)
class ListenOptions:
    """Where a server listens, and how it stops."""

    host: str = _option("127.0.0.1", "--host", "Address to listen on, or the path of a UNIX socket that ends in .sock.")
    port: int = _option(8080, "--port", "Port.", 0)
    ssl_key_file: str | None = _option(None, "--ssl-key-file", "TLS: private key (PEM).")
    ssl_cert_file: str | None = _option(None, "--ssl-cert-file", "TLS: certificate (PEM).")
    stop_seconds: int = _option(
        30, "--stop-seconds", "On SIGTERM or Ctrl-C: seconds for answers under way before they are cut.", 0
    )


def flags(record: type[Any]) -> Mapping[str, tuple[Flag, Any]]:
    """The options of a record that have flags: name -> the flag and the default."""
    return {f.name: (f.metadata["flag"], f.default) for f in fields(record) if "flag" in f.metadata}
