"""`gg.batch` answers each request with the same text, whatever is evaluated beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import pyggml as gg

if TYPE_CHECKING:
    from pyggml.llm.options import ContextOptions

TALE = "the old king went into a dark forest and found there a little house where nobody lived but a cat"
WORDS = TALE.split(" ")


def prompts() -> list[str]:
    """Texts of 1 to 120 words, many of which begin alike."""
    rng = np.random.default_rng(0)
    parts = [
        (WORDS[: int(rng.integers(0, 19))], rng.choice(WORDS, int(rng.choice([1, 3, 20, 100])))) for _ in range(24)
    ]
    return [" ".join([*start, *rest]) for start, rest in parts]


@pytest.mark.parametrize("temp", [0.0, 0.9])
def test_answers_do_not_depend_on_company(temp: float) -> None:
    answers: list[list[Any]] = []
    ways: list[tuple[str | None, int, int, ContextOptions]] = [
        (None, 1, 1, {}),
        (None, 7, 2, {"n_ubatch": 13}),
        (None, 32, 1, {"n_batch": 64}),
        ("4M", 5, 2, {}),  # weights are read from the file
    ]
    for ram, n_parallel, n_threads, context in ways:
        with gg.load_model(ram=ram) as model:
            options = {"n_parallel": n_parallel, "n_threads": n_threads, "context": context, "temp": temp, "seed": 3}
            answers.append(list(gg.batch(model, prompts(), 12, **options)))
    assert len(answers[0]) == 24
    assert all(a == answers[0] for a in answers)
