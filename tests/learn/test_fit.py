"""`gg.fit` and `Trainer.fit`: batches, results, validation, states; and data sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import GGMLError, StateError
from pyggml.learn.dataset import Order
from pyggml.learn.loop import Epoch, Progress
from pyggml.learn.texts_file import Batches, Example

N = 29
rng = np.random.default_rng(0)
X = rng.standard_normal((N, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.standard_normal(N)).astype(np.float32)


class Line:
    """A linear model, which fits a line to X and Y."""

    def __init__(self) -> None:
        ctx = gg.Context()
        self.w = ctx.from_numpy(np.zeros((1, 3), np.float32), name="w").set_param()
        self.b = ctx.from_numpy(np.zeros(1, np.float32), name="b").set_param()
        self.sizes: list[int] = []

    def loss_of(self, x: gg.Tensor, y: gg.Tensor) -> tuple[gg.Tensor, dict[str, gg.Tensor]]:
        n = int(x.ne[1])
        self.sizes.append(n)
        error = (gg.mul_mat(self.w, x) + self.b).reshape((n,)) - y
        return gg.sqr(error).mean(), {"far": gg.abs(error) > 1.0, "mean error": error.mean()}

    def fit(self, *args: Any, data: gg.Dataset | None = None, opt: Any = None, **more: Any) -> list[Epoch]:
        return gg.fit(self.loss_of, data or gg.Dataset(X, Y), opt or gg.SGD(0.05), *args, **more)

    @property
    def values(self) -> np.ndarray:
        return np.append(self.w.numpy(), self.b.numpy())


def test_a_fit_is_that_of_numpy() -> None:
    """Steps, means and uncertainties, with parts of batches and batches of several sizes."""
    line = Line()
    epochs = line.fit(2, 0.2, 8, 3, seed=5)
    assert sorted(line.sizes) == [1, 2, 3]  # once each
    order, w = Order(N, 8, 5, 0.2), np.zeros(4)
    assert (order.n_epoch, [len(b) for b in order.held]) == (3, [6])

    def error(i: np.ndarray) -> np.ndarray:
        return X[i].astype(np.float64) @ w[:3] + w[3] - Y[i]

    def near(got: object, samples: list[float], weights: list[int]) -> bool:
        mean = np.average(samples, weights=weights)
        spread = np.average(np.square(samples), weights=weights) - mean**2
        return got == pytest.approx((mean, math.sqrt(spread / (len(samples) - 1))), rel=1e-4, abs=1e-6)

    for number, epoch in enumerate(epochs):
        losses, sizes, far = list[float](), list[int](), list[float]()
        for step in range(3):
            batch = order[3 * number + step]
            for part in (batch[i : i + 3] for i in range(0, len(batch), 3)):
                losses.append(float((error(part) ** 2).mean()))
                sizes.append(len(part))
                far += list(np.abs(error(part)) > 1.0)
            g = 2 * error(batch) / len(batch)
            w = w - 0.05 * np.append(g @ X[batch], g.sum())
        assert (epoch.number, epoch.n_steps) == (number + 1, 3 * (number + 1))
        assert near(epoch.train["loss"], losses, sizes)
        assert near(epoch.train["far"], far, [1] * len(far))
        held = [error(order.held[0][i : i + 3]) for i in (0, 3)]
        assert near(epoch.val["loss"], [float((e**2).mean()) for e in held], [3, 3])
        assert near(epoch.val["mean error"], [float(e.mean()) for e in held], [3, 3])
    assert np.allclose(line.values, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"n_ubatch": 3}, {"clip": 0.5}, {"n_ubatch": 3, "clip": 0.5}], ids=str)
def test_a_killed_fit_goes_on_to_the_same_bits(tmp_path: Path, more: dict[str, Any]) -> None:
    def opt() -> gg.AdamW:
        return gg.AdamW(lr=lambda step: 0.1 / (1 + step))

    whole, killed, last = Line(), Line(), Line()
    want = whole.fit(3, 0.2, 8, opt=opt(), n_threads=1, **more)

    def kill(p: Progress) -> None:
        if p.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.fit(3, 0.2, 8, opt=opt(), state=tmp_path / "s", callback=kill, n_threads=2, **more)
    got = last.fit(3, 0.2, 8, opt=opt(), resume=tmp_path / "s", **more)
    assert repr(got) == repr(want)  # NaN is not NaN
    assert last.values.tobytes() == whole.values.tobytes()
    assert repr(last.fit(3, 0.2, 8, opt=opt(), resume=tmp_path / "s", **more)) == repr(want)


@pytest.mark.parametrize("opt", [gg.AdamW8(0.05), gg.Muon(0.05), gg.Adafactor(0.05), gg.SGD(0.05, 0.9)], ids=repr)
def test_states_of_all_optimisers(tmp_path: Path, opt: Any) -> None:
    whole, first, second = Line(), Line(), Line()
    want = whole.fit(3, n_batch=8, opt=opt)
    first.fit(2, n_batch=8, opt=opt, state=tmp_path / "s")
    assert second.fit(3, n_batch=8, opt=opt, resume=tmp_path / "s") == want
    assert second.values.tobytes() == whole.values.tobytes()
    assert want[-1].loss < want[0].loss


def test_an_interrupted_validation_is_made_up_for(tmp_path: Path) -> None:
    class Examples:
        """Ctrl-C comes when an example that is held back is read for the second time."""

        first, n_left = int(Order(N, 8, 0, 0.2).held[0][0]), 2

        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> tuple[np.ndarray, np.float32]:
            self.n_left -= i == self.first
            if i == self.first and self.n_left == 0:
                raise KeyboardInterrupt
            return X[i], Y[i]

    whole, killed, last = Line(), Line(), Line()
    want = whole.fit(3, 0.2, 8, data=gg.Dataset(list(zip(X, Y, strict=True))))
    data = gg.Dataset(Examples())
    data.digest = gg.Dataset(list(zip(X, Y, strict=True))).digest  # pyright: ignore
    with pytest.raises(KeyboardInterrupt):
        killed.fit(3, 0.2, 8, data=data, state=tmp_path / "s")
    got = last.fit(3, 0.2, 8, data=gg.Dataset(list(zip(X, Y, strict=True))), resume=tmp_path / "s")
    assert repr(got) == repr(want)
    assert last.values.tobytes() == whole.values.tobytes()


def test_states_of_other_fits(tmp_path: Path) -> None:
    path = tmp_path / "s"
    Line().fit(1, n_batch=8, state=path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": gg.Dataset(X, Y + 1)}, "data was "),
        ({"seed": 1}, "seed was 0 there, and is 1 here"),
        ({"n_ubatch": 2}, "n_ubatch was 8 there, and is 2 here"),
        ({"opt": gg.SGD(0.05, momentum=0.5)}, r"optimiser was .*0\.0.* is .*0\.5"),
        ({"opt": gg.SGD(0.06)}, "the learning rates of the steps that were made differ"),
    ]
    for options, text in cases:
        line = Line()
        with pytest.raises(StateError, match=text):
            line.fit(2, n_batch=8, resume=path, **options)
        assert not line.values.any()
    assert [e.number for e in Line().fit(2, n_batch=8, resume=path)] == [1, 2]


def test_callbacks_and_bars(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Progress] = []
    epochs = Line().fit(1.5, n_batch=10, callback=seen.append, progress=True)
    assert [(p.step, p.n_steps, p.epoch) for p in seen] == [(1, 5, 1), (2, 5, 1), (3, 5, 1), (4, 5, 2), (5, 5, 2)]
    assert [p.result for p in seen if p.result] == epochs
    assert all(p.per_second > 0 and p.seconds_left >= 0 for p in seen)
    assert epochs[0].val_loss != epochs[0].val_loss  # NaN
    assert str(epochs[0]).startswith(f"epoch 1: loss {epochs[0].loss:.4f} ± ")
    assert capsys.readouterr() == ("", "")  # no terminal, no bar


# -- data sets ---------------------------------------------------------------------------------------------------------


def test_all_kinds_of_data_are_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    kinds = [
        gg.Dataset(X, Y),
        gg.Dataset(np.load(tmp_path / "x.npy", mmap_mode="r"), Y.astype(np.float64)),
        gg.Dataset({"x": X, "y": Y}),
        gg.Dataset(list(zip(X, Y, strict=True))),
        gg.Dataset([{"y": y, "x": x.tolist()} for x, y in zip(X, Y, strict=True)]),
    ]
    found: list[bytes] = []
    for data in kinds:
        line = Line()
        line.fit(1, n_batch=8, data=data)
        found.append(line.values.tobytes())
    assert len({*found}) == 1
    assert repr(kinds[2]) == "<Dataset 29 examples of x F32 ne [3], y F32 ne []>"


def test_the_order_of_examples() -> None:
    order = Order(20, 4, 3, 0.3, shard=3)
    held = np.concatenate(order.held).tolist()
    assert len(order.held[0]) == 4 and len(held) in (5, 6)
    for epoch in range(2):
        seen = np.concatenate([order[i] for i in range(epoch * order.n_epoch, (epoch + 1) * order.n_epoch)]).tolist()
        assert sorted(seen + held) == list(range(20))
        at = {i: seen.index(i) for i in seen}
        assert all(at[i + 1] == at[i] + 1 for i in seen if i % 3 < 2 and i + 1 < 20)
    assert order[0].tolist() != order[order.n_epoch].tolist()
    assert Order(20, 4, 3, 0.3, shard=3)[7].tolist() == order[7].tolist()


def test_bad_data_and_arguments(tmp_path: Path) -> None:
    def of_size(x: gg.Tensor, y: gg.Tensor) -> gg.Tensor:
        return gg.sqr(Line().w * x).mean()

    def unmarked(x: gg.Tensor, y: gg.Tensor) -> gg.Tensor:
        return gg.sqr(x).mean()

    def many(x: gg.Tensor, y: gg.Tensor) -> gg.Tensor:
        return gg.mul_mat(Line().w, x)

    def double(x: gg.Tensor, y: gg.Tensor) -> gg.Tensor:
        w = x.ctx.from_numpy(np.ones((1, 3)), gg.F64).set_param()
        return gg.mul_mat(gg.cast(w, gg.F32), x).mean()

    data, line = gg.Dataset(X, Y), Line()
    ragged = [(X[0], Y[0]), (X[0, :2], Y[0])]
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: gg.Dataset(), "needs data"),
        (lambda: gg.Dataset([]), "at least one example"),
        (lambda: gg.Dataset({}), "at least one field"),
        (lambda: gg.Dataset({"a b": X}), "called like parameters"),
        (lambda: gg.Dataset("text"), "arrays or a sequence"),
        (lambda: gg.Dataset(X, Y[:5]), r"differs for field 1 of shape \(5,\) and the first one of \(29, 3\)"),
        (lambda: gg.Dataset(np.zeros((2, 1, 1, 1, 1))), "up to three dimensions"),
        (lambda: gg.Dataset(X.astype(complex)), "holds numbers, not complex"),
        (lambda: gg.Dataset(X, shard=0), "shard"),
        (lambda: line.fit(data=gg.Dataset(ragged)), r"example 1 of the Dataset has fields of shapes \[\(2,\), \(\)\]"),
        (lambda: line.fit(0), "epochs must be a positive number, not 0"),
        (lambda: line.fit(1, 1.0), "val_split must be a number from 0 on and below 1"),
        (lambda: line.fit(1, 0.001), "leaves none for one of the two parts"),
        (lambda: line.fit(1, 0.0, 0), "n_batch must be a whole number from 1"),
        (lambda: line.fit(1, 0.0, 4, 5), "n_ubatch must be a whole number from 1 to 4"),
        (lambda: line.fit(clip=0.0), "clip must be a positive number"),
        (lambda: line.fit(state=tmp_path / "no" / "s"), "there is no folder"),
        (lambda: gg.fit(line.loss_of, X, gg.SGD()), "must be a gg.Dataset, not ndarray"),  # pyright: ignore
        (lambda: gg.fit(of_size, data, gg.SGD()), "parameters"),
        (lambda: gg.fit(unmarked, data, gg.SGD()), "depends on no parameter"),
        (lambda: gg.fit(many, data, gg.SGD()), "the loss must be one element in F32"),
        (lambda: gg.fit(double, data, gg.SGD()), "parameters must be F32, F16 or BF16, not .*F64"),
        (lambda: gg.fit(lambda x, y: 3, data, gg.SGD()), "loss_of must give a Tensor"),  # pyright: ignore
        (lambda: gg.fit(lambda x, y: (x, {"loss": y}), data, gg.SGD()), "the metric 'loss'"),
        (lambda: gg.fit(line.loss_of, data, "adam"), r"an optimiser, as pyggml\.AdamW\(\), not 'adam'"),  # pyright: ignore
        (lambda: gg.fit(line.loss_of, data, gg.SGD), "an optimiser, as .*, not <class"),  # pyright: ignore
    ]
    for make, text in cases[:18] + cases[19:]:
        with pytest.raises(GGMLError, match=text):
            make()
    with pytest.raises(GGMLError, match="a batch of 5 examples depends on other parameters"):
        gg.fit(of_size, data, gg.SGD(), n_batch=8)


def test_an_optimiser_of_ones_own_writes_over_parameters() -> None:
    """Else nothing would be learned, and nobody told."""

    class Own:
        n_numbers = 1

        def __init__(self, step: Callable[[gg.Tensor, gg.Tensor], Any]) -> None:
            self.record = step

        def states(self, w: gg.Tensor) -> tuple[()]:
            return ()

        def numbers(self, step: int) -> np.ndarray:
            return np.zeros(1, np.float32)

        def step(self, w: gg.Tensor, g: gg.Tensor, states: Any, numbers: gg.Tensor) -> Any:
            return self.record(w, g)

    own, sgd = Line(), Line()
    own.fit(opt=Own(lambda w, g: gg.cpy(w - 0.05 * g, w)))
    sgd.fit()
    np.testing.assert_allclose(own.values, sgd.values, rtol=1e-6)
    wrong: list[tuple[Callable[[gg.Tensor, gg.Tensor], Any], str]] = [
        (lambda w, g: w - 0.05 * g, r"not \(sub\): F32 ne"),
        (lambda w, g: w, "not [wb]: F32 ne"),
        (lambda w, g: None, "not NoneType"),
    ]
    for step, says in wrong:
        for n_ubatch in (None, 2):
            with pytest.raises(
                gg.GraphError, match=f"Own: step must give a view of [wb] that was written over, .*{says}"
            ):
                Line().fit(opt=Own(step), n_batch=4, n_ubatch=n_ubatch)
    with pytest.raises(gg.GraphError, match="must be an optimiser"):
        Line().fit(opt=type("Half", (), {"states": ()})())


def test_a_loss_that_is_no_number() -> None:
    line, x = Line(), X.copy()
    x[Order(N, 8, 0, 0.0)[2][1]] = np.inf
    with pytest.raises(gg.GraphError, match=r"the loss is (nan|inf) in step 2: .*; the parameters stay"):
        line.fit(1, 0.0, 8, data=gg.Dataset(x, Y))
    assert np.isfinite(line.values).all() and line.values.any()


# -- models ------------------------------------------------------------------------------------------------------------


TEXTS = [[1, *range(70 + i, 76 + 2 * i)] for i in range(7)]


def test_a_trainer_takes_the_batches_in_order(tiny: Path) -> None:
    model = gg.load_model(tiny)
    t, by_hand = (model.trainer(gg.SGD(lr=0.1)) for _ in range(2))
    seen: list[Progress] = []
    (first, second) = t.fit(TEXTS, None, 2, n_batch=3, seed=1, callback=seen.append)
    batches = Batches([Example(x, [1] * len(x)) for x in TEXTS], 3, 1)
    losses = [by_hand.step([e.ids for e in batches[i]]) for i in range(6)]
    assert [p.loss for p in seen] == losses
    counts = [sum(len(e.ids) - 1 for e in batches[i]) for i in range(3)]
    assert first.loss == pytest.approx(np.average(losses[:3], weights=counts), rel=1e-9)
    assert (second.number, second.n_steps, second.val) == (2, 6, {})


def test_a_trainer_holds_texts_back_and_goes_on(tiny: Path, tmp_path: Path) -> None:
    model = gg.load_model(tiny)

    def fit(**more: Any) -> tuple[list[Epoch], bytes]:
        t = model.trainer(gg.AdamW(lr=0.02), gg.LoRA(r=2), n_ubatch=2)
        epochs = t.fit(TEXTS, [[1] * len(x) for x in TEXTS], 2, 0.3, 3, **more)
        return epochs, b"".join(w.tobytes() for w in t.params.values())

    def kill(p: Progress) -> None:
        if p.step == 3:
            raise KeyboardInterrupt

    whole = fit()
    assert whole[0][1].val_loss < whole[0][0].val_loss
    with pytest.raises(KeyboardInterrupt):
        fit(state=tmp_path / "s", callback=kill)
    assert repr(fit(resume=tmp_path / "s")) == repr(whole)
    for t, text in (
        (model.trainer(gg.AdamW(lr=0.02), gg.LoRA(r=2, alpha=3), n_ubatch=2), "train was .*16.* is .*3"),
        (model.trainer(gg.AdamW(lr=0.02), gg.LoRA(r=2)), "n_ubatch was 2 there, and is null here"),
    ):
        with pytest.raises(StateError, match=text):
            t.fit(TEXTS, None, 2, 0.3, 3, resume=tmp_path / "s")
    with pytest.raises(StateError, match="texts was"):
        model.trainer(gg.AdamW(lr=0.02), gg.LoRA(r=2), n_ubatch=2).fit(TEXTS[1:], resume=tmp_path / "s")


def test_bad_texts_are_named_before_the_first_step(tiny: Path) -> None:
    t = gg.load_model(tiny).trainer(gg.SGD(), n_ctx=16)
    cases: list[tuple[tuple[Any, ...], str]] = [
        (([],), "at least one sequence"),
        ((3,), "a batch is a list of texts"),
        (([3],), "sequence 0 is 3"),
        (([[1, 2], [1, 300]],), "sequence 1 has the token 300, outside of the vocabulary of 259"),
        (([[1, 2], [1] * 17],), "sequence 1 has 17 tokens, more than the n_ctx = 16"),
        (([[1, 2]], [[1]]), "sequence 0 has 2 tokens, its mask is of shape"),
        (([[1, 2]], [[0, 0]]), "leave no prediction"),
        (([[1, 2]], None, -1), "epochs must be a positive number"),
        (([[1, 2]], None, 1, 0.5), "leaves none for one of the two parts"),
        (([[1, 2]], None, 1, 0, 0), "n_batch must be a whole number from 1"),
    ]
    for args, text in cases:
        with pytest.raises(GGMLError, match=text):
            t.fit(*args)
    assert t.n_steps == 0


@pytest.mark.parametrize("more", [{}, {"n_ubatch": 3, "clip": 1.0}], ids=str)
@pytest.mark.parametrize("dtype", [gg.BF16, gg.F16])
def test_parameters_of_16_bits_have_copies_in_f32(dtype: gg.DType, more: dict[str, Any], tmp_path: Path) -> None:
    """Steps too small for 16 bits add up; a state holds the copies."""
    start = np.array([[1.0, -2.0, 0.5, 3.0]])
    data = gg.Dataset(np.random.default_rng(1).standard_normal((24, 4)).astype(np.float32))

    def trained(kind: gg.DType, epochs: int, **options: Any) -> tuple[gg.Tensor, list[Epoch]]:
        w = gg.Context().from_numpy(start, kind, name="w").set_param()
        loss_of = lambda x: gg.sqr(gg.mul_mat(gg.cast(w, gg.F32), x) - 1.0).mean()  # noqa: E731
        return w, gg.fit(loss_of, data, gg.AdamW(1e-3), epochs, n_batch=6, **more, **options)

    (full, _), (w, _) = trained(gg.F32, 5), trained(dtype, 5, state=tmp_path / "s")
    assert w.dtype is dtype and not np.array_equal(np.asarray(w.numpy(), np.float32), start)
    want = gg.eval(gg.cast(full, dtype)).astype(np.float32)
    assert np.abs(np.asarray(w.numpy(), np.float32) - want).max() <= 2.0**-8 * 3  # a unit of the last place
    again, _ = trained(dtype, 10, resume=tmp_path / "s")
    whole, _ = trained(dtype, 10)
    assert again.tobytes() == whole.tobytes()


def test_too_little_memory_for_a_fit_is_told_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    w = gg.Context().new_tensor(gg.BF16, (1 << 20, 1 << 20), "w").set_param()

    def loss_of(x: gg.Tensor) -> gg.Tensor:
        return gg.cast(w, gg.F32).mean() + x.mean()

    with pytest.raises(gg.AllocError, match=r"fit: training of 1,099,511,627,776 numbers needs 12288\.0 GiB"):
        gg.fit(loss_of, gg.Dataset(np.ones((4, 1), np.float32)), gg.AdamW())
    line, asked = Line(), list[str]()
    monkeypatch.setattr("pyggml.learn.step_graph.check_free_memory", lambda size, what: asked.append(what))
    line.fit(1)
    assert asked and "graph of a batch" in asked[0]
