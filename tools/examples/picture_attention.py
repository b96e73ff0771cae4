"""Where does a model look? python tools/examples/picture_attention.py MODEL PICTURE [QUESTION [OUT.png]]

MODEL is a vision-language folder. The picture is drawn once for each layer, light where the last token of the question
looks. For models that see a picture as one grid (Qwen-VL, GLM-4V, LLaVA, Gemma 3 ...), not as several tiles.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from PIL import Image

import pyggml as gg
from pyggml.llm.generate.media_chat import MARKER, read_marked
from pyggml.llm.media_prompt import media_token
from pyggml.media import open_picture

HEIGHT = 256  # of each copy, in pixels


def looks(model: gg.Model, picture: str, question: str) -> np.ndarray:
    """The attention weights of the last token on the rows of the picture, the mean of all heads: float32 [n_layer,
    lines, columns]."""
    prompt = read_marked(model, MARKER + question, [picture])
    places = [i for i, token in enumerate(prompt.ids) if token == media_token(model)]
    with model.tap("kq_soft_max_ext-*") as t:
        model.new_context(len(prompt.ids)).decode(prompt)
    layers = [t[f"kq_soft_max_ext-{il}"][0][:, len(prompt.ids) - 1, places].mean(axis=0) for il in range(len(t))]
    grid = model.picture_features(picture).grid or (1, math.isqrt(len(places)), math.isqrt(len(places)))
    if math.prod(grid) != len(places):
        raise SystemExit(f"{picture}: {len(places)} rows are no grid of {grid[1]} x {grid[2]}")
    return np.array(layers).reshape(-1, *grid[1:])


def main(path: str, picture: str, question: str = " What is it?", out: str = "looks.png") -> None:
    """Draw the picture for each layer, side by side, and print where each looks most."""
    pixels = Image.fromarray(open_picture(picture))
    size = max(1, round(pixels.width * HEIGHT / pixels.height)), HEIGHT
    shown, copies = np.asarray(pixels.resize(size), np.float32), list[np.ndarray]()
    for il, weights in enumerate(looks(gg.load_model(path), picture, question)):
        light = Image.fromarray((weights / weights.max() * 255).astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
        copies.append(shown * (0.2 + 0.8 * np.asarray(light, np.float32)[..., None] / 255))
        line, column = divmod(int(weights.argmax()), weights.shape[1])
        print(f"layer {il}: {weights.sum():.0%} on the picture, most at line {line + 1}, column {column + 1}")
    Image.fromarray(np.concatenate(copies, axis=1).astype(np.uint8)).save(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
