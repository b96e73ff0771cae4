"""How many of the golden training curves are followed: the losses of 75 checkpoints while the transformers library
trains them in float64, by SGD and AdamW, and LoRA adapters of their q_proj and v_proj.

    python -m tests.golden.train_score [NAME | NAME/KIND ...]
"""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path

import numpy as np

import pyggml as gg
from pyggml.hf.folder import open_hf_folder
from pyggml.learn.trainer import Trainer

from ..conftest import shared_dir

GOLDEN = shared_dir() / "golden"
LIMIT = {"sgd": 1e-4, "adamw": 3e-3, "lora": 3e-3}  # of the relative difference of a loss
MODULES = ("q_proj", "v_proj")  # ends of names: of qkv_proj, too


def curves() -> list[str]:
    """NAME/KIND of all curves."""
    with np.load(GOLDEN / "train.npz") as z:
        return list(z.files)


def adapted(folder: Path) -> dict[str, str]:
    """The modules that the golden adapters are of, by the GGUF name of their weight."""
    found: dict[str, str] = {}
    for name, t in open_hf_folder(folder).tensors.items():
        for part in t.parts:
            module, weight, _ = part.source.name.rpartition(".weight")
            if weight and module.endswith(MODULES):
                found[name] = module.replace("backbone.", "model.")  # as the library calls it, whatever the file does
    return found


def trainer(name: str, kind: str) -> Trainer:
    """The trainer of a curve."""
    folder = GOLDEN / "hf" / name
    model = gg.load_model(folder, repack=False)
    if kind == "sgd":
        return model.trainer(gg.SGD(lr=0.02))
    if kind == "adamw":
        return model.trainer(gg.AdamW(lr=1e-3))
    modules = adapted(folder)

    def init(weight: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(modules[weight].encode()))
        return rng.standard_normal(shape) / np.sqrt(shape[-1])

    return model.trainer(gg.AdamW(lr=1e-2), gg.LoRA(r=4, alpha=8, targets=tuple(modules), init=init))


def difference(curve: str) -> float:
    """The largest relative difference of a loss to the golden one."""
    name, kind = curve.rsplit("/", 1)
    with np.load(GOLDEN / "train.npz") as z, np.load(GOLDEN / "hf" / "logits.npz") as logits:
        want, ids = z[curve], logits[f"{name}/tokens"].tolist()
    t = trainer(name, kind)
    got = [t.step([ids]) for _ in want]
    return float(np.abs(np.array(got) / want - 1).max())


def main() -> None:
    asked, good, names = sys.argv[1:], 0, curves()
    names = [c for c in names if not asked or c in asked or c.rsplit("/", 1)[0] in asked]
    for curve in names:
        start = time.perf_counter()
        try:
            off = difference(curve)
        except gg.GGMLError as e:
            print(f"--  {curve:28s} {' '.join(str(e).split())[:160]}", flush=True)
            continue
        ok = off <= LIMIT[curve.rsplit("/", 1)[1]]
        good += ok
        print(f"{'ok ' if ok else 'OFF'} {curve:28s} {off:.1e}  {time.perf_counter() - start:.2f} s", flush=True)
    print(f"{good} of {len(names)}")


if __name__ == "__main__":
    main()
