"""Classifier-free guidance for text (Sanchez et al. 2023): away from what a negative prompt leads to."""

from __future__ import annotations

import numpy as np

from pyggml.types import Floats


def log_softmax(logits: Floats) -> Floats:
    """log(softmax(logits)) of one row."""
    x = logits - logits.max()
    return np.subtract(x, np.log(np.exp(x).sum(dtype=np.float64)), dtype=np.float32)


def guided(logits: Floats, negative: Floats, scale: float) -> Floats:
    """scale * (l - g) + g, with the log-probabilities l after the prompt and g after the negative prompt. Tokens that
    the prompt rules out (-inf) stay ruled out."""
    l, g = log_softmax(logits), log_softmax(negative)  # noqa: E741
    weights = np.array([scale, 1 - scale], np.float32)
    with np.errstate(invalid="ignore"):
        mixed = weights[0] * l + weights[1] * g
    return np.where(l == -np.inf, l, mixed)
