"""Generation: text and stop strings, records, reproducibility, grammar, guidance, interruption, async."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.backends.cpu import isa_levels
from pyggml.errors import KVCacheFull, ModelError, SamplerError
from pyggml.llm import model as model_module
from pyggml.llm.generate.generation import Generation, new_generation
from pyggml.llm.generate.text import TextStream
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams, guided

PROMPT = "Once upon"


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def byte(text: str) -> list[int]:
    return [3 + b for b in text.encode()]


def shown(model: Model, ids: list[int], stop: list[str]) -> tuple[list[str], bool]:
    stream, out = TextStream(model.vocab, stop), []
    for i in ids:
        out.append(stream.push(i))
        if stream.stopped:
            return out, True
    return [*out, stream.flush()], stream.stopped


def test_text_in_whole_characters(model: Model) -> None:
    pieces, _ = shown(model, byte("aé€x"), [])
    assert pieces == ["a", "", "é", "", "", "€", "x", ""]
    assert "".join(shown(model, [*byte("a"), 3 + 0xC3], [])[0]) == "a\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("hello world", ["lo w"], "hel", True),
        ("hello lo world", ["lo w"], "hello ", True),
        ("aaab", ["aab"], "a", True),
        ("abcabd", ["abd", "xyz"], "abc", True),
        ("one two", ["two three"], "one two", False),
        ("x€y", ["€"], "x", True),
        ("abc", ["bc", "b"], "a", True),
        ("abc", [], "abc", False),
    ],
)
def test_stop_strings_are_never_shown(model: Model, text: str, stop: list[str], expected: str, stopped: bool) -> None:
    pieces, found = shown(model, byte(text), stop)
    assert ("".join(pieces), found) == (expected, stopped)
    for i in range(len(pieces)):  # not even a part, before it is clear
        assert expected.startswith("".join(pieces[:i]))
    with pytest.raises(SamplerError, match="empty"):
        TextStream(model.vocab, [""])


def test_stop_strings_are_found_as_by_looking_for_each(model: Model) -> None:
    rng = np.random.default_rng(5)

    def word(n: int) -> str:
        return "".join(rng.choice(["a", "b", "c"], n, p=[0.6, 0.3, 0.1]))

    def held(text: str, stop: list[str]) -> int:
        return max(n for s in stop for n in range(len(s)) if text.endswith(s[:n]))

    for _ in range(300):
        stop, text = [word(n) for n in rng.integers(1, 7, rng.integers(1, 6))], word(30)
        stream, so_far = TextStream(model.vocab, stop), ""
        for i, token in enumerate(byte(text), 1):
            so_far += stream.push(token)
            found = min(((text[:i].find(s), s) for s in stop if s in text[:i]), default=None)
            if found is not None:
                assert (so_far, stream.found) == (text[: found[0]], found[1]), (stop, text)
                break
            assert so_far == text[: i - held(text[:i], stop)], (stop, text)


def test_many_stop_strings(model: Model) -> None:
    """A token costs no more for them: other texts wait for it."""
    stream = TextStream(model.vocab, [f"b{i}c" for i in range(200_000)])
    start = time.process_time()
    assert "".join(map(stream.push, byte("ab12 " * 20 + "b777"))) == "ab12 " * 20 and not stream.stopped
    assert not stream.push(byte("c")[0]) and stream.found == "b777c"
    assert time.process_time() - start < 3


def test_a_long_beginning_of_stop_strings_of_many_lengths(model: Model) -> None:
    """What was held back is not searched again for each of them: that took half a second a token."""
    stream = TextStream(model.vocab, ["a" * n + "b" for n in range(1, 1500)])
    start = time.process_time()
    assert "".join(map(stream.push, byte("a" * 1000))) == "" and not stream.stopped
    assert not stream.push(byte("b")[0]) and stream.found == "a" * 1000 + "b"
    assert time.process_time() - start < 10


def test_generate_is_reproducible(model: Model) -> None:
    def run(seed: int, **options: Any) -> list[int]:
        return [t.id for t in model.stream(PROMPT, 30, seed=seed, temp=1.5, **options)]

    assert run(1) == run(1) != run(2)
    assert run(1, repeat_penalty=1.5) == run(1, repeat_penalty=1.5) != run(1)
    text = "".join(model.generate(PROMPT, 30, seed=1, temp=1.5))
    assert text == "".join(t.text for t in model.stream(PROMPT, 30, seed=1, temp=1.5))


def test_greedy_takes_the_likeliest(model: Model) -> None:
    ids = model.tokenize(PROMPT)
    ctx = model.new_context(64)
    for token in model.stream(PROMPT, 10, temp=0, ignore_eos=True):
        ctx.memory.clear()
        ctx.decode(ids)
        logits = ctx.logits[-1].copy()
        logits[2] = -np.inf
        assert token.id == int(logits.argmax())
        ids.append(token.id)


def test_records(model: Model) -> None:
    tokens = list(model.stream(PROMPT, 8, n_probs=5, temp=0, ignore_eos=True, repeat_penalty=1.3))
    assert len(tokens) == 8 and [t.finish_reason for t in tokens] == [None] * 7 + ["length"]
    ctx = model.new_context(64)
    ctx.decode(model.tokenize(PROMPT))
    for t in tokens:
        x = ctx.logits[-1].astype(np.float64)
        logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert t.logprob == pytest.approx(logprobs[t.id], abs=1e-4)
        assert [i for i, _ in t.top] == np.argsort(-logprobs)[:5].tolist()
        assert [p for _, p in t.top] == pytest.approx(sorted(logprobs, reverse=True)[:5], abs=1e-4)
        ctx.decode([t.id])
    assert all(t.logprob is None for t in new_generation(model, PROMPT, 2))


def test_how_it_ends(model: Model) -> None:
    forced = {"temp": 0, "logit_bias": {2: 1e4}}
    tokens = list(model.stream(PROMPT, 5, **forced))
    assert [(t.id, t.text, t.finish_reason) for t in tokens] == [(2, "", "eog")]
    g = new_generation(model, PROMPT, 20, temp=0, logit_bias={3 + ord("x"): 1e4}, stop="xxx")
    assert [t.text for t in g] == ["", "", ""] and g.finish_reason == "stop" and len(g.ids) == 3
    assert "".join(model.generate(PROMPT, 4, temp=0, logit_bias={3 + ord("x"): 1e4}, stop=["xxxxx"])) == "xxxx"
    g = new_generation(model, PROMPT, -1, temp=0, ignore_eos=True, n_ctx=32)
    list(g)
    assert g.finish_reason == "length" and len(g.prompt) + len(g.ids) == 33  # the last token needs no cell
    g = new_generation(model, PROMPT, 100, temp=0, ignore_eos=True, n_ctx=32)
    assert len(list(g)) == 33 - len(g.prompt)
    assert list(model.generate(PROMPT, 0)) == []
    with pytest.raises(KVCacheFull):
        list(model.generate("a" * 60, 1, n_ctx=32))
    with pytest.raises(TypeError, match="top_q"):
        model.generate(PROMPT, top_q=1)  # pyright: ignore[reportCallIssue]


def test_timings(model: Model) -> None:
    g = new_generation(model, PROMPT, 6, temp=0, ignore_eos=True)
    list(g)
    t = g.timings
    assert (t.n_prompt, t.n_sample, t.n_eval) == (len(g.prompt), 6, 5)
    perf = g.ctx.perf()
    assert (perf.n_p_eval, perf.n_sample, perf.n_eval) == (len(g.prompt), 6, 5)
    assert 0 < t.sample <= perf.t_sample_ms / 1e3
    assert t.prompt > 0 and t.sample > 0 and t.eval > 0


def test_guidance(model: Model) -> None:
    """Both sequences in one context give what two contexts would."""
    scale, prompt, negative = 1.8, "a good", "bad, very"
    g = new_generation(model, prompt, 12, temp=0, ignore_eos=True, cfg_scale=scale, negative_prompt=negative)
    list(g)
    ctxs = [model.new_context(64) for _ in range(2)]
    ids = [model.tokenize(prompt), model.tokenize(negative)]
    expected: list[int] = []
    for _ in range(12):
        for ctx, new in zip(ctxs, ids, strict=True):
            ctx.decode(new)
        logits = guided(ctxs[0].logits[-1], ctxs[1].logits[-1], scale)
        logits[2] = -np.inf
        expected.append(int(logits.argmax()))
        ids = [expected[-1:]] * 2
    assert g.ids == expected
    assert g.ids != [t.id for t in model.stream(prompt, 12, temp=0, ignore_eos=True)]


def test_closing_cancels(model: Model) -> None:
    tokens = model.stream(PROMPT, 50, seed=1, ignore_eos=True)
    next(tokens)
    tokens.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert list(tokens) == []


class _Interrupt(SamplerChain):
    """Ctrl-C at the n-th token."""

    after = 5

    def accept(self, token: int) -> None:
        super().accept(token)
        self.after -= 1
        if not self.after:
            signal.raise_signal(signal.SIGINT)


def test_interrupted_generation_keeps_what_was_made(model: Model) -> None:
    ctx = model.new_context(64)
    ids = model.tokenize(PROMPT)
    params = SamplingParams(temp=0, ignore_eos=True, logit_bias={3 + ord("x"): 1e4})
    g = Generation(ctx, ids, _Interrupt(params, model.vocab), 50, ["xxxxxxx"])
    text = ""
    with pytest.raises(KeyboardInterrupt):
        for t in g:
            text += t.text
    assert text + g.rest() == "x" * (len(g.ids) if len(g.ids) < 5 else 4)
    assert g.finish_reason is None and ctx.memory.used == len(ids) + 4
    more = Generation(ctx, g.ids[-1:], SamplerChain(params, model.vocab), 3)  # the context goes on
    assert len(list(more)) == 3


def test_async(model: Model) -> None:
    expected = "".join(model.generate(PROMPT, 12, seed=3, ignore_eos=True))

    async def run() -> None:
        assert "".join([p async for p in model.agenerate(PROMPT, 12, seed=3, ignore_eos=True)]) == expected
        a, b = model.astream(PROMPT, 12, seed=3, ignore_eos=True), model.astream(PROMPT, 12, seed=4, ignore_eos=True)
        ids = await asyncio.gather(_ids(a), _ids(b))
        assert ids[0] == [t.id for t in model.stream(PROMPT, 12, seed=3, ignore_eos=True)] != ids[1]
        endless = asyncio.create_task(_ids(model.astream(PROMPT, 120, seed=3, ignore_eos=True, n_ctx=128)))
        await asyncio.sleep(0.01)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless

    asyncio.run(run())


async def _ids(stream: Any) -> list[int]:
    return [t.id async for t in stream]


def test_gbnf(model: Model) -> None:
    pytest.importorskip("llguidance")
    grammar = 'root ::= "it is " ("red" | "green") [0-9]+ "."'
    for seed in range(4):
        g = new_generation(model, PROMPT, 60, seed=seed, temp=1.0, grammar=grammar)
        text = "".join(t.text for t in g)
        assert re.fullmatch(r"it is (red|green)\d+\.", text) or g.finish_reason == "length"
        assert re.match(r"it is (red|green)\d", text)
    assert "".join(model.generate(PROMPT, 40, temp=0, grammar='root ::= "é" | "è"', ignore_eos=True)) in ("é", "è")
    with pytest.raises(SamplerError, match="grammar cannot be read"):
        model.generate(PROMPT, grammar="root ::= (")
    with pytest.raises(SamplerError, match="JSON schema cannot be read"):
        model.generate(PROMPT, json_schema='{"type": "nothing"}')


def test_json_schema(model: Model) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    for seed in range(3):
        g = new_generation(model, PROMPT, 100, seed=seed, json_schema=schema, top_k=0)
        out = json.loads("".join(t.text for t in g))
        assert set(out) == {"name", "old"} and isinstance(out["old"], bool) and g.finish_reason == "eog"


def test_no_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "DEFAULT_MODEL", "none.gguf")
    with pytest.raises(ModelError, match=r"no model of its own .*none\.gguf"):
        load_model()


def test_greedy_text_is_the_same_on_every_isa_level(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[str, str] = {}
    for isa in isa_levels():
        monkeypatch.setenv("PYGGML_ISA", isa)
        model = load_model(shared / "models" / "stories260K.gguf")  # F32
        texts[isa] = "".join(model.generate("Once upon a time", 120, temp=0, n_threads=1))
    assert len(texts) > 1 and len(set(texts.values())) == 1 and len(texts["generic"]) > 100
