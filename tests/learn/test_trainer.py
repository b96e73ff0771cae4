"""Training of models: batches, what is saved, and what is refused. The golden curves are in tests/golden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import BatchError, GGMLError, GraphError, ModelError, StateError
from pyggml.learn.dropout import Dropout
from pyggml.learn.optimisers import Optimiser
from pyggml.learn.texts import Shape
from pyggml.learn.trainer import Trainer, _StepGraph
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..conftest import shared_dir
from ..golden.train_score import GOLDEN

IDS, MORE = [1, *range(70, 90)], [1, 200, 201, 202, 90]
LORA = gg.LoRA(r=3, alpha=6, targets=("attn_q", "ffn_down"), seed=1)


def test_a_text_is_learned_and_the_model_stays(tiny: Path) -> None:
    model = gg.load_model(tiny)
    before = {name: w.tobytes() for name, w in model.weights.items()}
    t = model.trainer(gg.AdamW(lr=0.02))
    first = t.loss([IDS])
    losses = [t.step([IDS]) for _ in range(20)]
    assert losses[0] == first
    assert losses[-1] < 0.2 * first
    assert t.n_steps == 20
    assert {name: w.tobytes() for name, w in model.weights.items()} == before
    assert set(t.params) == {n for n in model.weights if n not in ("rope_freqs.weight",)}


@pytest.mark.parametrize("train", ["all", LORA], ids=["all", "lora"])
def test_threads_do_not_change_a_bit(tiny: Path, train: gg.LoRA) -> None:
    model = gg.load_model(tiny)
    one, two = (model.trainer(gg.AdamW(lr=0.01), train, n_threads=n) for n in (1, 2))
    for _ in range(3):
        assert one.step([IDS, MORE]) == two.step([IDS, MORE])
    for name, w in one.params.items():
        assert w.tobytes() == two.params[name].tobytes()


def test_texts_of_a_batch_count_by_their_predictions(tiny: Path) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD())
    a, b = t.loss([IDS]), t.loss([MORE])
    n, m = len(IDS) - 1, len(MORE) - 1
    assert t.loss([IDS, MORE]) == pytest.approx((n * a + m * b) / (n + m), rel=1e-6)
    mask = [0, 1, 1, 0, 0]  # the first token is not predicted: its value does not count
    only = t.loss([MORE], [mask])
    assert t.loss([MORE], [[1, 1, 1, 0, 0]]) == only
    assert only == pytest.approx(t.loss([MORE[:3]]), rel=1e-6)
    assert t.loss([IDS, MORE], [[0] * len(IDS), mask]) == pytest.approx(only, rel=1e-6)


def test_texts_of_a_batch_attend_to_themselves_alone(tiny: Path) -> None:
    model = gg.load_model(tiny)
    graph = model.trainer(gg.SGD()).text_graph(Shape(3, 32)).build.graph
    n_head = model.hparams.layer(0).n_head
    attended = [tuple(s.ne for s in t.src[:2] if s is not None) for t in graph.nodes if t.op == "flash_attn_ext"]
    assert [(q[1:], k[1]) for q, k in attended] == [((32, n_head, 3), 32)] * model.hparams.n_layer
    assert max(t.n_elements for t in graph.leafs if "mask" in t.name) == 3 * 32 * 32


def test_a_step_of_a_batch_follows_the_mean_gradient(tiny: Path) -> None:
    model = gg.load_model(tiny)

    def moved(*texts: list[int]) -> dict[str, np.ndarray]:
        t = model.trainer(gg.SGD(lr=0.1))
        before = {name: w.numpy().copy() for name, w in t.params.items()}
        t.step(texts)
        return {name: w.numpy() - before[name] for name, w in t.params.items()}

    a, b, both = moved(IDS), moved(MORE), moved(IDS, MORE)
    n, m = len(IDS) - 1, len(MORE) - 1
    for name, change in both.items():
        want = (n * a[name] + m * b[name]) / (n + m)
        assert np.abs(change - want).max() <= 1e-5 * np.abs(want).max() + 2.0**-22  # of weights around 1


@pytest.mark.parametrize("options", [{}, {"n_ubatch": 1, "clip": 0.1}], ids=str)
@pytest.mark.parametrize("train", ["all", LORA], ids=["all", "lora"])
def test_what_is_computed_again_is_the_same(tiny: Path, train: gg.LoRA, options: dict[str, Any]) -> None:
    model = gg.load_model(tiny)
    kept, again = (model.trainer(gg.AdamW(lr=0.01), train, checkpoint=c, **options) for c in (False, True))
    for _ in range(2):
        assert kept.step([IDS, MORE]) == again.step([IDS, MORE])
    for name, w in kept.params.items():
        assert w.tobytes() == again.params[name].tobytes()


def test_a_budget_takes_the_least_that_fits(tiny: Path) -> None:
    model = gg.load_model(tiny)
    n_layer, shape = model.hparams.n_layer, Shape(4, 64)
    texts = [[1 + (i * j) % 200 for i in range(65)] for j in range(4)]
    t = model.trainer(gg.AdamW(lr=0.01))
    bytes_of = [t._bytes(_StepGraph(t, shape, "step", n)) for n in range(n_layer + 1)]
    assert bytes_of == sorted(bytes_of, reverse=True) and bytes_of[0] > bytes_of[1] > bytes_of[-1]
    loss = t.step(texts)
    for budget in (bytes_of[0], bytes_of[1], bytes_of[-1], bytes_of[0] - 1):
        t = model.trainer(gg.AdamW(lr=0.01), ram=budget)
        assert t.step(texts) == loss
        want = next(size for size in bytes_of if size <= budget)
        assert t._bytes(t._graph(shape, "step")) == want
    few = model.trainer(gg.AdamW(lr=0.01), ram=bytes_of[-1] - 1)
    with pytest.raises(ModelError, match=f"4 texts of 64 tokens need {bytes_of[-1]}"):
        few.step(texts)
    few.step(texts[:1])


TEXTS = [IDS, MORE, [1, 5, 9], IDS[:12], MORE[::-1]]
MASKS = [[i % 3 != 0 for i in range(len(ids))] for ids in TEXTS]


def gradients(t: Trainer, masks: list[list[bool]] | None) -> dict[str, np.ndarray]:
    """What a step of SGD with a learning rate of 1 takes away."""
    before = {name: w.numpy().copy() for name, w in t.params.items()}
    t.step(TEXTS, masks)
    return {name: before[name].astype(np.float64) - w.numpy() for name, w in t.params.items()}


@pytest.mark.parametrize("masks", [None, MASKS, [*MASKS[:2], [False] * 3, *MASKS[3:]]], ids=["all", "some", "a part"])
@pytest.mark.parametrize("train", ["all", LORA], ids=["all", "lora"])
def test_a_batch_in_parts_is_the_same_batch(tiny: Path, train: gg.LoRA, masks: list[list[bool]] | None) -> None:
    model = gg.load_model(tiny)
    whole = model.trainer(gg.SGD(lr=1), train)
    loss, want = whole.loss(TEXTS, masks), gradients(whole, masks)
    for n in (1, 2, 3, 5, 9):
        t = model.trainer(gg.SGD(lr=1), train, n_ubatch=n)
        assert t.loss(TEXTS, masks) == pytest.approx(loss, rel=1e-6)
        for name, g in gradients(t, masks).items():
            assert np.abs(g - want[name]).max() <= 2e-5 * np.abs(want[name]).max() + 2.0**-22, (
                name
            )  # of weights around 1
    assert t.step(TEXTS[:1]) == whole.step(TEXTS[:1])  # one part: no sums


def test_sums_begin_anew_with_each_step(tiny: Path) -> None:
    model = gg.load_model(tiny)
    whole, parts = (model.trainer(gg.AdamW(lr=0.01), n_ubatch=n) for n in (None, 2))
    for _ in range(4):
        assert parts.step(TEXTS) == pytest.approx(whole.step(TEXTS), rel=1e-4)
    parts.params["blk.1.ffn_up.weight"].numpy()[0, 0] = np.inf
    with pytest.raises(GraphError, match="the loss is nan in step 4"):
        parts.step(TEXTS)
    parts.params["blk.1.ffn_up.weight"].numpy()[0, 0] = whole.params["blk.1.ffn_up.weight"].numpy()[0, 0]
    assert parts.step(TEXTS) == pytest.approx(whole.step(TEXTS), rel=1e-4)
    assert parts.n_steps == 5


@pytest.mark.parametrize("n_ubatch", [None, 2])
@pytest.mark.parametrize("part", [0.5, 2.0])
def test_gradients_are_clipped_to_a_norm(tiny: Path, n_ubatch: int | None, part: float) -> None:
    model = gg.load_model(tiny)
    free = gradients(model.trainer(gg.SGD(lr=1)), None)
    norm = float(np.sqrt(sum((g**2).sum() for g in free.values())))
    got = gradients(model.trainer(gg.SGD(lr=1), n_ubatch=n_ubatch, clip=part * norm), None)
    factor = min(1.0, part * norm / (norm + 1e-6))
    for name, g in got.items():
        assert np.abs(g - factor * free[name]).max() <= 2e-5 * np.abs(free[name]).max() + 2.0**-22
    total = float(np.sqrt(sum((g**2).sum() for g in got.values())))
    assert total == pytest.approx(min(1.0, part) * norm, rel=1e-5)


@pytest.mark.parametrize("options", [{"clip": 0.1}, {"n_ubatch": 2}, {"n_ubatch": 2, "clip": 0.1}], ids=str)
def test_threads_do_not_change_a_bit_of_parts_and_clipping(tiny: Path, options: dict[str, Any]) -> None:
    model = gg.load_model(tiny)
    one, two = (model.trainer(gg.Muon(lr=0.01), n_threads=n, **options) for n in (1, 2))
    for _ in range(2):
        assert one.step(TEXTS) == two.step(TEXTS)
    for name, w in one.params.items():
        assert w.tobytes() == two.params[name].tobytes()


# -- optimisers --------------------------------------------------------------------------------------------------------


def test_momentum_and_decay() -> None:
    ctx, rng = gg.Context(), np.random.default_rng(0)
    w0, gradients = rng.standard_normal(40), rng.standard_normal((3, 40))
    opt: Optimiser = gg.SGD(lr=lambda step: 0.1 / (1 + step), momentum=0.9, weight_decay=0.01)
    with ctx:
        w, m = ctx.from_numpy(w0.astype(np.float32)), ctx.from_numpy(np.zeros(40, np.float32))
        g, numbers = ctx.new_tensor(gg.F32, (40,)).set_input(), ctx.new_tensor(gg.F32, (2,)).set_input()
        graph = gg.Graph().build_forward_expand(opt.step(w, g, (m,), numbers))
    buf = np.zeros(40)
    for i, x in enumerate(gradients):
        gg.compute(graph, {g: x, numbers: opt.numbers(i)})
        buf = 0.9 * buf + x + 0.01 * w0
        w0 = w0 - 0.1 / (1 + i) * buf
    assert np.allclose(w.numpy(), w0, rtol=1e-5, atol=1e-6)


def test_rates_by_step(tiny: Path) -> None:
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.0

    t = gg.load_model(tiny).trainer(gg.AdamW(lr=rate))
    assert t.step([MORE]) == t.step([MORE])
    assert asked == [0, 1]


# -- adapters ----------------------------------------------------------------------------------------------------------


def logits(model: gg.Model, ids: list[int], loras: list[tuple[object, float]]) -> np.ndarray:
    ctx = model.new_context(n_ctx=64, type_k=gg.F32, type_v=gg.F32)
    ctx.set_loras(loras)  # pyright: ignore[reportArgumentType]
    ctx.decode(ids)
    return ctx.logits.copy()


@pytest.mark.parametrize("quantised", [False, True])
def test_adapters_are_what_was_trained(tiny: Path, tmp_path: Path, quantised: bool) -> None:
    path = tiny
    if quantised:
        path = tmp_path / "q.gguf"
        write_quantized(plan_quantization(tiny, "Q8_0"), path)
    model = gg.load_model(path)
    t = model.trainer(gg.AdamW(lr=0.05), LORA)
    assert {w.ne for n, w in t.params.items() if n.endswith("_a")} == {(32, 3, 1, 1), (64, 3, 1, 1)}
    losses = [t.step([IDS]) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    t.save(tmp_path / "a.gguf")
    live, stored, none = (
        logits(model, IDS, loras) for loras in ([(t.lora, 1.0)], [(model.load_lora(tmp_path / "a.gguf"), 1.0)], [])
    )
    assert np.array_equal(live, stored)
    assert not np.allclose(live, none, rtol=1e-2)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden data in {GOLDEN}")
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
def test_adapters_as_peft_folders(name: str, tmp_path: Path) -> None:
    model = gg.load_model(GOLDEN / "hf" / name)
    roles = ("attn_output", "ffn_down*") if name == "gpt2" else ("attn_q", "ffn_down*")
    t = model.trainer(gg.AdamW(lr=0.05), gg.LoRA(r=2, targets=roles))
    for _ in range(3):
        t.step([IDS])
    t.save(tmp_path / "adapter")
    read = model.load_lora(tmp_path / "adapter")
    assert set(read.pairs) == set(t.lora.pairs)
    got, want = (logits(model, IDS, [(lora, 1.0)]) for lora in (read, t.lora))
    assert np.allclose(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="is there already"):
        t.save(tmp_path / "adapter")


# -- models and states -------------------------------------------------------------------------------------------------


def test_a_saved_model_is_the_trained_one(tiny: Path, tmp_path: Path) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD(lr=0.1))
    for _ in range(3):
        t.step([IDS])
    t.save(tmp_path / "m.gguf")
    again = gg.load_model(tmp_path / "m.gguf")
    for name, w in t.params.items():
        assert again.weights[name].dtype is t.model.weights[name].dtype
        assert np.allclose(np.asarray(again.weights[name].numpy(), np.float32), w.numpy(), rtol=2.0**-9)
    assert again.trainer(gg.SGD()).loss([IDS]) == pytest.approx(t.loss([IDS]), rel=1e-2)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_weights_of_16_bits_are_trained_in_f32(tiny: Path, tmp_path: Path, kind: str) -> None:
    """Steps that are too small for 16 bits add up in the parameters; what is saved are these, rounded once."""
    path, dtype = tmp_path / "m.gguf", getattr(gg, kind)
    write_quantized(plan_quantization(tiny, kind), path)
    t = gg.load_model(path).trainer(gg.SGD(lr=1e-5))
    before = {name: w.numpy().copy() for name, w in t.params.items()}
    for _ in range(3):
        t.step([IDS])
    t.save(tmp_path / "out.gguf")
    again, n_between = gg.load_model(tmp_path / "out.gguf"), 0
    for name, w in t.params.items():
        stored = again.weights[name]
        assert stored.dtype is t.model.weights[name].dtype
        if stored.dtype is dtype:
            assert np.array_equal(np.asarray(stored.numpy(), np.float32), gg.eval(gg.cast(w, dtype)).astype(np.float32))
            n_between += int(((w.numpy() != before[name]) & (np.asarray(stored.numpy()) == before[name])).sum())
    assert n_between > 100  # changes that 16 bits do not show


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden data in {GOLDEN}")
@pytest.mark.parametrize("name", ["gemma", "qwen3", "apertus"])
def test_a_saved_folder_is_the_trained_model(name: str, tmp_path: Path) -> None:
    t = gg.load_model(GOLDEN / "hf" / name).trainer(gg.SGD(lr=0.02))
    t.step([IDS])
    t.save(tmp_path / "out")
    again = gg.load_model(tmp_path / "out").trainer(gg.SGD())
    assert set(again.params) == set(t.params)
    for w, p in t.params.items():
        assert np.allclose(again.params[w].numpy(), p.numpy(), rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.trainer(gg.AdamW(lr=0.01)),
        lambda m: m.trainer(gg.SGD(lr=0.1, momentum=0.5), LORA),
        lambda m: m.trainer(gg.Muon(lr=0.01), clip=0.5),
        lambda m: m.trainer(gg.Adafactor(lr=0.01), n_ubatch=1),
        lambda m: m.trainer(gg.AdamW8(lr=0.01)),
    ],
    ids=["adamw", "lora", "muon", "adafactor", "adamw8"],
)
def test_a_killed_run_goes_on_to_the_same_bits(tiny: Path, tmp_path: Path, make: Callable[[gg.Model], Trainer]) -> None:
    model = gg.load_model(tiny)
    whole, first, second = make(model), make(model), make(model)
    want = [whole.step([IDS, MORE]) for _ in range(4)]
    got = [first.step([IDS, MORE]) for _ in range(2)]
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    assert second.n_steps == 2
    assert got + [second.step([IDS, MORE]) for _ in range(2)] == want


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_states_of_other_trainings(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    path = tmp_path / "state"
    sgd = gg.SGD(lr=0.1)
    cases: list[tuple[Trainer, Trainer, str]] = [
        (model.trainer(sgd), model.trainer(gg.AdamW(lr=0.1)), "with optimiser SGD, .*here: optimiser AdamW, .*betas"),
        (model.trainer(sgd), model.trainer(sgd, LORA), "here: LoRA factor 2"),
        (model.trainer(sgd, LORA), model.trainer(sgd, gg.LoRA(r=2, alpha=4)), "is only here"),
        (model.trainer(sgd), model.trainer(gg.SGD(lr=0.1, momentum=0.9)), "with momentum 0; here: momentum 0.9"),
        (model.trainer(sgd), model.trainer(gg.SGD(lr=0.2)), r"with lr 0\.1; here: lr 0\.2"),
        (model.trainer(sgd, clip=1), model.trainer(sgd), "with clip 1; here: clip None"),
        (
            model.trainer(gg.AdamW(betas=(0.9, 0.99))),
            model.trainer(gg.AdamW(betas=(0.9, 0.98), eps=1e-6)),
            "with betas 0.9, 0.99, eps 1e-08; here: betas 0.9, 0.98, eps 1e-06",
        ),
        (
            model.trainer(gg.SGD(gg.schedule(0.1, 10, "cosine"))),
            model.trainer(gg.SGD(gg.schedule(0.1, 20, "cosine"))),
            r"with lr 0\.0975528; here: lr 0\.0993844",
        ),
    ]
    for saved, other, text in cases:
        saved.step([IDS])
        saved.save_state(path)
        before = {name: w.tobytes() for name, w in other.params.items()}
        with pytest.raises(StateError, match=text):
            other.load_state(path)
        assert {name: w.tobytes() for name, w in other.params.items()} == before
    with pytest.raises(StateError, match="no state of a training"):
        model.trainer(gg.SGD()).load_state(tiny)


def test_a_rate_may_be_a_function_or_its_number(tiny: Path, tmp_path: Path) -> None:
    """What counts is the rate of the next step."""
    model = gg.load_model(tiny)
    one, other = model.trainer(gg.SGD(gg.schedule(0.1, 10, warmup=3))), model.trainer(gg.SGD(lr=0.1))
    for _ in range(3):
        one.step([IDS])
    one.save_state(tmp_path / "state")
    other.load_state(tmp_path / "state")
    assert other.step([IDS]) == one.step([IDS])


def test_too_little_memory_says_how_much_is_needed(tiny: Path) -> None:
    model = gg.load_model(tiny)
    for r in (10**9, 10**12, 10**18):
        with pytest.raises(gg.AllocError, match=r"training of [0-9,]+ numbers needs [0-9.]+ GiB of memory; "):
            model.trainer(gg.AdamW(), gg.LoRA(r=r))
    t = model.trainer(gg.SGD(), n_ctx=1 << 18)
    with pytest.raises(gg.AllocError, match=r"graph of a batch of [0-9]+ nodes needs|cannot allocate [0-9]+ bytes"):
        t.step([[1] * (1 << 18)])
    assert np.isfinite(t.step([IDS]))


def test_bad_batches(tiny: Path) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD(), n_ctx=16)
    cases: list[tuple[list[list[int]], list[list[int]] | None, str]] = [
        ([], None, "at least one sequence"),
        ([1, 2, 3], None, "sequence 0 is 1"),  # pyright: ignore
        ([[1, 2], []], None, "sequence 1 is empty"),
        ([[1]], None, "sequence 0 has one token"),
        ([[1, 259]], None, "sequence 0 has the token 259, outside of the vocabulary of 259"),
        ([[1, -1]], None, "has the token -1"),
        ([list(range(17))], None, "sequence 0 has 17 tokens, more than the n_ctx = 16"),
        ([[1, 2, 3]], [[1, 1]], "sequence 0 has 3 tokens, its mask is of shape"),
        ([[1, 2, 3]], [], "1 sequences have 0 masks"),
        ([[1, 2, 3]], [[1, 0, 0]], "leave no prediction"),
    ]
    for sequences, masks, text in cases:
        with pytest.raises(BatchError, match=text):
            t.step(sequences, masks)
    assert t.n_steps == 0


def test_a_loss_that_is_no_number_stops_the_step(tiny: Path) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD(lr=0.1))
    t.step([IDS])
    t.params["blk.1.ffn_up.weight"].numpy()[0, 0] = np.nan
    before = {name: w.tobytes() for name, w in t.params.items()}
    with pytest.raises(GraphError, match=r"nan in step 1: .*blk\.1\.ffn_up\.weight; the parameters stay"):
        t.step([IDS])
    assert {name: w.tobytes() for name, w in t.params.items()} == before
    t.params["blk.1.ffn_up.weight"].numpy()[0, 0] = np.inf
    with pytest.raises(GraphError, match="in step 1: the first tensor with an element that is no number is norm"):
        t.step([IDS])
    t.params["blk.1.ffn_up.weight"].numpy()[0, 0] = 0.0
    assert np.isfinite(t.step([IDS]))


@pytest.mark.parametrize("n_ubatch", [None, 1])
def test_a_norm_that_is_no_number_stops_the_step(tiny: Path, n_ubatch: int | None) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD(lr=0.1), n_ubatch=n_ubatch, clip=1.0)
    w = t.params["output_norm.weight"].numpy()
    w[...] = np.where(np.arange(w.size) % 2, 1e-38, w * 1e28)  # gradients whose squares are too large
    before = {name: w.tobytes() for name, w in t.params.items()}
    with pytest.raises(GraphError, match=r"the norm of the gradients is inf in step 0: .*; the parameters stay"):
        t.step([IDS, MORE])
    assert {name: w.tobytes() for name, w in t.params.items()} == before


def test_bad_arguments(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    write_quantized(plan_quantization(tiny, "Q8_0"), tmp_path / "q.gguf")
    quantised = gg.load_model(tmp_path / "q.gguf")

    def wrong(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(3)

    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: quantised.trainer(gg.SGD()), r"weights are of block types, such as .*only adapters"),
        (lambda: model.trainer(gg.SGD(), gg.LoRA(targets=("attn_z",))), "reads a weight 'attn_z'; there are attn_k"),
        (lambda: model.trainer(gg.SGD(), gg.LoRA(init=wrong)), r"init must give finite numbers of shape \(8, 32\)"),
        (lambda: model.trainer(gg.SGD(), "some"), "train must be"),  # pyright: ignore[reportArgumentType]
        (lambda: model.trainer(gg.SGD(), n_ctx=1), "n_ctx"),
        (lambda: model.trainer(gg.SGD(), n_ubatch=0), "n_ubatch"),
        (lambda: model.trainer(gg.SGD(), clip=-1), "clip must be a finite number from 0 on"),
        (lambda: model.trainer(gg.SGD(), clip=0), "clip must be a positive number"),
        (lambda: gg.LoRA(r=0), "r"),
        (lambda: gg.LoRA(alpha=-1), "alpha must be a positive number"),
        (lambda: gg.LoRA(targets="attn_q"), "targets must be a list"),
        (lambda: gg.LoRA(targets=()), "at least one"),
        (lambda: gg.AdamW(lr=-1), "lr must be a finite number from 0 on"),
        (lambda: gg.AdamW(betas=(0.9, 1.0)), "below 1"),
        (lambda: gg.SGD(momentum=1.0), "below 1"),
        (lambda: gg.SGD(lr=lambda step: float("nan")).numbers(3), "lr of step 3"),
        (lambda: gg.load_model(tiny, vocab_only=True).trainer(gg.SGD()), "whole model in memory"),
    ]
    for make, text in cases:
        with pytest.raises(GGMLError, match=text):
            make()


@pytest.mark.skipif(not (shared_dir() / "golden").is_dir(), reason="no golden data")
def test_models_that_predict_nothing() -> None:
    for name, text in (("bert", "has no logits"),):
        with pytest.raises(ModelError, match=text):
            gg.load_model(GOLDEN / "hf" / name).trainer(gg.SGD())


def test_outputs_are_refused_before_anything_is_lost(tiny: Path, tmp_path: Path) -> None:
    """Over the model, into a folder that is not there, over a folder."""
    path = tmp_path / "m.gguf"
    before = tiny.read_bytes()
    path.write_bytes(before)
    with gg.load_model(path) as model:
        t = model.trainer(gg.SGD(0.1), gg.LoRA(r=2))
        t.step([[1, 2, 3]])
        for out, says in ((path, "is read, too"), (tmp_path / "no" / "a.gguf", "no folder"), (tmp_path, "a folder")):
            for write in (t.save, t.save_state):
                with pytest.raises(gg.ModelError, match=says):
                    write(out)
    assert path.read_bytes() == before


@pytest.mark.parametrize("train", ["all", LORA], ids=["all", "lora"])
def test_dropout_follows_from_seed_and_step_alone(tiny: Path, train: gg.LoRA) -> None:
    model = gg.load_model(tiny)

    def losses(dropout: float, seed: int, n_threads: int) -> list[float]:
        t = model.trainer(gg.AdamW(lr=0.01), train, n_threads=n_threads, dropout=dropout, seed=seed)
        return [t.step([IDS, MORE]) for _ in range(4)] + [t.loss([IDS])]

    one = losses(0.3, 1, 1)
    assert one == losses(0.3, 1, 2)
    assert one[1:] != losses(0.3, 2, 1)[1:]  # B of an adapter begins as zeros: the first loss has no dropout in it
    assert one[1:] != losses(0.0, 1, 1)[1:]


def test_dropout_zeroes_its_share_of_what_is_added_to_the_residual(tiny: Path) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD(), dropout=0.25)
    graph = t.text_graph(Shape(2, 32), t.dropout)
    dropout = graph.build.adapters
    assert isinstance(dropout, Dropout)
    masks = {x.name: x for x in graph.build.graph.leafs if x.name.endswith("(dropout)")}
    roles = [name.removeprefix("blk.0.").split(".")[0] for name in masks if "blk." not in name or "blk.0." in name]
    assert roles == ["token_embd", "attn_output", "ffn_down"]
    values: list[bytes] = []
    for step in (0, 1, 0):
        dropout.fill(0, step)
        drawn = np.stack([mask.numpy() for mask in masks.values()])
        values.append(drawn.tobytes())
        assert set(np.unique(drawn)) == {np.float32(0), np.float32(4 / 3)}
        assert abs((drawn == 0).mean() - 0.25) < 0.02
    assert values[0] == values[2] != values[1]


def test_a_trainer_with_dropout_goes_on_to_the_same_bits(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)
    one, two = (model.trainer(gg.Muon(lr=0.01), dropout=0.2) for _ in range(2))
    one.step([IDS])
    one.save_state(tmp_path / "state.gguf")
    two.load_state(tmp_path / "state.gguf")
    assert one.step([MORE]) == two.step([MORE])
    assert one.step([IDS]) == two.step([IDS])


@pytest.mark.parametrize("dropout", [1, -0.1, True, "0.1", float("nan")])
def test_dropout_is_a_share(tiny: Path, dropout: float) -> None:
    with pytest.raises(ModelError, match="dropout must be a number"):
        gg.load_model(tiny).trainer(gg.SGD(), dropout=dropout)


def test_a_failed_training_does_not_write_over_a_good_state(tiny: Path, tmp_path: Path) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD())
    state = tmp_path / "state.gguf"
    t.step([IDS])
    t.save_state(state)
    good = state.read_bytes()
    next(iter(t.params.values())).numpy()[0] = np.nan
    with pytest.raises(GraphError, match="the state is not written: after 1 steps"):
        t.save_state(state)
    assert state.read_bytes() == good


def test_states_of_another_model_or_dropout_are_refused(tiny: Path, tmp_path: Path) -> None:
    model, other, state = gg.load_model(tiny), gg.load_model(tiny), tmp_path / "state.gguf"
    model.trainer(gg.SGD()).save_state(state)
    with pytest.raises(StateError, match="dropout"):
        model.trainer(gg.SGD(), dropout=0.5).load_state(state)
    w = next(w for w in other.weights.values() if w.dtype is gg.F32)
    w.buffer, w.offset = gg.Context().from_numpy(w.numpy() + 1).buffer, 0
    with pytest.raises(StateError, match=r"training\.model"):
        other.trainer(gg.SGD()).load_state(state)


def test_what_cannot_be_written_is_said_before_the_first_step(tiny: Path, tmp_path: Path) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD())
    for state in (tmp_path / "none" / "s.gguf", tiny):
        with pytest.raises(ModelError):
            t.fit([IDS], state=state)
    assert t.n_steps == 0


def test_more_bad_arguments_of_a_trainer(tiny: Path) -> None:
    model: Any = gg.load_model(tiny)
    lora: Any = gg.LoRA
    bad: list[Callable[[], Any]] = [
        lambda: model.trainer(gg.AdamW),
        lambda: model.trainer(gg.AdamW(), checkpoint="no"),
        lambda: model.trainer(gg.AdamW()).step([IDS], 5),
        lambda: model.trainer(gg.AdamW()).fit([IDS], save_every=-1),
        lambda: gg.AdamW(betas=(0.9, 0.99999999)),
        lambda: lora(targets=None),
        lambda: lora(seed=-1),
    ]
    for call in bad:
        with pytest.raises(GGMLError):
            call()


@pytest.mark.parametrize("train", [LORA, "all"])
@pytest.mark.parametrize("name", ["a.gguf", "folder"])
def test_what_a_failed_training_made_is_not_written(tiny: Path, tmp_path: Path, train: Any, name: str) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD(lr=0.1), train)
    param = next(iter(t.params.values()))
    param.set(np.full(param.shape, np.nan, np.float32))
    with pytest.raises(ModelError, match="the training has failed"):
        t.save(tmp_path / name)
    assert not (tmp_path / name).exists()
