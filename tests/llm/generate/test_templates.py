"""Chat templates: rendered as the transformers library does (by make_templates.py); what goes wrong."""

# ruff: noqa: E501  (templates are shown as they are)
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.llm.generate.templates import ChatTemplate, find_template
from pyggml.llm.model import load_model
from pyggml.llm.vocab import Vocab

from . import make_templates

CASES: list[dict[str, Any]] = json.loads((make_templates.FOLDER / "expected.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return load_model(tiny, vocab_only=True).vocab


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['template']}-{c['variables']}")
def test_as_transformers(vocab: Vocab, case: dict[str, Any]) -> None:
    template = ChatTemplate("of a test", make_templates.TEMPLATES[case["template"]])
    variables = {"add_generation_prompt": False, **make_templates.VARIABLES[case["variables"]]}
    if "text" in case:
        assert template.render(vocab=vocab, **variables) == case["text"]
    else:
        with pytest.raises(ModelError, match="the chat template of a test: ") as e:
            template.render(vocab=vocab, **variables)
        assert case["error"].partition(" (<")[0] in str(e.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}x",
        "{% continue %}",
        "{{ 1 / 0 }}",
        "{{ none.strip() }}",
        "{{ (1).real.denominator.x.y }}",
        "{{ messages[0].content.format.__globals__ }}{{ 1 + 'a' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10000000) | list }}",
        "{{ 'x' | nofilter }}",
        "{% include 'x' %}",
        "{{ strftime_now(3) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages | tojson(indent='x', nothing=1) }}",
        "{{ '%d' | format('x') }}",
    ],
)
def test_what_goes_wrong_inside_is_a_model_error(vocab: Vocab, source: str) -> None:
    with pytest.raises(ModelError, match="the chat template of a test: "):
        ChatTemplate("of a test", source).render(USER, vocab)


def test_loop_controls_inside_generation(vocab: Vocab) -> None:
    body = "{% generation %}{% if m == 'b' %}{% continue %}{% endif %}{{ m }}{% endgeneration %}"
    source = "{% for m in 'abc' %}" + body + "{% endfor %}"
    assert ChatTemplate("of a test", source).render(USER, vocab) == "ac"


def test_the_date(vocab: Vocab) -> None:
    text = ChatTemplate("of a test", "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%%') }}").render(USER, vocab)
    assert len(text) == 12 and text[4] == text[7] == "-" and text.endswith(" %")


def test_only_json_values_reach_a_template(vocab: Vocab) -> None:
    template = ChatTemplate("of a test", "{{ messages[0].content }} {{ n }}")

    class Dumped:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "hi"}

    assert template.render(USER, vocab, n=(1, {"a": None})) == "hi [1, {'a': None}]"
    assert template.render(USER, vocab, n=Dumped()) == "hi {'role': 'user', 'content': 'hi'}"
    with pytest.raises(ModelError, match=r"variables\['n'\] must be made of what JSON has, not of bytes"):
        template.render(USER, vocab, n=b"x")
    with pytest.raises(ModelError, match=r"messages\[0\]\['content'\]\[0\]"):
        template.render([{"role": "user", "content": [object()]}], vocab)
    for bad in ("hi", ["hi"], None, 3, {"role": "user"}):
        with pytest.raises(ModelError, match="messages must be a list of dicts"):
            template.render(bad, vocab)  # pyright: ignore[reportArgumentType]


def test_the_template_for_tools(vocab: Vocab) -> None:
    kv = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with {{ tools | tojson }}"}
    template = find_template(None, kv)
    assert template.render(USER, vocab) == template.render(USER, vocab, tools=[]) == "plain"
    assert template.render(USER, vocab, tools=[{"<a>": 1}]) == 'with [{"<a>": 1}]'


GROWN = "{% set s = namespace(x='abcdefgh') %}{% for i in range(17) %}{% set s.x = s.x + s.x %}{% endfor %}"  # 1 MB
WIDE = "{% set x = ('f' * 999999) | int(0, 16) %}"
RANGES = ("| sum", "| max", "| min", ".count('a')", ".index(99998.0)", "| unique | first",
          "| select('string') | first", "| selectattr('a') | first", "| reject('number') | first", "| rejectattr('a', 'undefined') | first")  # fmt: skip
NESTED = "{% set n = namespace(l=('x',)) %}{% for i in range(60) %}{% set n.l = (n.l, n.l) %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1, 2] recursive %}{% if loop.depth0 < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{% block a %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endblock %}",
        "{{ 10 ** (10 ** 8) }}", "{{ 5 | round(-10 ** 9) }}", "{{ (1).to_bytes(length=10 ** 9, byteorder='big') }}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set n.x = d(n.x) %}{% endfor %}",
        "{% autoescape true %}{% set n = namespace(x='<') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
        "{% endautoescape %}",
        "{{ 'x' * 10 ** 10 }}", "{{ [1] * 10 ** 9 }}", "{{ 'x' | slice(10 ** 8) | list }}", "{{ 'x' | batch(10 ** 9, 'y') | list }}",
        "{{ '{:>999999999}'.format('x') }}", "{{ '{:>{w}}'.format('x', w=10 ** 9) }}", "{{ ('{:>999999999}' | safe).format(1) }}",
        "{{ '{x:>999999999}'.format_map({'x': 1}) }}", "{{ ('{:>999999999}' | attr('format'))('x') }}",
        "{{ '%999999999d' % 5 }}", "{{ '%*d' % (10 ** 9, 5) }}", "{{ '%999999999s' | format('x') }}", "{{ '%999999999d'.encode() % 5 }}",
        "{{ '%999999999d' is divisibleby(5) }}", "{{ ['%999999999d'] | select('divisibleby', 5) | list }}",
        "{{ 'x' | center(10 ** 9) }}", "{{ 'x'.ljust(10 ** 9) }}", "{{ 'x'.zfill(10 ** 9) }}", "{{ '\t\t'.expandtabs(tabsize=10 ** 9) }}",
        "{{ ('\u1234' * 999999) | sort }}", "{{ ('a-' * 999999) | title }}", "{{ ('\u1234' * 999999) | join }}",
        "{{ 'a\nb' | indent(10 ** 9) }}", "{{ [[1]] | tojson(indent=10 ** 9) }}", "{{ ('<a>' * 3000000) | striptags }}",
        "{{ ('(((' * 1000000) | urlize }}", "{{ strftime_now('%c' * 10000000) }}",
        GROWN + "{{ range(99999) | join(s.x) }}", GROWN + "{{ s.x.join(['a'] * 10000) }}", GROWN + "{{ ('a ' * 9999) | wordwrap(1, wrapstring=s.x) }}",
        GROWN + "{{ ('a' * 100000).translate({97: s.x}) }}", GROWN + "{{ '%(a)s' * 1000 % {'a': s.x} }}",
        GROWN + "{{ [" + "s.x[1:], " * 300 + "] | length }}", GROWN + "{% for i in range(999) %}{{ s.x }}{% endfor %}",
        GROWN + "{% for i in range(99999) if 'zz' in s.x %}{% endfor %}", GROWN + "{{ range(99999) | map('string') | select('in', s.x) | list }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}" + "y" * 5000 + "{% endfor %}{% endfor %}",
        NESTED + "{{ n.l }}", NESTED + "{{ n.l | tojson }}", NESTED + "{{ n.l ~ '' }}", NESTED + "{{ {n.l: 1} }}", NESTED + "{{ n.l in {} }}",
        NESTED + "{{ {}.get(n.l) }}", NESTED + "{{ {}[n.l].x }}", NESTED + "{{ [n.l] | unique | list }}", NESTED + "{{ n.l is lower }}",
        NESTED + "{{ raise_exception(n.l) }}", NESTED + "{{ '{!r}'.format(n.l) }}", NESTED + "{{ '%s' % (n.l,) }}",
        NESTED + NESTED.replace("n.", "m.").replace("n =", "m =") + "{{ n.l == m.l }}",
        *(GROWN + f"{{{{ s.x.{how}('h' * 1000 ~ 'a') }}}}" for how in ("rfind", "rpartition", "rsplit")),
        *(GROWN + f"{{% for i in range(99999) if s.x.{how} %}}{{% endfor %}}" for how in ("find('zz')", "isdigit()", "endswith('zz')")),
        *(f"{{% for i in range(99999) %}}{{{{ range(99999) {rest} }}}}{{% endfor %}}" for rest in RANGES),
        "{% for i in range(99999) %}{{ 'a' in range(99999) }}{% endfor %}",
        *(WIDE + f"{{% for i in range(999) %}}{{% if {what} %}}{{% endif %}}{{% endfor %}}" for what in (
            "x + i", "x - i", "-x", "x // 2", "x | abs", "{x: 1}", "x == x", "x is divisibleby 7",
        )),
        *(GROWN + f"{{{{ s.x.{how}('punycode') }}}}" for how in ("encode", "encode().decode")),
        GROWN + "{{ s.x.encode(encoding='IDNA') }}", GROWN + "{{ s.x.replace('a', 'é').encode('ascii', 'namereplace') }}",
        *(f"{{% for i in range(99999) %}}{{{{ {call}(*range(99999)) }}}}{{% endfor %}}" for call in ("cycler", "''.format", "'' | format")),
        WIDE + "{{ x is divisibleby(x // 2 ** 999) }}", WIDE + "{{ x | round(-9999) }}",
    ],
)  # fmt: skip
def test_a_template_goes_no_further_than_the_limits(vocab: Vocab, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_STEPS", 1 << 17)
    monkeypatch.setattr(limits, "TEMPLATE_BYTES", 1 << 24)
    with pytest.raises(ModelError, match=r"\(limits\.TEMPLATE_(STEPS|BYTES)\)"):
        ChatTemplate("of a test", source).render(USER, vocab)


def test_the_limits_of_length_and_time(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"more than 131072 characters \(limits\.TEMPLATE_SOURCE\)"):
        ChatTemplate("of a test", " " * (limits.TEMPLATE_SOURCE + 1)).render(USER, vocab)
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", 0.05)
    with pytest.raises(ModelError, match=r"longer than 0\.05 seconds \(limits\.TEMPLATE_SECONDS\)"):
        ChatTemplate("of a test", "{% for i in range(9999) %}" * 2 + "{% endfor %}" * 2).render(USER, vocab)


def test_what_a_template_may_use_grows_with_the_messages(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_STEPS", 100)
    monkeypatch.setattr(limits, "TEMPLATE_BYTES", 100)
    source = "{% for m in messages %}{% for k in messages %}{{ m.content }}{% endfor %}{% endfor %}"
    talk = [{"role": "user", "content": "x" * 2000}] * 30
    assert ChatTemplate("of a test", source).render(talk, vocab) == "x" * 2000 * 900


def test_errors_have_a_reason_that_is_not_too_long(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyggml.llm.generate import jinja

    def empty(*_: Any) -> Any:
        raise MemoryError

    with pytest.raises(ModelError) as e:
        ChatTemplate("of a test", "{{ raise_exception('x' * 100000) }}").render(USER, vocab)
    assert len(str(e.value)) < 1100
    with pytest.raises(ModelError, match="of a test: TemplateError"):
        ChatTemplate("of a test", "{{ raise_exception('') }}").render(USER, vocab)
    monkeypatch.setattr(jinja, "_compiled", empty)
    with pytest.raises(ModelError, match="of a test: not enough memory"):
        ChatTemplate("of a test", "x").render(USER, vocab)
    deep: Any = "x"
    for _ in range(100000):
        deep = [deep]
    with pytest.raises(ModelError, match="messages: is nested too deeply"):
        ChatTemplate("of a test", "x").render([{"role": "user", "content": deep}], vocab)


def test_blocks_macros_and_formats_work(vocab: Vocab) -> None:
    source = (
        "{% block a %}{% for m in messages %}{{ m.role }}{% endfor %}{% endblock %} {{ self.a() }} "
        "{% macro f(x) %}<{{ x }}{{ caller() if caller else '' }}>{% endmacro %}{% call f('a') %}b{% endcall %} "
        "{{ '{0}-{a:>4}-{b[c]!r}'.format(1, a='x', b={'c': 'd'}) }} {{ '{a}'.format_map({'a': 2}) }} {{ '%03d %s' % (7, 'y') }} "
        "{{ 'x' is in ['x'] }} {{ 4 is divisibleby 2 }} {{ (cycler('p', 'q')).next() }} {{ 'abc'[1:] }} {{ 'a,b'.split(',') }} "
        "{{ 'abca'.count('a') }} {{ ['x', 'y'].index('y') }}"
    )
    want = "user user <ab> 1-   x-'d' 2 007 y True True p bc ['a', 'b'] 2 1"
    assert ChatTemplate("of a test", source).render(USER, vocab) == want


def test_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ 1 }}\n", encoding="utf-8")
    assert find_template(str(tmp_path / "t.jinja"), {}).source == "{{ 1 }}\n"
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="is no regular file"):
        find_template(str(tmp_path / "zero"), {})
    for name in ("nope", "a\0b", "x" * 5000):
        with pytest.raises(ModelError, match=r"unknown chat template .*there is no such file|cannot be read"):
            find_template(name, {})
