"""`Llama` evaluates what two requests begin with alike once; its answers are those of a context of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pyggml.errors import KVCacheFull, ModelError
from pyggml.llama_cpp import Llama
from pyggml.llm.model import default_model_path, load_model

PROMPT = "Once upon a time there was a king who had three sons, and "
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
CHAT = [{"role": "user", "content": "Tell me of the king and his three sons, and of the wood behind the castle."}]


@pytest.fixture
def llm() -> Llama:
    return Llama(str(default_model_path()), n_ctx=256, n_threads=1)


def text(answer: Any) -> str:
    return answer["choices"][0]["text"]


def evaluated(llm: Llama, work: Callable[[], object]) -> int:
    """How many tokens of prompts `work` evaluates."""
    ctx = llm._kept.ctx  # pyright: ignore[reportPrivateUsage]
    ctx.perf_reset()
    work()
    return ctx.perf().n_p_eval


def test_completions(llm: Llama) -> None:
    n = len(llm.tokenize(PROMPT.encode()))
    model = llm.model
    assert evaluated(llm, lambda: llm.create_completion(PROMPT, **GREEDY)) == n
    more = PROMPT + text(llm.create_completion(PROMPT, **GREEDY))
    for prompt, least in ((more, n), (PROMPT, n - 1), ("A fox", 1), ("A fox and a cat", 2)):
        answers: list[Any] = []
        count = evaluated(llm, lambda: answers.append(llm.create_completion(prompt, **GREEDY)))  # noqa: B023
        assert count <= len(llm.tokenize(prompt.encode())) - least + 1
        assert text(answers[0]) == text(model.create_completion(prompt, **GREEDY))
        assert llm.n_tokens == len(llm.tokenize(prompt.encode())) + 7


def test_chats(llm: Llama) -> None:
    whole = evaluated(llm, lambda: llm.create_chat_completion(CHAT, **GREEDY))
    reply: Any = llm.create_chat_completion(CHAT, **GREEDY)
    longer = [*CHAT, reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    assert evaluated(llm, lambda: llm.create_chat_completion(longer, **GREEDY)) < whole
    again: Any = llm.create_chat_completion(longer, **GREEDY)
    llm.reset()
    alone: Any = llm.create_chat_completion(longer, **GREEDY)
    assert again["choices"] == alone["choices"]


def test_log_probabilities_of_a_prompt_need_all_of_it(llm: Llama) -> None:
    asked: dict[str, Any] = {**GREEDY, "echo": True, "logprobs": 1}
    first: Any = llm.create_completion(PROMPT, **asked)
    assert llm.create_completion(PROMPT, **asked)["choices"] == first["choices"]
    assert len(first["choices"][0]["logprobs"]["tokens"]) == llm.n_tokens  # bos is not shown, the last not evaluated


def test_streams_beside_each_other(llm: Llama) -> None:
    want = text(llm.create_completion(PROMPT, **GREEDY))
    one, two = (llm.create_completion(PROMPT, stream=True, **GREEDY) for _ in range(2))
    found = [[next(one)], [next(two)]]
    found[0] += one
    assert text(llm.create_completion(PROMPT, **GREEDY)) == want
    found[1] += two
    assert ["".join(map(text, parts)) for parts in found] == [want, want]
    broken = llm.create_completion(PROMPT, stream=True, **GREEDY)
    next(broken)
    broken.close()
    assert text(llm.create_completion(PROMPT, **GREEDY)) == want
    llm.create_completion(PROMPT, stream=True, **GREEDY)  # never begun
    assert evaluated(llm, lambda: llm.create_completion(PROMPT, **GREEDY)) == 0  # a single token is no prompt


def test_threads(llm: Llama) -> None:
    want, found = text(llm.create_completion(PROMPT, **GREEDY)), list[str]()

    def ask() -> None:
        found.append(text(llm.create_completion(PROMPT, **GREEDY)))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [want, want]


def test_what_goes_wrong_leaves_it_usable(llm: Llama) -> None:
    want = text(llm.create_completion(PROMPT, **GREEDY))
    with pytest.raises(KVCacheFull):
        llm.create_completion([300] * 400, **GREEDY)

    def fails(ids: Any, logits: Any) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.create_completion(PROMPT, stopping_criteria=fails, **GREEDY)
    assert text(llm.create_completion(PROMPT, **GREEDY)) == want
    with pytest.raises(KVCacheFull):
        llm.eval([300] * 400)
    assert text(llm.create_completion(PROMPT, **GREEDY)) == want
    llm.reset()
    assert llm.n_tokens == 0 and text(llm.create_completion(PROMPT, **GREEDY)) == want


def test_generate_in_a_context_that_is_kept() -> None:
    model = load_model()
    kept = model.keep_context(256, n_threads=1)
    options: dict[str, Any] = {"n_predict": 6, "temp": 0.0}
    text = PROMPT
    for i in range(3):
        new = "".join(model.generate(text, kept=kept, **options))
        assert new == "".join(model.generate(text, n_threads=1, **options))
        assert (kept.ctx.perf().n_p_eval > 0) is (i == 0)  # later, a single token is left to evaluate
        kept.ctx.perf_reset()
        text += new
    tokens = list(model.stream(PROMPT, n_probs=2, kept=kept, **options))
    assert len(tokens[0].top) == 2 and len(kept.held) == len(model.tokenize(PROMPT)) + 5
    with pytest.raises(KVCacheFull):
        list(model.generate("x" * 900, kept=kept))
    assert "".join(model.generate(PROMPT, kept=kept, **options)) == "".join(t.text for t in tokens)


def test_a_context_of_another_model_is_refused() -> None:
    """Tokens of one vocabulary would be continued by the other model."""
    model, other = load_model(), load_model()
    kept: Any = other.keep_context(64)
    for wrong, says in ((kept, "kept is a context of another model, <Model"), (model.new_context(64), "keep_context")):
        with pytest.raises(ModelError, match=says):
            list(model.generate(PROMPT, 2, kept=wrong))
        with pytest.raises(ModelError, match=says):
            model.create_completion(PROMPT, kept=wrong, **GREEDY)
