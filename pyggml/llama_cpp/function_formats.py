"""llama-cpp-python's chat formats that offer tools: Functionary's, and ChatML with function calls.

llama-cpp-python asks the model several times for a reply: for the name of a function, then for its arguments. Here a
reply is one text, which is read when it is there; the prompt is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import ModelError
from ..llm.generate.templates import ChatTemplate, find_template
from ..llm.loaded import LoadedModel
from ..llm.openai.formats import Dialect, Format
from ..llm.openai.reply import Call, Reply, json_object
from ..llm.vocab import Vocab

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

# -- ChatML with function calls -----------------------------------------------------------------------------------

_TOLD = (
    "\\n\\nYou can respond to users messages with either a single message or one or more function calls."
    "\\n\\nTo respond with a message begin the message with \\'message:\\', use the following format:"
    "\\n\\nmessage:\\n<message>"
    "\\n\\nTo respond with one or more function calls begin the message with \\'functions.<function_name>:\\', "
    "use the following format:"
    '\\n\\nfunctions.<function_name>:\\n{ "arg1": "value1", "arg2": "value2" }'
    '\\nfunctions.<function_name>:\\n{ "arg1": "value1", "arg2": "value2" }'
)
# llama-cpp-python escapes the texts in this template as in HTML, so the model gets them escaped.
_CHATML = (
    "{%- for m in messages -%}{%- set of_function = m.role == 'tool' and m.tool_call_id is not defined -%}"
    "{{- '<|im_start|>' ~ ('function' if of_function else m.role | e) ~ '\\n' -}}"
    "{%- if m.role == 'system' -%}{{- m.content | e -}}{%- if tools -%}"
    "{{- '\\n\\nYou have access to the following functions:\\n' -}}{%- for t in tools -%}"
    "{{- '\\nfunctions.' ~ (t.function.name | e) ~ ':\\n' -}}"
    "{{- t.function.parameters | tojson(ensure_ascii=true, sort_keys=true) | replace('<', '\\\\u003c') "
    "| replace('>', '\\\\u003e') | replace('&', '\\\\u0026') | replace(\"'\", '\\\\u0027') ~ '\\n' -}}{%- endfor -%}"
    "{{- '" + _TOLD + "' -}}{%- endif -%}{{- '<|im_end|>\\n' -}}"
    "{%- elif m.role == 'user' -%}{{- (m.content | e) ~ '<|im_end|>\\n' -}}"
    "{%- elif m.role == 'assistant' -%}{%- if m.content -%}"
    "{{- ('message:\\n' if tools else '') ~ (m.content | e) ~ '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- if 'tool_calls' in m -%}{%- for c in m.tool_calls -%}"
    "{{- 'functions.' ~ (c.function.name | e) ~ ':\\n' ~ (c.function.arguments | e) -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def _read_chatml(text: str, done: bool, names: frozenset[str]) -> Reply:
    """`message:` and a text, or `functions.NAME:` and JSON, once or several times."""
    if not names:
        return Reply(text)
    start, message, begin = text.lstrip(), "message:", "functions."
    if start.startswith(message):
        return Reply(start[len(message) :].lstrip())
    if not done and (start.startswith(begin) or message.startswith(start) or begin.startswith(start)):
        return Reply()
    return _read_calls(start, text, begin) if start.startswith(begin) else Reply(text)


def _read_calls(start: str, text: str, begin: str) -> Reply:
    """Read calls: `functions.NAME:`, a new line, and JSON, for each call. When one of them is no call, all is text."""
    calls: list[Call] = []
    for part in start.removeprefix(begin).split(f"\n{begin}"):
        name, _, body = part.partition(":\n")
        arguments = json_object(body)
        if arguments is None:
            return Reply(text)
        calls.append(Call(name.strip(), arguments))
    return Reply(calls=calls)


_CHATML_FORM = Format("chatml-function-calling", _read_chatml, lambda name, schema: (f"functions.{name}:\n", schema))


# -- Functionary --------------------------------------------------------------------------------------------------

_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. The assistant calls functions with appropriate input when necessary"
)


def _type(schema: Any, level: int) -> str:
    """A JSON schema as a type of TypeScript."""
    if not isinstance(schema, Mapping):
        return "any"
    known = cast("Mapping[str, Any]", schema)
    if "$ref" in known:
        return str(known["$ref"]).split("/")[-1]
    if known.get("type") == "array":
        return f"Array<{_type(known.get('items', {}), level + 1)}>"
    if known.get("type") == "object":
        indent = "  " * level
        members = (f"{indent}  {k}: {_type(v, level + 1)},\n" for k, v in known.get("properties", {}).items())
        return "{\n" + "".join(members) + indent + "}"
    if "enum" in known:
        return _choices(known["enum"])
    return str(known.get("type", "any"))


def _choices(values: Sequence[Any]) -> str:
    return " | ".join(f'"{value}"' for value in values)


def _namespace(functions: Sequence[Mapping[str, Any]], indent: str, end: str) -> str:
    """Functions as declarations of TypeScript."""
    lines = ["// Supported function definitions that should be called when necessary.\nnamespace functions {\n\n"]
    parameters = [cast("Mapping[str, Any]", f.get("parameters", {})) for f in functions]
    shared = {name: schema for p in parameters for name, schema in p.get("$defs", {}).items()}
    for name, schema in shared.items():
        said = _type(schema, 1) if schema.get("type") == "object" else _choices(schema.get("enum", ()))
        lines.append(f"  type {name} = {said};\n")
    for function, known in zip(functions, parameters, strict=True):
        lines.append(f"{indent}// {function.get('description', '')}\n{indent}type {function['name']} = (_: {{\n")
        for name, schema in known.get("properties", {}).items():
            optional = "" if name in known.get("required", ()) else "?"
            lines.append(f"{indent * 2}// {schema.get('description', '')}\n")
            lines.append(f"{indent * 2}{name}{optional}: {_type(schema, 2)},\n")
        lines.append(f"{indent}}}) => any;\n\n")
    return "".join(lines) + "} // namespace functions" + end


def _declared(functions: Sequence[Mapping[str, Any]], indent: str, end: str) -> str:
    try:
        return _namespace(functions, indent, end)
    except RecursionError:
        raise ModelError("the parameters of a tool are nested too deeply") from None
    except (AttributeError, KeyError, TypeError) as e:
        raise ModelError(f"the parameters of a tool are no JSON schema that Functionary can be told of: {e}") from None


@dataclass(frozen=True)
class _Functionary(Dialect):
    """Functionary's first form: names of roles, and calls as `assistant to=functions.NAME:`."""

    def render(self, messages: Messages, vocab: Vocab, add_generation_prompt: bool = True, **variables: Any) -> str:
        """See `ChatTemplate.render`. llama-cpp-python declares `tools` twice, and `functions` once."""
        tools: Tools = variables.get("tools") or ()
        declared = _declared([t["function"] for t in tools], "  ", "\n")
        told = [declared] * (0 if not tools else 1 if variables.get("functions") else 2)
        parts = [f"system:\n{text}\n" for text in (*told, _SYSTEM)]
        parts += [_functionary(m) for m in messages]
        return "".join(parts) + ("assistant" if tools else "assistant:\n")


def _functionary(message: Mapping[str, Any]) -> str:
    """A message in Functionary's first form."""
    content, call = message.get("content") or "", message.get("function_call")
    match message["role"]:
        case "system":
            return f"system:\n{content}\n"
        case "user":
            return f"user:\n</s>{content}</s>\n"
        case "tool" if "tool_call_id" not in message:
            return f"function name=functions.{message.get('name', '')}:\n{content}\n"
        case "tool":
            return f"function name={message['tool_call_id']}:\n{content}\n"
        case "assistant" if isinstance(call, Mapping):
            said = f"assistant:\n{content}\n" if content else ""
            told = cast("Mapping[str, Any]", call)
            return f"{said}assistant to=functions.{told.get('name')}:\n{told.get('arguments')}</s>\n"
        case "assistant" if message.get("tool_calls"):
            first = message["tool_calls"][0]
            return f"assistant to={first.get('id')}:\n{first['function']['arguments']}</s>\n"
        case "assistant":
            return f"assistant:\n{content}\n"
        case role:
            raise ModelError(f"chat_format 'functionary' has no role {role!r:.60}")


def _read_functionary(text: str, done: bool, names: frozenset[str]) -> Reply:
    """` to=functions.NAME:` and arguments, or `:` and a text."""
    if not names:
        return Reply(text)
    head, newline, body = text.partition("\n")
    if not newline:
        return Reply(text if done else "")
    if head.strip() == ":":
        return Reply(body)
    name = head.strip().removeprefix("to=functions.").removesuffix(":")
    if not done:
        return Reply()
    arguments = json_object(body)
    return Reply(text) if arguments is None else Reply(calls=[Call(name, arguments)])


_FUNCTIONARY_FORM = Format(
    "functionary-v0", _read_functionary, lambda name, schema: (f" to=functions.{name}:\n", schema)
)


_TOLD_BY_US = {"tools", "documents", "functions", "tool_choice"}  # not for the model's own template


@dataclass(frozen=True)
class _FunctionaryTokens(Dialect):
    """Functionary's later forms: the model's own template, before which tools are declared. `reply` and `text`: what
    stands before a reply, and before one that is no call."""

    own: ChatTemplate = field(default_factory=lambda: ChatTemplate("", ""))
    reply: str = ""
    text: str = ""

    def render(self, messages: Messages, vocab: Vocab, add_generation_prompt: bool = True, **variables: Any) -> str:
        """See `ChatTemplate.render`. The model's own template gets no tools: a system message declares them."""
        tools: Tools = variables.get("tools") or ()
        is_told = tools or variables.get("tool_choice") == "none"
        told = [_declared([t["function"] for t in tools], "", "")] if is_told else []
        before = [{"role": "system", "content": text} for text in (*told, _SYSTEM)]
        own = {k: v for k, v in variables.items() if k not in _TOLD_BY_US}
        prompt = self.own.render([*before, *map(_function_named, messages)], vocab, False, **own)
        return prompt + self.reply + ("" if tools else self.text)


def _function_named(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the full names of its functions."""
    out = dict(message)
    if out["role"] == "tool" and "tool_call_id" not in out and "name" in out:
        out = {**out, "role": "function", "name": f"functions.{out['name']}"}
    if isinstance(call := out.get("function_call"), Mapping):
        known = cast("Mapping[str, Any]", call)
        out["function_call"] = {**known, "name": f"functions.{known.get('name')}"}
    return out


_BEGIN, _END = "<|START_OF_FUNCTION_CALL|>", "<|END_OF_FUNCTION_CALL|>"
_RECIPIENT, _CONTENT, _FROM = "<|recipient|>", "<|content|>", "<|from|>"


def _read_v1(text: str, done: bool, names: frozenset[str]) -> Reply:
    """Text, then a name and arguments between tokens."""
    content, begin, body = text.partition(_BEGIN)
    if not begin or not names:
        return Reply(text)
    name, _, body = body.partition(_END)[0].partition(":\n")
    if not done:
        return Reply(content)
    arguments = json_object(body)
    return Reply(text) if arguments is None else Reply(content, calls=[Call(name.strip(), arguments)])


def _read_v2(text: str, done: bool, names: frozenset[str]) -> Reply:
    """A recipient, `<|content|>` and a text or arguments; further ones begin with `<|from|>`."""
    content: list[str] = []
    calls: list[Call] = []
    parts = text.split(_FROM)
    for i, part in enumerate(parts):
        head, found, body = part.rpartition(_CONTENT) if i or names else ("all", "", part)
        recipient = head.partition(_RECIPIENT)[2] if i else head
        closed = done or i < len(parts) - 1
        if recipient.strip() == "all" and (found or not i):
            content.append(body.rstrip("\n") if i < len(parts) - 1 else body)
        elif found and closed and (arguments := json_object(body)) is not None:
            calls.append(Call(recipient.strip(), arguments))
        elif closed:
            content.append(part)
    return Reply("".join(content), calls=calls)


_V1_FORM = Format("functionary-v1", _read_v1, lambda name, schema: (f"{_BEGIN}{name}:\n", schema, _END), (_BEGIN, _END))
_V2_FORM = Format(
    "functionary-v2",
    _read_v2,
    lambda name, schema: (f"{name}\n{_CONTENT}", schema),
    (_RECIPIENT, _CONTENT, _FROM),
)


def _functionary_tokens(name: str) -> Callable[[LoadedModel], Dialect]:
    def made(model: LoadedModel) -> Dialect:
        if not isinstance(model.kv.get("tokenizer.chat_template"), str):
            raise ModelError(
                f"chat_format {name!r} writes chats by the model's own template, and the metadata of this file has none"
            )
        own = find_template(None, model.kv)
        if len(model.vocab.tokenize(_BEGIN, False, True, continued=True)) == 1:
            return _FunctionaryTokens(name, own.source, ("<|END_OF_ASSISTANT|>",), None, _V1_FORM, own, "assistant:\n")
        reply, text = f"{_FROM}assistant\n{_RECIPIENT}", f"all\n{_CONTENT}"
        return _FunctionaryTokens(name, own.source, ("<|stop|>",), None, _V2_FORM, own, reply, text)

    return made


FUNCTION_FORMATS: Mapping[str, Callable[[LoadedModel], Dialect]] = {
    "functionary": lambda _: _Functionary("functionary", "", ("user:", "</s>"), None, _FUNCTIONARY_FORM),
    "functionary-v1": _functionary_tokens("functionary-v1"),
    "functionary-v2": _functionary_tokens("functionary-v2"),
    "chatml-function-calling": lambda _: Dialect(
        "chatml-function-calling", _CHATML, ("<|im_end|>",), None, _CHATML_FORM
    ),
}
