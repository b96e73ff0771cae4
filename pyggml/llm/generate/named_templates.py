"""The chat templates that llama.cpp has by name, as Jinja sources of our own.

Most are a frame around each message: a `Frame` says what stands before and after it, by role. Where the text begins
with bos, tokenizing adds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Around = tuple[str, str]


@dataclass(frozen=True)
class Frame:
    """How messages are framed.

    roles         role -> the texts before and after the content of its messages; "*": any other role (messages of other
                  roles are left out when there is no "*"). In these texts {role}, {Role} and {ROLE} stand for the role
                  as it is, with a capital, and in capitals
    reply         the text before the reply that the model is to write
    begin         the text before the first message
    no_system     the text before the first message when it is not a system message
    trim          roles whose content loses the spaces around it; "*": all
    system_first  a system message counts only when it is the first message
    """

    roles: Mapping[str, Around]
    reply: str = ""
    begin: str = ""
    no_system: str = ""
    trim: tuple[str, ...] = ()
    system_first: bool = False

    def source(self) -> str:
        """The frame as a Jinja template."""
        if self.system_first:
            rest = {role: around for role, around in self.roles.items() if role != "system"}
            framed = "{%- if m.role == 'system' -%}{%- if loop.first -%}" + self._content("system") + "{%- endif -%}"
            framed += "{%- else -%}" + self._framed(rest) + "{%- endif -%}"
        else:
            framed = self._framed(self.roles)
        parts = [_text(self.begin)]
        if self.no_system:
            parts.append("{%- if messages[0].role != 'system' -%}" + _text(self.no_system) + "{%- endif -%}")
        parts.append("{%- for m in messages -%}" + framed + "{%- endfor -%}")
        if self.reply:
            parts.append("{%- if add_generation_prompt -%}" + _text(self.reply) + "{%- endif -%}")
        return "".join(parts)

    def _framed(self, roles: Mapping[str, Around]) -> str:
        out, word = "", "if"
        for role in (r for r in roles if r != "*"):
            out += f"{{%- {word} m.role == {role!r} -%}}{self._content(role)}"
            word = "elif"
        if "*" in roles:
            out += self._content("*") if word == "if" else "{%- else -%}" + self._content("*")
        return out + ("" if word == "if" else "{%- endif -%}")

    def _content(self, role: str) -> str:
        before, after = self.roles[role]
        content = "{{- m.content | trim -}}" if role in self.trim or "*" in self.trim else "{{- m.content -}}"
        return _text(before) + content + _text(after)


def _text(text: str) -> str:
    """Jinja that gives a text, in which {role}, {Role} and {ROLE} are the role of the message `m`, see `Frame`."""
    if not text:
        return ""
    expression = repr(text)
    for name, value in (("{role}", "m.role"), ("{Role}", "m.role | capitalize"), ("{ROLE}", "m.role | upper")):
        expression = expression.replace(name, f"' ~ ({value}) ~ '")
    return "{{- " + expression + " -}}"


def _same(before: str, after: str, reply: str, **kwargs: object) -> Frame:
    """A frame that is the same for every role."""
    return Frame({"*": (before, after)}, reply, **kwargs)  # pyright: ignore[reportArgumentType]


def _llama2(system: Around, between: str = "[INST] ", content: str = "m.content") -> str:
    """Turns in [INST]; the first begins at once."""
    return (
        "{{- '[INST] ' -}}{%- set turn = namespace(open=true) -%}{%- for m in messages -%}"
        "{%- if not turn.open -%}" + _text(between) + "{%- set turn.open = true -%}{%- endif -%}"
        "{%- if m.role == 'system' -%}" + f"{_text(system[0])}{{{{- {content} -}}}}{_text(system[1])}"
        "{%- elif m.role == 'user' -%}{{- " + content + " ~ ' [/INST]' -}}"
        "{%- else -%}{{- " + content + " ~ '</s>' -}}{%- set turn.open = false -%}{%- endif -%}{%- endfor -%}"
    )


def _mistral(outside: str, inside: str, reply: str = "m.content") -> str:
    """Mistral's first frames: `outside` and `inside` are the spaces around and within [INST]."""
    return (
        "{%- set turn = namespace(open=false) -%}{%- for m in messages -%}"
        "{%- if not turn.open -%}" + _text(f"{outside}[INST]{inside}") + "{%- set turn.open = true -%}{%- endif -%}"
        "{%- if m.role == 'system' -%}{{- m.content ~ '\\n\\n' -}}"
        "{%- elif m.role == 'user' -%}{{- m.content -}}" + _text(f"{outside}[/INST]") + "{%- else -%}" + _text(inside)
        + "{{- " + reply + " ~ '</s>' -}}{%- set turn.open = false -%}{%- endif -%}{%- endfor -%}"
    )  # fmt: skip


def _mistral_v7(space: str) -> Frame:
    roles = {"system": (f"[SYSTEM_PROMPT]{space}", "[/SYSTEM_PROMPT]"), "user": (f"[INST]{space}", "[/INST]")}
    return Frame({**roles, "*": (space, "</s>")})


# A system message goes into the user's that follows it.
_GEMMA = (
    "{%- set held = namespace(text='') -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set held.text = held.text ~ (m.content | trim) -%}{%- else -%}"
    "{%- set role = 'model' if m.role == 'assistant' else m.role -%}{{- '<start_of_turn>' ~ role ~ '\\n' -}}"
    "{%- if held.text and role != 'model' -%}{{- held.text ~ '\\n\\n' -}}{%- set held.text = '' -%}{%- endif -%}"
    "{{- (m.content | trim) ~ '<end_of_turn>\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)
_ORION = (
    "{%- set held = namespace(text='') -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set held.text = held.text ~ m.content -%}"
    "{%- elif m.role == 'user' -%}{{- 'Human: ' ~ (held.text ~ '\\n\\n' if held.text else '') -}}"
    "{%- set held.text = '' -%}{{- m.content ~ '\\n\\nAssistant: </s>' -}}"
    "{%- else -%}{{- m.content ~ '</s>' -}}{%- endif -%}{%- endfor -%}"
)
_MONARCH = (
    "{%- for m in messages -%}{{- ('' if loop.first else '<s>') ~ m.role ~ '\\n' ~ m.content ~ '</s>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<s>assistant\\n' -}}{%- endif -%}"
)
_RWKV_ROLES = {"system": ("System: ", "\n\n"), "user": ("User: ", "\n\n"), "assistant": ("Assistant: ", "\n\n")}
_RWKV_REPLY = "{%- if messages[-1].role == 'user' -%}{{- 'Assistant:' -}}{%- endif -%}"
_RWKV = Frame(_RWKV_ROLES, trim=("*",)).source() + _RWKV_REPLY

_EXAONE = {"system": ("[|system|]", "[|endofturn|]\n"), "user": ("[|user|]", "\n")}
_EXAONE["assistant"] = ("[|assistant|]", "[|endofturn|]\n")
_VICUNA = {"user": ("USER: ", "\n"), "assistant": ("ASSISTANT: ", "</s>\n")}
_GRANITE = ("<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n")
_GRANITE_CALL = ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", "<|end_of_text|>\n")
_GRANITE_4 = Frame({"assistant_tool_call": _GRANITE_CALL, "*": _GRANITE}, "<|start_of_role|>assistant<|end_of_role|>")
_COHERE = ("SYSTEM", "system"), ("USER", "user"), ("CHATBOT", "assistant")
_PANGU = {"system": "系统", "user": "用户", "assistant": "助手", "tool": "工具", "function": "方法"}
_KIMI = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "system",
}  # role -> whose token begins it
_END = "<｜end▁of▁sentence｜>"

_FRAMES: dict[str, Frame | str] = {
    "bailing": Frame({"user": ("<role>HUMAN</role>", ""), "*": ("<role>{ROLE}</role>", "")}, "<role>ASSISTANT</role>"),
    "bailing-think": Frame(
        {"user": ("<role>HUMAN</role>", ""), "*": ("<role>{ROLE}</role>", "")}, "<role>ASSISTANT</role><think>"
    ),
    "bailing2": Frame(
        {"user": ("<role>HUMAN</role>", "<|role_end|>"), "*": ("<role>{ROLE}</role>", "<|role_end|>")},
        "<role>ASSISTANT</role>",
        no_system="<role>SYSTEM</role>detailed thinking off<|role_end|>",
    ),
    "chatglm3": _same("<|{role}|>\n ", "", "<|assistant|>", begin="[gMASK]sop"),
    "chatglm4": _same("<|{role}|>\n", "", "<|assistant|>\n", begin="[gMASK]<sop>"),
    "chatml": _same("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "command-r": Frame(
        {role: (f"<|START_OF_TURN_TOKEN|><|{name}_TOKEN|>", "<|END_OF_TURN_TOKEN|>") for name, role in _COHERE},
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        trim=("*",),
    ),
    "deepseek": Frame(
        {
            "system": ("", ""),
            "user": ("### Instruction:\n", "\n"),
            "assistant": ("### Response:\n", "\n<|EOT|>\n"),
        },
        "### Response:\n",
    ),
    "deepseek-ocr": _same("", "", ""),
    "deepseek2": Frame(
        {"system": ("", "\n\n"), "user": ("User: ", "\n\n"), "assistant": ("Assistant: ", _END)}, "Assistant:"
    ),
    "deepseek3": Frame(
        {"system": ("", "\n\n"), "user": ("<｜User｜>", ""), "assistant": ("<｜Assistant｜>", _END)}, "<｜Assistant｜>"
    ),
    "exaone-moe": Frame(
        {r: (f"<|{r}|>\n", "<|endofturn|>\n") for r in ("system", "user", "assistant", "tool")},
        "<|assistant|>\n",
        trim=("*",),
    ),
    "exaone3": Frame(_EXAONE, "[|assistant|]", trim=("*",)),
    "exaone4": Frame({**_EXAONE, "tool": ("[|tool|]", "[|endofturn|]\n")}, "[|assistant|]", trim=("*",)),
    "falcon3": _same("<|{role}|>\n", "\n", "<|assistant|>\n"),
    "gemma": _GEMMA,
    "gigachat": Frame(
        {
            "system": ("", "<|message_sep|>"),
            "user": ("user<|role_sep|>", "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"),
            "assistant": ("assistant<|role_sep|>", "<|message_sep|>"),
        },
        "assistant<|role_sep|>",
        begin="<s>",
        system_first=True,
    ),
    "glmedge": _same("<|{role}|>\n", "", "<|assistant|>"),
    "gpt-oss": Frame(
        {
            "assistant": ("<|start|>assistant<|message|>", "<|return|>"),
            "*": ("<|start|>{role}<|message|>", "<|end|>"),
        },
        "<|start|>assistant",
    ),
    "granite": Frame(
        {"assistant_tool_call": (_GRANITE[0] + "<|tool_call|>", _GRANITE[1]), "*": _GRANITE},
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "granite-4.0": _GRANITE_4,
    "granite-4.1": _GRANITE_4,
    "grok-2": Frame(
        {
            "system": ("System: ", "<|separator|>\n\n"),
            "user": ("Human: ", "<|separator|>\n\n"),
            "assistant": ("Assistant: ", "<|separator|>\n\n"),
        },
        "Assistant:",
        trim=("system", "user"),
    ),
    "hunyuan-dense": Frame(
        {
            "system": ("", "<｜hy_place▁holder▁no▁3｜>"),
            "assistant": ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
            "user": ("<｜hy_User｜>", "<｜hy_Assistant｜>"),
        },
        system_first=True,
    ),
    "hunyuan-moe": Frame(
        {
            "system": ("<|startoftext|>", "<|extra_4|>"),
            "assistant": ("", "<|eos|>"),
            "*": ("<|startoftext|>", "<|extra_0|>"),
        }
    ),
    "hunyuan-vl": Frame(
        {
            "system": ("", "<｜hy_place▁holder▁no▁3｜>"),
            "user": ("", "<｜hy_User｜>"),
            "assistant": ("", "<｜hy_Assistant｜>"),
        },
        begin="<｜hy_begin▁of▁sentence｜>",
        system_first=True,
    ),
    "kimi-k2": Frame(
        {r: (f"<|im_{t}|>{r}<|im_middle|>", "<|im_end|>") for r, t in _KIMI.items()} | {"*": ("", "<|im_end|>")},
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "llama2": _llama2(("", "\n")),
    "llama2-sys": _llama2(("<<SYS>>\n", "\n<</SYS>>\n\n")),
    "llama2-sys-bos": _llama2(("<<SYS>>\n", "\n<</SYS>>\n\n"), "<s>[INST] "),
    "llama2-sys-strip": _llama2(("<<SYS>>\n", "\n<</SYS>>\n\n"), content="(m.content | trim)"),
    "llama3": _same(
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        trim=("*",),
    ),
    "llama4": _same(
        "<|header_start|>{role}<|header_end|>\n\n",
        "<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        trim=("*",),
    ),
    "megrez": _same("<|role_start|>{role}<|role_end|>", "<|turn_end|>", "<|role_start|>assistant<|role_end|>"),
    "minicpm": Frame({"user": ("<用户>", "<AI>"), "*": ("", "")}, trim=("*",)),
    "mistral-v1": _mistral(" ", " "),
    "mistral-v3": _mistral("", " ", "(m.content | trim)"),
    "mistral-v3-tekken": _mistral("", ""),
    "mistral-v7": _mistral_v7(" "),
    "mistral-v7-tekken": _mistral_v7(""),
    "monarch": _MONARCH,
    "openchat": Frame(
        {"system": ("", "<|end_of_turn|>"), "*": ("GPT4 Correct {Role}: ", "<|end_of_turn|>")},
        "GPT4 Correct Assistant:",
    ),
    "orion": _ORION,
    "pangu-embedded": Frame(
        {role: (f"[unused9]{name}：", "[unused10]") for role, name in _PANGU.items()},
        "[unused9]助手：",
        no_system="[unused9]系统：[unused10]",
    ),
    "phi3": _same("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _same("<|im_start|>{role}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "rwkv-world": _RWKV,
    "seed_oss": Frame(
        {"assistant": ("<seed:bos>assistant\n", "<seed:eos>"), "*": ("<seed:bos>{role}\n", "<seed:eos>")},
        "<seed:bos>assistant\n",
        trim=("assistant",),
    ),
    "smolvlm": Frame(
        {
            "system": ("", "\n\n"),
            "user": ("User: ", "<end_of_utterance>\n"),
            "*": ("Assistant: ", "<end_of_utterance>\n"),
        },
        "Assistant:",
        begin="<|im_start|>",
    ),
    "solar-open": _same("<|begin|>{role}<|content|>", "<|end|>", "<|begin|>assistant"),
    "vicuna": Frame({"system": ("", "\n\n"), **_VICUNA}, "ASSISTANT:"),
    "vicuna-orca": Frame({"system": ("SYSTEM: ", "\n"), **_VICUNA}, "ASSISTANT:"),
    "yandex": Frame({"user": (" Пользователь: ", "\n\n"), "assistant": (" Ассистент: ", "\n\n")}, " Ассистент:[SEP]"),
    "zephyr": _same("<|{role}|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
}

# Texts that end a reply when the model has no token for that: the text after a reply, or before the next message.
_STOPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bailing", "bailing-think"), ("<role>",)),
    **dict.fromkeys(("chatglm3", "chatglm4"), ("<|user|>", "<|observation|>")),
    **dict.fromkeys(("falcon3", "glmedge"), ("<|user|>", "<|system|>")),
    "gemma": ("<end_of_turn>",),
    **dict.fromkeys(("llama2", "llama2-sys", "llama2-sys-bos", "llama2-sys-strip"), ("[INST]", "</s>")),
    "minicpm": ("<用户>",),
    **dict.fromkeys(("mistral-v1", "mistral-v3", "mistral-v3-tekken"), ("[INST]", "</s>")),
    **dict.fromkeys(("monarch", "orion"), ("</s>",)),
    "rwkv-world": ("\n\nUser:",),
    "yandex": (" Пользователь:",),
}


@dataclass(frozen=True)
class NamedTemplate:
    """A template of `TEMPLATES`: its Jinja source, and texts that end a reply of a model without a token for that."""

    source: str
    stop: tuple[str, ...] = field(default=())


def _made(name: str, frame: Frame | str) -> NamedTemplate:
    if isinstance(frame, str):
        return NamedTemplate(frame, _STOPS[name])
    around = frame.roles.get("assistant", frame.roles.get("*", ("", "")))
    end = around[1].strip()
    return NamedTemplate(frame.source(), _STOPS.get(name, (end,) if end else ()))


TEMPLATES: Mapping[str, NamedTemplate] = {name: _made(name, frame) for name, frame in _FRAMES.items()}
