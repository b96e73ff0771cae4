"""Find features of a layer by a sparse autoencoder: python tools/examples/sparse_autoencoder.py [MODEL [STEPS]]"""

from __future__ import annotations

import sys

import numpy as np

import pyggml as gg

LAYER, N_FEATURES, N_BATCH, PENALTY = 3, 512, 128, 8.0
BEGINS = ("Once upon a time", "There was once a king", "In a great forest", "A fox", "The little girl", "By the sea")


def captured(model: gg.Model, layer: int) -> tuple[np.ndarray, list[str]]:
    """What comes out of a layer at the tokens of tales that the model tells, float32 [n, n_embd], and the tokens."""
    rows: list[np.ndarray] = []
    tokens: list[str] = []
    for i, begin in enumerate(BEGINS):
        ids = model.tokenize(begin + "".join(model.generate(begin, 200, temp=0.8, seed=i)))
        with model.tap(f"l_out-{layer}") as t:
            model.new_context(n_ctx=len(ids)).decode(ids)
        rows += t[f"l_out-{layer}"]
        tokens += [model.vocab.text(token) for token in ids]
    return np.concatenate(rows)[: len(tokens)], tokens


class Autoencoder:
    """Writes each row as a sum of a few directions: of N_FEATURES of them, most have the strength 0."""

    def __init__(self, n_embd: int, rng: np.random.Generator) -> None:
        self.ctx = gg.Context()
        directions = rng.standard_normal((N_FEATURES, n_embd)).astype(np.float32) / np.sqrt(n_embd)
        self.read = self.ctx.from_numpy(directions, name="read").set_param()
        self.bias = self.ctx.from_numpy(np.zeros(N_FEATURES, np.float32), name="bias").set_param()
        self.written = self.ctx.from_numpy(directions.T.copy(), name="written").set_param()

    def strengths(self, x: gg.Tensor) -> gg.Tensor:
        """How much of each direction there is in each row: ne [N_FEATURES, n]."""
        return gg.relu(gg.mul_mat(self.read, x) + self.bias)

    def loss(self, x: gg.Tensor) -> tuple[gg.Tensor, dict[str, gg.Tensor]]:
        """The mean square of what is missing, and a penalty for strengths, each as long as its direction makes it."""
        strengths = self.strengths(x)
        missing = gg.sqr(x - gg.mul_mat(self.written, strengths)).mean()
        lengths = gg.sqrt(gg.sqr(self.written).sum(axis=0))
        return missing + PENALTY * (strengths * lengths).mean(), {"missing": missing, "active": strengths > 0.0}


def main(path: str | None = None, n_steps: str = "400") -> None:
    """Train the autoencoder, and print for some features the tokens at which they are strongest."""
    rng, steps = np.random.default_rng(0), int(n_steps)
    rows, tokens = captured(gg.load_model(path), LAYER)
    x = ((rows - rows.mean(axis=0)) / rows.std(axis=0)).astype(np.float32)
    net, data = Autoencoder(x.shape[1], rng), gg.Dataset(x)
    opt = gg.AdamW(lr=lambda step: 2e-3 * max(0.05, 1 - step / steps))
    last = gg.fit(net.loss, data, opt, steps * N_BATCH / len(x), n_batch=N_BATCH)[-1]
    print(f"{len(x)} rows of layer {LAYER}: {1 - last.train['missing'].mean:.0%} of their variance is in the features")
    print(f"{last.train['active'].mean * N_FEATURES:.0f} of {N_FEATURES} features are active at a token")
    strengths = np.asarray(gg.eval(net.strengths(net.ctx.from_numpy(x))))
    rare = [f for f in range(N_FEATURES) if 5 < (strengths[:, f] > 0).sum() < len(x) / 8]
    for f in sorted(rare, key=lambda f: -strengths[:, f].max())[:8]:
        best: list[int] = np.argsort(-strengths[:, f])[:6].tolist()
        print(f"feature {f}: {' '.join(repr(tokens[i]) for i in best)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
