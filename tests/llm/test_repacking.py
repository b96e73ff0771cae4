"""Large models are repacked while their first tokens are computed."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from pyggml import load_model
from pyggml.llm.model import Model

IDS = [5, 6, 7]


@pytest.fixture
def put_off(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Model]:
    """Load the shipped model as if it were large."""
    monkeypatch.setattr("pyggml.llm.model._REPACKED_AT_ONCE", 0)
    return load_model


def steps(model: Model, n: int) -> list[np.ndarray]:
    """Logits after a prompt and of `n` tokens after it, every second before a longer text."""
    with model.new_context(512, n_threads=2) as ctx:
        found: list[np.ndarray] = []
        for ids in [IDS, *([i] * 17 if i % 2 == 0 else [i] for i in range(n))]:
            ctx.decode(ids)
            found.append(ctx.logits[-1])
        return found


def n_copies(model: Model) -> int:
    return sum(t.form.copy is not None for t in model.weights.values())


def test_the_first_decode_waits_for_no_copy(put_off: Callable[[], Model]) -> None:
    want = steps(load_model(), 28)
    model = put_off()
    assert model.repacking is not None and not model.repacking.done and not n_copies(model)
    with model.new_context(64) as ctx:
        ctx.decode(IDS)
        assert not n_copies(model)
        ctx.decode([8])
        one = n_copies(model)
        ctx.decode([5] * 17)
        assert 0 < one < n_copies(model) < model.repacking.n_copies
    assert all(map(np.array_equal, steps(model, 28), want))
    assert model.repacking.done and n_copies(model) == model.repacking.n_copies


def test_graphs_of_all_contexts_come_to_read_the_copies(put_off: Callable[[], Model]) -> None:
    model = put_off()
    assert model.repacking is not None
    contexts = [model.new_context(64) for _ in range(2)]
    for ctx in contexts:
        ctx.decode([3])
    model.repacking.finish()
    before = [ctx._ready._last[2] for ctx in contexts]  # pyright: ignore[reportPrivateUsage, reportOptionalSubscript]
    for ctx, old in zip(contexts, before, strict=True):
        ctx.decode([4])
        assert ctx.n_graphs == 1
        assert ctx._ready._last[2] is not old  # pyright: ignore[reportPrivateUsage, reportOptionalSubscript]
    assert np.array_equal(contexts[0].logits, contexts[1].logits)


def test_threads_with_contexts_of_their_own(put_off: Callable[[], Model]) -> None:
    want = steps(load_model(), 28)
    model = put_off()
    found: list[list[np.ndarray]] = []
    threads = [threading.Thread(target=lambda: found.append(steps(model, 28))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(np.array_equal(a, b) for one in found for a, b in zip(one, want, strict=True))


def test_in_memory_at_once() -> None:
    model = load_model()
    assert model.repacking is not None and model.repacking.done  # it is small
    assert load_model(repack=False).repacking is None
