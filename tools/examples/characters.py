"""Learn to write character by character, from scratch: python tools/examples/characters.py [FILE [STEPS]]"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import pyggml as gg
from pyggml.learn.loop import Progress

N_SEEN, N_EMBD, N_HIDDEN, N_BATCH = 16, 16, 256, 128
# Every character that the model knows; others are read as the last one.
ALPHABET = "\nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()[]{}<>=+-*/_`#%@ "


class Windows:
    """The examples of a text: N_SEEN characters, and the one after them."""

    def __init__(self, text: str) -> None:
        self._ids = np.array([ALPHABET.find(c) % len(ALPHABET) for c in text], np.int32)

    def __len__(self) -> int:
        return len(self._ids) - N_SEEN

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self._ids[i : i + N_SEEN], self._ids[i + N_SEEN]


class Characters:
    """Embeddings of the characters that are seen, a hidden layer, and scores of the next character (after Bengio et
    al., 2003)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.ctx, n = gg.Context(), len(ALPHABET)
        shapes = {"embd": (n, N_EMBD), "hidden": (N_HIDDEN, N_SEEN * N_EMBD), "out": (n, N_HIDDEN)}
        self.params: dict[str, gg.Tensor] = {}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape) * shape[1] ** -0.5
            self.params[name] = self.ctx.from_numpy(values.astype(np.float32), name=name).set_param()

    def logits(self, seen: gg.Tensor) -> gg.Tensor:
        """Ne [n_characters, n] of characters of ne [N_SEEN, n]."""
        n = seen.ne[1]
        x = gg.get_rows(self.params["embd"], gg.reshape_1d(seen, N_SEEN * n))
        x = gg.mul_mat(self.params["hidden"], gg.reshape_2d(x, N_SEEN * N_EMBD, n))
        return gg.mul_mat(self.params["out"], gg.gelu(x))

    def loss(self, seen: gg.Tensor, following: gg.Tensor) -> gg.Tensor:
        """In nats a character."""
        return gg.cross_entropy_ids(self.logits(seen), following)

    def write(self, begin: str, n: int, rng: np.random.Generator) -> str:
        """`begin`, and `n` characters after it, drawn at temperature 0.7."""
        with gg.Context() as ctx:
            seen = ctx.new_tensor(gg.I32, (N_SEEN, 1), "seen").set_input()
            p = gg.soft_max(gg.scale(self.logits(seen), 1 / 0.7)).set_output()
        graph, text = gg.Graph().build_forward_expand(p), begin.rjust(N_SEEN)
        for _ in range(n):
            ids = [[ALPHABET.find(c) % len(ALPHABET) for c in text[-N_SEEN:]]]
            gg.compute(graph, inputs={seen: np.array(ids, np.int32)})
            weights = p.numpy().reshape(-1).astype(np.float64)
            text += ALPHABET[rng.choice(len(ALPHABET), p=weights / weights.sum())]
        return text.lstrip()


def main(path: str | None = None, n_steps: str = "2000") -> None:
    """Train on a text (default: what Python's own help says), and print what the model writes."""
    if path is None:
        from pydoc_data.topics import topics

        text = " ".join(" ".join(topics.values()).split())
    else:
        text = Path(path).read_text(encoding="utf-8")
    rng = np.random.default_rng(0)
    model, data, steps = Characters(rng), gg.Dataset(Windows(text)), int(n_steps)
    losses: list[float] = []

    def note(progress: Progress) -> None:
        losses.append(progress.loss)
        if progress.step % (steps // 5) == 0:
            print(f"step {progress.step}: {np.mean(losses[-steps // 5 :]):.2f} nats a character")

    opt = gg.AdamW(lr=lambda step: 4e-3 * max(0.05, 1 - step / steps))
    gg.fit(model.loss, data, opt, steps * N_BATCH / len(data), n_batch=N_BATCH, callback=note)
    print(model.write("The ", 300, rng))


if __name__ == "__main__":
    main(*sys.argv[1:])
