"""Forms of chats as a program gives them to `Llama`: Jinja, functions, tokenizer configurations, and models that see.

The formats that have names are in `chat_formats` and `function_formats`; `format_NAME(messages)` makes a prompt.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from .. import limits
from ..errors import ModelError
from ..llm.generate.jinja import plain, render
from ..llm.generate.templates import ChatTemplate
from .chat_formats import style_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from .llama import Llama

Messages = Sequence[Mapping[str, Any]]


@dataclass
class ChatFormatterResponse:
    """What a formatter makes of messages: the prompt, and strings that end the reply. `added_special`: the prompt has
    its bos token already."""

    prompt: str
    stop: str | list[str] | None = None
    stopping_criteria: Any = None
    added_special: bool = False


class ChatFormatter(Protocol):
    """A function from messages to a prompt."""

    def __call__(self, *, messages: Messages, **kwargs: Any) -> ChatFormatterResponse: ...


# -- formats of one's own ---------------------------------------------------------------------------------------------


class Registered:
    """A formatter, as the template that `Model.create_chat_completion` reads: it writes the prompt that it is given."""

    def __init__(self, name: str, formatter: ChatFormatter) -> None:
        self.name, self._formatter = name, formatter

    def options(self, messages: Messages) -> dict[str, Any]:
        """The options of a chat with these messages."""
        made = self._formatter(messages=messages)
        stop = (made.stop,) if isinstance(made.stop, str) else tuple(made.stop or ())
        template = ChatTemplate(self.name, "{{- prompt -}}", stop)
        return {"chat_template": template, "chat_template_kwargs": {"prompt": made.prompt}}


_registered: dict[str, Registered] = {}


def register_chat_format(name: str) -> Callable[[ChatFormatter], ChatFormatter]:
    """A decorator: `Llama(chat_format=name)` writes its chats with the function."""

    def register(f: ChatFormatter) -> ChatFormatter:
        _registered[name] = Registered(name, f)
        return f

    return register


def find_registered(name: str | None) -> Registered | None:
    """The format that was registered by this name."""
    return None if name is None else _registered.get(name)


class Jinja2ChatFormatter:
    """Writes chats with a Jinja template."""

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        self.template, self.eos_token, self.bos_token = template, eos_token, bos_token
        self.add_generation_prompt = add_generation_prompt

    def __call__(self, *, messages: Messages, **kwargs: Any) -> ChatFormatterResponse:
        values = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "messages": plain("messages", list(messages)),
        }
        values["add_generation_prompt"] = self.add_generation_prompt
        prompt = render("that was given", self.template, {**values, **plain("variables", kwargs)})
        return ChatFormatterResponse(prompt, [self.eos_token] if self.eos_token else [], added_special=True)

    def to_chat_handler(self) -> Callable[..., Any]:
        """The formatter as a `chat_handler`."""
        return chat_formatter_to_chat_completion_handler(self)


def chat_formatter_to_chat_completion_handler(chat_formatter: ChatFormatter) -> Callable[..., Any]:
    """A formatter as a `chat_handler`."""
    registered = Registered("that was given", chat_formatter)

    def handler(*, llama: Llama, messages: Messages, **request: Any) -> Any:
        return llama.model.create_chat_completion(
            messages, **llama.request({**request, **registered.options(messages)})
        )

    return handler


def hf_tokenizer_config_to_chat_formatter(
    tokenizer_config: Mapping[str, Any], add_generation_prompt: bool = True
) -> ChatFormatter:
    """The formatter of a tokenizer_config.json. As in llama-cpp-python, the reply is asked for with an empty message of
    the assistant. Raises ModelError when it has no chat_template, bos_token and eos_token."""
    given = {k: tokenizer_config.get(k) for k in ("chat_template", "bos_token", "eos_token")}
    for key, value in given.items():
        if not isinstance(value, str):
            raise ModelError(f"the tokenizer's configuration has no {key} that is a text")
    template, bos, eos = map(str, given.values())

    def formatter(*, messages: Messages, **kwargs: Any) -> ChatFormatterResponse:
        empty = [{"role": "assistant", "content": ""}] if add_generation_prompt else []
        made = Jinja2ChatFormatter(template, eos, bos, False)(messages=[*messages, *empty], **kwargs)
        return ChatFormatterResponse(made.prompt, [eos, bos], added_special=True)

    return formatter


def hf_autotokenizer_to_chat_formatter(pretrained_model_name_or_path: str) -> ChatFormatter:
    """The formatter of a tokenizer of the transformers library."""
    from .llama_tokenizer import LlamaHFTokenizer

    tokenizer = LlamaHFTokenizer.from_pretrained(pretrained_model_name_or_path).hf_tokenizer

    def formatter(*, messages: Messages, **kwargs: Any) -> ChatFormatterResponse:
        prompt = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return ChatFormatterResponse(prompt, tokenizer.eos_token, added_special=True)

    return formatter


def __getattr__(name: str) -> Any:
    """`format_llama3` and its kin: messages to a prompt, without a model."""
    begin, _, asked = name.partition("_")
    style = style_of(asked) if begin == "format" else None
    if style is None:
        raise AttributeError(
            f"pyggml.llama_cpp.llama_chat_format has no {name!r}; docs/llama_cpp.md says what there is"
        )

    def formatter(messages: Messages, **kwargs: Any) -> ChatFormatterResponse:
        values = {"bos_token": "", "eos_token": "", "messages": plain("messages", list(messages))}
        return ChatFormatterResponse(render(asked, style.source, values), list(style.stop) or None)

    return formatter


# -- models that see --------------------------------------------------------------------------------------------------


class MTMDChatHandler:
    """Lets a model read pictures: `clip_model_path` is the file of its tower (mmproj), which `Llama` loads with the
    model. Parts of messages are {"type": "image_url", "image_url": {"url": ...}}: a `data:` URL, one of the web, or
    `file://` with a path. `chat_format`: the form of chats, when the file has no template of its own."""

    chat_format: str | None = "vicuna"

    def __init__(self, clip_model_path: str, verbose: bool = True, **ignored: Any) -> None:
        self.clip_model_path = clip_model_path

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """The tower in a file of a repository of the Hub, see `Llama.from_pretrained`."""
        from ..hub import download

        return cls(download(repo_id, filename, cache_dir, local_dir), **options)

    @staticmethod
    def messages(given: Messages) -> list[dict[str, Any]]:
        """Messages whose parts `image_url` have become pictures. Raises ModelError for a picture that cannot be had,
        and OSError when a site cannot be reached."""
        made: list[dict[str, Any]] = []
        for message in given:
            content: Any = message.get("content")
            if isinstance(content, (list, tuple)):
                content = [_part(p) for p in cast("Sequence[Any]", content)]
            made.append({**message, "content": content})
        return made


class Llava15ChatHandler(MTMDChatHandler):
    """LLaVA 1.5."""


class Llava16ChatHandler(MTMDChatHandler):
    """LLaVA 1.6."""


class ObsidianChatHandler(MTMDChatHandler):
    """Obsidian."""


class MoondreamChatHandler(MTMDChatHandler):
    """Moondream 2."""


class NanoLlavaChatHandler(MTMDChatHandler):
    """nanoLLaVA."""

    chat_format = "chatml"


class Llama3VisionAlphaChatHandler(MTMDChatHandler):
    """Llama 3 Vision Alpha."""

    chat_format = "llama-3"


Llama3VisionAlpha = Llama3VisionAlphaChatHandler


class MiniCPMv26ChatHandler(MTMDChatHandler):
    """MiniCPM-V 2.6."""

    chat_format = "chatml"


class Qwen25VLChatHandler(MTMDChatHandler):
    """Qwen2.5-VL."""

    chat_format = "chatml"


class Gemma4ChatHandler(MTMDChatHandler):
    """Gemma 4."""

    chat_format = "gemma"


def _part(part: Any) -> Any:
    known: dict[str, Any] = dict(cast("Mapping[str, Any]", part)) if isinstance(part, Mapping) else {}
    if known.get("type") != "image_url":
        return cast("object", part)
    given: Any = known.get("image_url")
    url: Any = cast("Mapping[str, Any]", given).get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise ModelError(f"image_url must be a URL, or an object with a url, not {given!r:.60}")
    return {"type": "image", "image": _picture(url)}


def _picture(url: str) -> bytes | str:
    """A picture: its bytes, or its path."""
    parts = urlsplit(url)
    if parts.scheme == "data":
        head, _, body = url.partition(",")
        try:
            return base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
        except ValueError:
            raise ModelError("image_url: the data of a data: URL are no base64") from None
    if parts.scheme == "file":
        return unquote(parts.path)
    if parts.scheme not in ("http", "https"):
        raise ModelError(f"image_url must begin with data:, file:, http: or https:, not {url!r:.40}")
    from urllib.request import urlopen

    with urlopen(url, timeout=limits.BODY_SECONDS) as answer:
        data: bytes = answer.read(limits.MEDIA_BYTES + 1)
    if len(data) > limits.MEDIA_BYTES:
        raise ModelError(f"{url:.80}: the picture is larger than {limits.MEDIA_BYTES} bytes")
    return data
