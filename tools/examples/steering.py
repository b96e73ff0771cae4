"""Read a direction off two kinds of text, and push along it: python tools/examples/steering.py [MODEL.gguf]"""

from __future__ import annotations

import sys

import numpy as np

import pyggml as gg

LAYER = 2
JOY = ("The princess laughed and danced and was happy", "They lived merrily and rejoiced at the wedding feast")
WOE = ("The princess wept and was very sad and alone", "They died in the dark wood of hunger and of cold")


def main(path: str | None = None, prompt: str = "The king saw his daughter and") -> None:
    """Print what follows the prompt without and with the direction added to the residual stream of a layer."""
    model = gg.load_model(path)

    def mean(texts: tuple[str, ...]) -> np.ndarray:
        with model.tap(f"l_out-{LAYER}") as t:
            for text in texts:
                model.new_context(n_ctx=64).decode(model.tokenize(text))
        return np.concatenate(t[f"l_out-{LAYER}"]).mean(axis=0)

    direction = mean(JOY) - mean(WOE)
    for strength in (0, 1, -1):
        with model.edit(f"l_out-{LAYER}", lambda x, s=strength: x + s * direction):
            print(f"{strength:+d}: {''.join(model.generate(prompt, 32, temp=0.0)).strip()!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
