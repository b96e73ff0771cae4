"""Chat templates: messages to the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NoReturn, TypedDict

from pyggml.errors import ModelError

from ..vocab import Vocab


class Message(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


# Llama-2's form; a system message goes into the first user message.
_LLAMA2 = """\
{%- if messages[0].role == 'system' -%}
  {%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}
  {%- set messages = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {{- bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' -}}
  {%- else -%}
    {{- ' ' + m.content.strip() + ' ' + eos_token -}}
  {%- endif -%}
{%- endfor -%}"""

_CHATML = """\
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}"""

# name: template, and strings that end a reply where the model has no token for them
NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama2": (_LLAMA2, ("[INST]", "</s>")),
    "chatml": (_CHATML, ("<|im_end|>",)),
}


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, run in a sandbox, and strings that end a reply. Made by `find_template`."""

    name: str
    source: str
    stop: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message], vocab: Vocab, add_generation_prompt: bool = True) -> str:
        """The text of a chat, by default up to where a reply begins. Raises ModelError where the template cannot be
        read, or refuses the messages."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        extensions = ["jinja2.ext.loopcontrols"]
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        try:
            return env.from_string(self.source).render(
                messages=list(messages),
                raise_exception=_refuse,
                strftime_now=_now,
                add_generation_prompt=add_generation_prompt,
                bos_token="" if vocab.bos is None else vocab.text(vocab.bos),
                eos_token="" if vocab.eos is None else vocab.text(vocab.eos),
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as e:
            raise ModelError(f"the chat template {self.name}: {e}") from None


def find_template(name: str | None, kv: Mapping[str, Any]) -> ChatTemplate:
    """The chat template of a name of `NAMED`, or (None) that of the model's metadata, or chatml where it has none.
    Raises ModelError for an unknown name."""
    if name is None:
        source = kv.get("tokenizer.chat_template")
        if isinstance(source, str):
            return ChatTemplate("of the model", source)
        name = "chatml"
    if name not in NAMED:
        raise ModelError(f"unknown chat template {name!r}; known are: {', '.join(NAMED)}")
    return ChatTemplate(name, *NAMED[name])


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
