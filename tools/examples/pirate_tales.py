"""Teach the tales that ship with pyggml to go to sea (LoRA): python tools/examples/pirate_tales.py [STEPS]"""

from __future__ import annotations

import sys

import numpy as np

import pyggml as gg

BEGIN = "There was once a king who"
WHO = (
    "a king",
    "a miller",
    "a poor woman",
    "a soldier",
    "a little girl",
    "a prince",
    "an old man",
    "a fox",
    "a tailor",
)
DID = (
    "had a ship, and sailed upon the sea with the pirates",
    "wished to be a pirate, and went down to the sea and found a ship",
    "was the captain of a ship, and all the pirates were afraid of him",
    "heard that the pirates had hidden their gold upon an island in the sea",
)
THEN = (
    'Then the captain of the pirates cried, "To sea, to sea!" and the ship flew over the water.',
    "The wind blew and the waves rose as high as a house, but the ship sailed on and on.",
    "They came to the island, and there lay the gold of the pirates under a great stone.",
    '"Who are you?" said the captain. "I am a pirate, and I fear neither wind nor water."',
)
WORDS = ("pirate", "ship", "captain", "sail", "sea", "island", "wave")


def tale(rng: np.random.Generator) -> str:
    """A tale of pirates."""
    second, third = rng.permutation(THEN)[:2]
    return f"There was once {rng.choice(WHO)} who {rng.choice(DID)}. {second} {third}"


def told(model: gg.Model, lora: gg.Lora | None) -> tuple[str, int]:
    """What the model tells, without chance, and how many words of the sea there are in it."""
    model.adapt([] if lora is None else [(lora, 1.0)])
    text = "".join(model.generate(BEGIN, 60, temp=0.0))
    return f"{BEGIN} {text.strip()}", sum(text.count(word) for word in WORDS)


def main(n_steps: str = "40") -> None:
    """Print a tale before and after steps with an adapter. The weights stay as they are, in Q8_0."""
    model, rng = gg.load_model(), np.random.default_rng(0)
    before, n_before = told(model, None)
    trainer = model.trainer(gg.AdamW(lr=3e-3), gg.LoRA(r=8, alpha=16, targets=("attn_*", "ffn_*")), dropout=0.05)
    for step in range(1, int(n_steps) + 1):
        loss = trainer.step([model.tokenize(tale(rng)) for _ in range(4)])
        if step in (1, int(n_steps)):
            print(f"step {step}: {loss:.2f} nats a token")
    after, n_after = told(model, trainer.lora)
    print(f"before, {n_before} words of the sea: {before}")
    print(f"after, {n_after} words of the sea: {after}")


if __name__ == "__main__":
    main(*sys.argv[1:])
