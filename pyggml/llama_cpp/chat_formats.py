"""The values that llama-cpp-python knows for `chat_format`, as chat templates that make the same prompts.

Most formats are `_Style`s, of which a Jinja template is made. Those that offer tools are in `function_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ModelError
from ..llm.generate.named_templates import TEMPLATES
from ..llm.generate.templates import ChatTemplate, find_template
from ..llm.loaded import LoadedModel
from .function_formats import FUNCTION_FORMATS


@dataclass(frozen=True)
class _Style:
    """How a format writes a chat.

    head     the text before the messages; {system} stands for the first system message
    roles    role -> the text before its messages; messages of other roles are left out
    ends     the texts after the content of messages, which take turns
    joint    the text between the role and the content
    empty    the text after the role of a message without content
    reply    the text before the reply; None: the role of the assistant, as before a message without content
    default  the system message when a chat has none
    """

    head: str
    roles: Mapping[str, str]
    ends: tuple[str, ...]
    joint: str = ""
    empty: str = ""
    reply: str | None = None
    default: str = ""

    def source(self) -> str:
        """The format as a Jinja template."""
        before, _, behind = self.head.partition("{system}")
        system = f" ~ system ~ {behind!r}" if "{system}" in self.head else ""
        reply = self.roles["assistant"] + self.empty if self.reply is None else self.reply
        return (
            _SYSTEM.replace("DEFAULT", repr(self.default))
            + f"{{%- set roles, ends = {dict(self.roles)!r}, {list(self.ends)!r} -%}}{{{{- {before!r}{system} -}}}}"
            + "{%- for m in messages if m.role in roles -%}{%- if m.content -%}"
            + f"{{{{- roles[m.role] ~ {self.joint!r} ~ m.content ~ ends[loop.index0 % {len(self.ends)}] -}}}}"
            + f"{{%- else -%}}{{{{- roles[m.role] ~ {self.empty!r} -}}}}{{%- endif -%}}{{%- endfor -%}}"
            + f"{{{{- {reply!r} -}}}}"
        )


_SYSTEM = (
    "{%- set first = messages | selectattr('role', 'equalto', 'system') | first -%}"
    "{%- set system = (first.content if first is defined else '') or DEFAULT -%}"
)

_LLAMA_2 = (
    _SYSTEM.replace("DEFAULT", "''")
    + "{{- '[INST] <<SYS>>\\n' ~ system ~ '\\n<</SYS>> ' if system else ' ' -}}"
    + "{%- set roles, ends = {'user': '<s>[INST]', 'assistant': '[/INST]'}, [' ', '</s>'] -%}"
    + "{%- for m in messages if m.role in roles -%}"
    + "{%- if loop.first and system -%}{{- m.content ~ ends[0] -}}"
    + "{%- elif m.content -%}{{- roles[m.role] ~ m.content ~ ' ' ~ ends[loop.index0 % 2] -}}"
    + "{%- else -%}{{- roles[m.role] ~ ' ' -}}{%- endif -%}{%- endfor -%}{{- '[/INST]' -}}"
)
_MISTRAL_INSTRUCT = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '[INST] ' ~ m.content -}}"
    "{%- elif m.role == 'assistant' and (m.content or not m.tool_calls) -%}{{- ' [/INST]' ~ m.content ~ '</s>' -}}"
    "{%- endif -%}{%- endfor -%}{{- ' [/INST]' -}}"
)
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_OPENBUDDY_SYSTEM = """\
You are a helpful, respectful and honest INTP-T AI Assistant named Buddy. You are talking to a human User.
Always answer as helpfully and logically as possible, while being safe. Your answers should not include any harmful, \
political, religious, unethical, racist, sexist, toxic, dangerous, or illegal content. Please ensure that your \
responses are socially unbiased and positive in nature.
If a question does not make any sense, or is not factually coherent, explain why instead of answering something not \
correct. If you don't know the answer to a question, please don't share false information.
You can speak fluently in many languages, for example: English, Chinese.
You cannot access the internet, but you have vast knowledge, cutoff: 2021-09.
You are trained by OpenBuddy team, (https://openbuddy.ai, https://github.com/OpenBuddy/OpenBuddy), you are based on \
LLaMA and Falcon transformers model, not related to GPT or OpenAI.

"""
_ORCA_SYSTEM = (
    "You are a helpful assistant. Please answer truthfully and write out your thinking step by step to be sure you get "
    "the right answer. If you make a mistake or encounter an error in your thinking, say so out loud and attempt to "
    "correct it. If you don't know or aren't sure about something, say so clearly. You will act as a professional "
    "logician, mathematician, and physicist. You will also act as the most appropriate type of expert to answer any "
    "particular question or solve the relevant problem; state which expert type your are, if so. Also think of any "
    "particular named expert that would be ideal to answer the relevant question or solve the relevant problem; name "
    "and act as them, if appropriate."
)
_SNOOZY_SYSTEM = (
    "The prompt below is a question to answer, a task to complete, or a conversation to respond to; "
    "decide which and write an appropriate response."
)


def _roles(user: str, assistant: str, **others: str) -> Mapping[str, str]:
    return {"user": user, "assistant": assistant, **others}


_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
_CHATML = _roles("<|im_start|>user", "<|im_start|>assistant")
_STYLES: dict[str, _Style | str] = {
    "llama-2": _LLAMA_2,
    "llama-3": _Style(
        "", {role: _HEADER.format(role) for role in ("system", "user", "assistant")}, ("<|eot_id|>",)
    ),
    "alpaca": _Style(
        "{system}\n\n", _roles("### Instruction", "### Response"), ("\n\n", "</s>"), ": ", ":", reply=""
    ),
    "qwen": _Style(
        "<|im_start|>system\n{system}<|im_end|>\n", _CHATML, ("<|im_end|>\n",), "\n", "\n",
        default="You are a helpful assistant.",
    ),
    "vicuna": _Style(f"{_VICUNA_SYSTEM} ", _roles("USER", "ASSISTANT"), (" ", "</s>"), ": ", ":"),
    "oasst_llama": _Style(
        "[INST] <<SYS>>\n{system}\n<</SYS>>\n\n", _roles("<|prompter|>", "<|assistant|>"), ("</s>",)
    ),
    "baichuan-2": _Style("{system}", _roles("<reserved_106>", "<reserved_107>"), ("",)),
    "baichuan": _Style("{system}", _roles("<reserved_102>", "<reserved_103>"), ("",)),
    "openbuddy": _Style(f"{_OPENBUDDY_SYSTEM}\n", _roles("User", "Assistant"), ("\n",), ": ", ":"),
    "redpajama-incite": _Style("{system}\n", _roles("<human>", "<bot>"), ("\n",), ": ", ":"),
    "snoozy": _Style(
        "{system}\n", _roles("### Prompt", "### Response"), ("\n",), ": ", ":", default=_SNOOZY_SYSTEM
    ),
    "phind": _Style(
        "### System Prompt\nYou are an intelligent programming assistant.\n\n",
        _roles("### User Message", "### Assistant"), ("\n\n",), ": ", ":",
    ),
    "intel": _Style(
        "### System:\n{system_message}\n", _roles("### User:", "### Assistant:"), ("\n",), ": ", ":"
    ),
    "open-orca": _Style(
        f"{_ORCA_SYSTEM}<|end_of_turn|>\n", _roles("User", "Assistant"), ("<|end_of_turn|>\n",), ": ", ": "
    ),
    "mistrallite": _Style(
        "<|system|>{system}</s>", _roles("<|prompter|>", "</s>\n<|assistant|>"), (" ",)
    ),
    "zephyr": _Style(
        "<|system|>\n{system}</s>\n", _roles("<|user|>\n", "<|assistant|>\n"), ("</s>\n",), "\n", "\n"
    ),
    "pygmalion": _Style("<|system|>{system}\n\n", _roles("<|user|>", "<|model|>"), ("\n\n",), "\n", "\n"),
    "chatml": _Style("<|im_start|>system\n{system}<|im_end|>\n", _CHATML, ("<|im_end|>\n",), "\n", "\n"),
    "mistral-instruct": _MISTRAL_INSTRUCT,
    "chatglm3": _Style("<|system|>\n{system}", _roles("<|user|>", "<|assistant|>"), ("",), "\n "),
    "openchat": _Style(
        "{system}<|end_of_turn|><|end_of_turn|>\n",
        _roles("GPT4 Correct User: ", "<|end_of_turn|>GPT4 Correct Assistant: "), ("<|end_of_turn|>\n",), "\n", "\n",
    ),
    "saiga": _Style(
        "", {"user": "<s>user", "bot": "<s>bot", "system": "<s>system"}, ("</s>",), "\n", "\n", reply="<s>bot"
    ),
    "gemma": _Style("", _roles("<start_of_turn>user\n", "<start_of_turn>model\n"), ("<end_of_turn>\n",)),
}  # fmt: skip
_STOPS = {
    "llama-3": "<|eot_id|>",
    "qwen": "<|endoftext|>",
    "redpajama-incite": "<human>",
    "snoozy": "###",
    "open-orca": "User",
    "zephyr": "</s>",
    "pygmalion": "\n",
    "chatml": "<|im_end|>",
    "mistral-instruct": "</s>",
    "chatglm3": "</s>",
    "openchat": "<|end_of_turn|>",
    "gemma": "<end_of_turn>\n",
}
_OF_THE_FILE = "chat_template."  # names of templates in the metadata begin with it

NAMES = (*_STYLES, *FUNCTION_FORMATS)


def style_of(name: str) -> ChatTemplate | None:
    """The format `name`, spelt as in the names of llama-cpp-python's functions (llama3, mistral_instruct); None when
    there is no such format, or it needs a model."""
    found = next((n for n in _STYLES if re.sub("[-_]", "", n) == name.replace("_", "")), None)
    if found is None:
        return None
    style = _STYLES[found]
    stop = (_STOPS[found],) if found in _STOPS else ()
    return ChatTemplate(found, style if isinstance(style, str) else style.source(), stop)


def find_chat_format(name: str | None, model: LoadedModel) -> tuple[str, ChatTemplate]:
    """The chat format `name` and its template. None: the template of the model's metadata, or "llama-2" when it has
    none. The names are those of llama-cpp-python and those of `find_template`. Raises ModelError for other names, and
    for a format that needs something which the model does not have."""
    if name is None:
        name = f"{_OF_THE_FILE}default" if isinstance(model.kv.get("tokenizer.chat_template"), str) else "llama-2"
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"chat_format must be a name, not {name!r:.60}")
    if name in _STYLES and (style := style_of(name.replace("-", "_"))) is not None:
        return name, style
    if name in FUNCTION_FORMATS:
        return name, FUNCTION_FORMATS[name](model)
    if name == f"{_OF_THE_FILE}default" and isinstance(model.kv.get("tokenizer.chat_template"), str):
        return name, find_template(None, model.kv)
    if name.startswith(_OF_THE_FILE):
        source = model.kv.get(f"tokenizer.{name}")
        if isinstance(source, str):
            return name, ChatTemplate(name, source)
        raise ModelError(f"chat_format {name!r}: the model's metadata has no such template")
    try:
        return name, find_template(name, model.kv)
    except ModelError:
        known = ", ".join(NAMES)
        others = ", ".join(n for n in TEMPLATES if n not in NAMES)
        raise ModelError(
            f"unknown chat_format {name!r:.60}. llama-cpp-python's are: {known}; llama.cpp's: {others}; Jinja, and the "
            "path of a file with Jinja, are taken as well"
        ) from None
