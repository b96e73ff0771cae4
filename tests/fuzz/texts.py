"""Texts: vocabularies and what they cut, grammars, schemas, templates, and what a model says."""

# ruff: noqa: E501  (seeds are shown as they are)

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable

import numpy as np

from pyggml.errors import ModelError, SamplerError
from pyggml.llm.generate.templates import find_template
from pyggml.llm.openai import formats
from pyggml.llm.openai.formats import Format
from pyggml.llm.samplers.grammar import Grammar
from pyggml.llm.vocab import StreamDecoder, Vocab

from .changes import change_json
from .harness import harness, small_model

KINDS = ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "gemma4", "whitespace", "hybriddna")
PRE = (
    "default",
    "llama-bpe",
    "gpt-2",
    "deepseek-llm",
    "qwen2",
    "falcon",
    "command-r",
    "tekken",
    "gpt-4o",
    "kimi-k2",
    "smollm",
)


def _vocabularies() -> Iterable[bytes]:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "\u2581",
        "a",
        "\u2581a",
        "b",
        "ab",
        "##b",
        "\u0120",
        "\u0120a",
        "'a'",
        "b'\\xff'",
    ]
    for i in range(len(KINDS)):
        parts = [bytes([i, i, 0xFF, 0]), *(t.encode() for t in tokens)]
        yield b"\n".join(parts) + b"\n\na b ab <s> \xc3\xa9 abab\x00ba"
    every = b"".join(b"\n<0x%02X>" % b for b in range(256))
    yield b"\0\0\xff\0\n<unk>\n<s>\n</s>\n" + "\u2581\na\n\u2581a".encode() + every + b"\n\na \xff\xf0 aa"
    yield b"\5\0\xff\0\n<unk>\n<s>\n</s>\n" + "\u2581\na\n\u2581a\nab".encode() + every + b"\n\na \xff\xf0 aa"


def _some_bytes(data: bytes, n: int) -> bytes:
    return bytes(data[i % len(data)] for i in range(n)) if data else bytes(n)


@harness(
    "pyggml.llm.vocab", "pyggml.native.vocab", seeds=_vocabularies, allowed=ModelError,
    words="<unk> <s> </s> <0x41> <0xFF> ## \u2581 \u0120 [UNK] [CLS] 'x' b'\\x80' \n\n \\u0300 \u00e9 \U0001f600",
)  # fmt: skip
def vocab(data: bytes) -> None:
    """A vocabulary and a text: a line of numbers (kind, pre-tokeniser, what it has), a token a line, an empty line, the
    text. Token types, scores and merges follow from the numbers and the tokens."""
    head, _, text = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    kind, pre, has, seed, *more = (*first, 0, 0, 0, 0)[: max(4, len(first))]
    tokens = [line.decode("utf-8", "surrogateescape") for line in lines]
    n = len(tokens)
    types = [
        6 if t.startswith("<0x") else 2 if t == "<unk>" else 3 if t.startswith("</") or t == "<s>" else 1
        for t in tokens
    ]
    for i, byte in enumerate(more[:n]):
        types[i] = byte % 8
    merges = [f"{a} {b}" for a in tokens[:12] for b in tokens[:12] if a + b in tokens[:24]]
    kv: dict[str, object] = {
        "model": KINDS[kind % len(KINDS)],
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "pre": PRE[pre % len(PRE)],
        "add_space_prefix": bool(has & 1),
        "add_bos_token": bool(has & 2),
        "remove_extra_whitespaces": bool(has & 4),
        "unknown_token_id": 0,
        "bos_token_id": seed % 8,
    }
    if has & 8:
        kv["merges"] = merges
    if has & 16:
        kv["scores"] = -np.array(list(_some_bytes(bytes(more) or b"\1\7\3", n)), np.float32)
    if has & 32 and more:
        kv["precompiled_charsmap"] = np.frombuffer(bytes(more), np.uint8)
    v = Vocab.from_gguf({f"tokenizer.ggml.{k}": x for k, x in kv.items()})
    ids = v.tokenize(text, bool(seed & 64), bool(seed & 128))
    assert all(0 <= i < v.n_tokens for i in ids) and len(ids) <= 4 * len(text) + 4
    stream = StreamDecoder(v)
    pieces = b"".join(map(v.token_to_piece, ids)).decode("utf-8", "replace")
    assert "".join(map(stream.push, ids)) + stream.flush() == pieces
    v.detokenize(ids)


def _grammars() -> Iterable[bytes]:
    yield b'root ::= item{1,3} ("," ws item)* | [^a-z\\x41]+\nitem ::= "a" | "\\u00e9"? | .\nws ::= [ \\t\\n]*  # space\n'
    yield b'root ::= x y\nx ::= "a" x? | y\ny ::= [0-9]+ ("-" [0-9]+)? <s> !</s> <[3]>\n'
    yield b'start: a | "b"\na: /[a-z]+/ b?\nb: %json {"type": "integer"}\n'
    yield b'root ::= object\nvalue ::= object | "\\"" [^"]* "\\""\nobject ::= "{" (value ":" value ("," value)*)? "}"\n'


@harness(
    "pyggml.llm.grammars.gbnf", "pyggml.llm.grammars.lark", "pyggml.llm.grammars.rewrite", "pyggml.llm.grammars.automaton",
    "pyggml.llm.grammars.nodes", "pyggml.llm.samplers.grammar", seeds=_grammars, allowed=SamplerError, seconds=8.0,
    words='::= root | ( ) * + ? {2,5} {1000} [a-z] [^x] \\x41 \\u00e9 "a" . ! <s> <[5]> # start: %json /a*/ %ignore %llguidance',
)  # fmt: skip
def gbnf(data: bytes) -> None:
    """A grammar, which chooses tokens for a while."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _follow(Grammar(small_model().vocab, data.decode("utf-8", "replace"), None))


def _follow(grammar: Grammar) -> None:
    from pyggml.llm.samplers.candidates import Candidates

    for _ in range(4):
        c = Candidates(np.zeros(small_model().vocab.n_tokens, np.float32))
        grammar.apply(c)
        if c.ids is None or not len(c.ids):
            return
        grammar.accept(int(c.ids[len(c.ids) // 2]))


def _schemas() -> Iterable[bytes]:
    yield b'{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "multipleOf": 7}, "b": {"$ref": "#/$defs/d"}}, "required": ["a"], "additionalProperties": false, "$defs": {"d": {"type": "array", "items": {"enum": [1, "x", null]}, "minItems": 1, "maxItems": 4}}}'
    yield b'{"oneOf": [{"type": "string", "pattern": "^a+b?$", "minLength": 2}, {"const": {"a": [1.5]}}], "not": {"type": "null"}}'
    yield b'{"allOf": [{"properties": {"a": {}}}, {"patternProperties": {"^x": {"type": "boolean"}}, "propertyNames": {"maxLength": 3}}], "if": {"required": ["a"]}, "then": {"minProperties": 2}, "else": false}'
    yield b'{"type": ["string", "null"], "format": "date-time", "anyOf": [{"prefixItems": [{"type": "number", "exclusiveMaximum": 1e3}], "unevaluatedItems": false, "contains": {"const": 1}}, true], "dependentSchemas": {"a": {"$ref": "#"}}}'


@harness(
    "pyggml.llm.grammars.schema", "pyggml.llm.grammars.members", "pyggml.llm.grammars.negate", seeds=_schemas, allowed=SamplerError,
    seconds=12.0, change=change_json,
    words="$ref allOf anyOf oneOf not if then else enum const items prefixItems contains uniqueItems multipleOf pattern format date uuid dependentRequired unevaluatedProperties",
)  # fmt: skip
def schema(data: bytes) -> None:
    """A JSON schema, which chooses tokens for a while."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _follow(Grammar(small_model().vocab, None, data.decode("utf-8", "replace")))


def _templates() -> Iterable[bytes]:
    yield b"{{ bos_token }}{% for m in messages %}{% if loop.first and m['role'] == 'system' %}{{ m.content | trim }}{% else %}<|{{ m.role }}|>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
    yield b"{% macro f(x, d=3) %}{{ x * d }}{% if d > 0 %}{{ f(x, d - 1) }}{% endif %}{% endmacro %}{% set ns = namespace(n=0) %}{% for i in range(9) %}{% set ns.n = ns.n + i %}{{ f('ab') }}{% endfor %}{{ ns.n }}"
    yield b"{{ tools | tojson(indent=2) }}{{ messages | map(attribute='content') | join(', ') }}{{ '%05d' % 7 }}{{ 'a'.center(30) }}{{ [1, 2, 3] | batch(2) | list }}{{ messages[::-1] | selectattr('role', 'equalto', 'user') | list | length }}{{ raise_exception('no') }}"
    yield b"{%- set a = [1, 2] + [3] -%}{{ a | sum }}{{ 2 ** 10 }}{{ 'x' ~ 3 }}{{ strftime_now('%Y') }}{% filter upper %}a{% endfilter %}{% call(x) g() %}{% endcall %}{{ {'a': 1}.items() | list }}{{ 'a,b'.split(',') }}{{ 'abc' | replace('b', 'dd') }}"


@harness(
    "pyggml.llm.generate.jinja", "pyggml.llm.generate.bounded_jinja", seeds=_templates, allowed=ModelError, seconds=8.0,
    words="{{ }} {% %} {# #} for in endfor if endif set endset macro endmacro range( namespace( |join |tojson |indent( |batch( |format( |center( ** * ~ // "
    "messages loop.index recursive loop( block endblock cycler joiner 999999999 .replace( .format( {:>99999} |urlize |wordwrap( |xmlattr |groupby( |dictsort |sort break continue generation",
)  # fmt: skip
def template(data: bytes) -> None:
    """A chat template."""
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a <b> \u00e9", "n": [1, {"x": 2}]},
    ]
    source = data.decode("utf-8", "replace")
    found = find_template(None, {"tokenizer.chat_template": source})
    text = found.render(messages, small_model().vocab, tools=[{"type": "function", "function": {"name": "f"}}])
    assert len(text) < 1 << 26


FORMS = [f for f in vars(formats).values() if isinstance(f, Format)]
REPLIES = [
    '<think>hm</think>I look.<tool_call>\n{"name": "add", "arguments": {"a": [2, null]}}\n</tool_call>',
    "<tool_call><function=add><parameter=a>\n2\n</parameter></function></tool_call>",
    '<|python_tag|>add.call(a=1, b="x")',
    '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "a1b2c3d4e"}]',
    '<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1}',
    'all\nHello.\n>>>add\n{"a": 1}',
    'Plan.\nAction: ```json\n[{"tool_name": "add", "parameters": {}}]\n```',
]


@harness(
    "pyggml.llm.openai.reply", "pyggml.llm.openai.formats", allowed=(), seconds=3.0,
    seeds=lambda: (bytes([i]) + text.encode() for i in range(len(FORMS)) for text in REPLIES),
    words="<tool_call> </tool_call> <function= <parameter= [TOOL_CALLS] <|message|> <|channel|> ``` NaN 1e999 \\ud800 [[[[ {{{{ **{} b'z' 1j add",
)  # fmt: skip
def reply(data: bytes) -> None:
    """What a model says, as it comes and when it is whole: any text is read. The first byte chooses the format."""
    form, text = FORMS[data[0] % len(FORMS)] if data else FORMS[0], data[1:].decode("utf-8", "replace")
    names = frozenset(("add",))
    form.parse(text[: len(text) // 2], False, names)
    found = form.parse(text, True, names)
    assert all(isinstance(c.name, str) and isinstance(c.arguments, str) and isinstance(c.id, str) for c in found.calls)
    for call in found.calls:
        json.dumps(call.arguments)
