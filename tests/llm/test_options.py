"""Keyword arguments that a function hands on are repeated as a TypedDict, for type checkers: the two are the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import pyggml as gg
from pyggml.cluster.run import batch_on
from pyggml.inspect.capture import capture
from pyggml.inspect.dot import to_digraph
from pyggml.inspect.record import record_model
from pyggml.inspect.trace import trace
from pyggml.llm.context import LlamaContext
from pyggml.llm.embed import EmbedOptions, embed
from pyggml.llm.generate.batched import BatchOptions, stream_batch
from pyggml.llm.generate.generation import GenerateOptions, new_generation
from pyggml.llm.openai.request import SamplingRequest
from pyggml.llm.options import ContextOptions
from pyggml.llm.run_batch import batch
from pyggml.llm.samplers import SamplingOptions, TextOptions
from pyggml.llm.samplers.params import N_PREDICT, OTHER_NAMES, TextParams

RAM = "int | str | None"  # which `batch_on` takes as text alone


def declared(kind: Any) -> dict[str, str]:
    """Names and types of a TypedDict, with those that it takes over."""
    return {name: hint.__forward_arg__ for name, hint in kind.__annotations__.items()}


def keywords(f: Callable[..., Any]) -> dict[str, str]:
    """Names and types of a function's keyword arguments, as its signature shows them."""
    parameters = inspect.signature(f).parameters.values()
    return {p.name: p.annotation for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("kind", "f"),
    [
        (GenerateOptions, new_generation),
        (BatchOptions, stream_batch),
        (ContextOptions, LlamaContext.__init__),
        (EmbedOptions, embed),
        (gg.Drawing, to_digraph),
    ],
)
def test_keywords_are_those_of_the_function(kind: Any, f: Callable[..., Any]) -> None:
    assert declared(kind) == keywords(f)
    assert getattr(gg, kind.__name__) is kind


@pytest.mark.parametrize(
    ("f", "taker"),
    [
        (gg.Model.new_context, LlamaContext.__init__),
        *((f, new_generation) for f in (gg.Model.generate, gg.Model.infill, gg.Model.stream)),
        *((f, new_generation) for f in (gg.Model.agenerate, gg.Model.astream)),
        *((f, stream_batch) for f in (gg.Model.generate_batch, gg.Model.stream_batch)),
        (batch_on, batch),
        *((f, LlamaContext.__init__) for f in (trace, record_model, capture)),
        *((f, to_digraph) for f in (gg.dump_dot, gg.render)),
    ],
)
def test_signatures_show_what_is_handed_on(f: Callable[..., Any], taker: Callable[..., Any]) -> None:
    shown = inspect.signature(f).parameters
    assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD]
    assert keywords(taker).items() <= {name: p.annotation for name, p in shown.items()}.items() | {("ram", RAM)}


def test_defaults_are_those_of_the_record() -> None:
    shown, plain = inspect.signature(gg.Model.generate).parameters, TextParams()
    assert all(shown[f.name].default == getattr(plain, f.name) for f in fields(TextParams))
    assert shown["temperature"].default == plain.temp


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: m.new_context(n_batchs=1), r"^new_context has no option 'n_batchs' \(is 'n_batch' meant\?\)$"),
        (lambda m: m.generate("a", tempp=1), r"^generate has no option 'tempp' \(is 'temp' meant\?\)$"),
        (lambda m: m.generate_batch(["a"], bogus=1), r"^generate_batch has no option 'bogus'; it has .*top_k, top_p"),
        (lambda m: gg.batch(m, ["a"], stops="."), r"^batch has no option 'stops' \(is 'stop' meant\?\)$"),
        (lambda m: gg.dump_dot(m, layer=1), r"^dump_dot has no option 'layer' \(is 'layers' meant\?\)$"),
    ],
)
def test_unknown_options_are_named(tiny: Path, call: Callable[[Any], Any], says: str) -> None:
    model = gg.load_model(tiny, repack=False)
    with pytest.raises(gg.OptionError, match=says) as e:
        call(model)
    assert isinstance(e.value, TypeError) and isinstance(e.value, gg.GGMLError)


def test_bad_options_of_batches_are_named(tiny: Path) -> None:
    model = gg.load_model(tiny, repack=False)
    for call in (gg.batch, gg.Model.generate_batch):
        with pytest.raises(gg.SamplerError, match="stop must be a string, or a list of them, not 5"):
            call(model, ["a"], stop=5)  # pyright: ignore[reportArgumentType]


def test_options_that_are_given_by_place(tiny: Path) -> None:
    model = gg.load_model(tiny, repack=False)
    with pytest.raises(
        gg.OptionError, match=r"new_context takes n_ctx by place, and the others by name: n_batch=, n_ub"
    ):
        model.new_context(64, 2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(gg.OptionError, match=r"generate takes prompt, n_predict by place, and the others by name: "):
        model.generate([1], 2, 3)  # pyright: ignore[reportCallIssue]


def test_a_prompt_of_bytes_is_a_text() -> None:
    model = gg.load_model()
    assert list(model.generate(b"Once", 3, temp=0)) == list(model.generate("Once", 3, temp=0))  # pyright: ignore[reportArgumentType]


def test_other_names_have_the_types_of_ours() -> None:
    ours = {f.name: str(f.type) for f in fields(TextParams)}
    assert declared(TextOptions) == {
        **declared(SamplingOptions),
        "stop": ours["stop"],
        "lookup": ours["lookup"],
        **{name: ours[n] for name, n in OTHER_NAMES.items()},
    }
    assert ours.keys() - declared(TextOptions).keys() == {"n_predict"}  # it has a place of its own, behind the prompts
    assert all(inspect.signature(f).parameters["n_predict"].default == N_PREDICT for f in (stream_batch, batch))


def test_a_request_has_options_or_none() -> None:
    known = declared(GenerateOptions)
    extra = {"n", "max_completion_tokens", "tfs_z", "user"}  # of OpenAI and llama-cpp-python alone
    wider = {"logit_bias", "grammar"}  # keys of any kind; a LlamaGrammar
    for name, kind in declared(SamplingRequest).items():
        if name not in extra | wider:
            plain = known[name].removesuffix(" | None")
            assert kind.removesuffix(" | None") == plain, name


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("max_new_tokens", "is 'n_predict' meant"),
        ("repetition_penalty", "is 'repeat_penalty' meant"),
        ("do_sample", "temp=0.0 takes the likeliest"),
        ("num_beams", "there is no beam search"),
        ("streamer", "iterate over the result"),
    ],
)
def test_options_of_other_libraries(option: str, said: str) -> None:
    with pytest.raises(gg.OptionError, match=rf"generate has no option '{option}'.*{said}"):
        gg.load_model().generate("a", **{option: 1})  # pyright: ignore[reportArgumentType]


def test_attributes_of_other_libraries() -> None:
    model = gg.load_model()
    with pytest.raises(AttributeError, match=r"Model has no attribute 'eos_token_id': model\.vocab\.eos"):
        _ = model.eos_token_id  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    with pytest.raises(AttributeError, match=r"Model has no attribute 'nothing'$"):
        _ = model.nothing  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    with pytest.raises(gg.GGMLError, match="generate_batch continues several"):
        list(model.generate(["a", "b"]))  # pyright: ignore[reportArgumentType]


def test_one_prompt_where_several_are_asked_for() -> None:
    """A text would be a list of its letters, a mapping of its keys."""
    model: Any = gg.load_model()
    for prompts in ("A king", b"A king"):
        with pytest.raises(gg.BatchError, match=r"prompts must be a list, not b?'A king'"):
            model.generate_batch(prompts, 2)
    for requests in ("A king", b"A king", {"prompt": "A king"}):
        with pytest.raises(gg.BatchError, match="requests must be a list of them, not "):
            list(gg.batch(model, requests, 2))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"rolle": "user", "content": "a"}, "has no role"),
        ({"role": 3, "content": "a"}, "has no role"),
        ({"role": "user", "contents": "a"}, "has no content, which only a message of the assistant may lack"),
    ],
)
def test_messages_without_role_or_content(message: dict[str, Any], says: str) -> None:
    """Templates write nothing for what is missing, and the model would answer an empty message."""
    model: Any = gg.load_model()
    chat = [{"role": "user", "content": "a"}, {"role": "assistant"}, message]
    with pytest.raises(gg.ModelError, match=rf"messages\[2\] {says}"):
        model.generate(chat, 2)
    with pytest.raises(gg.ModelError, match=rf"messages\[2\] {says}"):
        model.create_chat_completion(chat, max_tokens=2)
