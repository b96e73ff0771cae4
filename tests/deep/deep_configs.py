"""Every key of every golden checkpoint's config is varied, one at a time, and what pyggml makes of the folder compared
with what the transformers library does in float64, with the same weights.

    python -m tests.deep.deep_configs [NAME ...]        # with transformers and torch installed

A line for each (checkpoint, key, value) that is not well, and the counts of each outcome:
honoured   the library's logits change, and ours with them
inert      neither changes
refused    the logits change, and the folder is refused by the key's name
needless   refused, though the library's logits do not change
unnamed    refused, by another name
loose      the library refuses the config, and pyggml does not
rough      as the library's, as far as F32 goes through many layers
WRONG      loaded, with other logits than the library's
"""

from __future__ import annotations

import collections
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import GGMLError
from pyggml.hf.config import Config
from pyggml.hf.families import find_family
from pyggml.llm.batch import Batch
from pyggml.llm.model import load_model

from ..conftest import shared_dir
from ..hf.variants import weights
from .config_classes import INERT

GOLDEN = shared_dir() / "golden" / "hf"
ACTIVATIONS = ("silu", "swish", "relu", "relu2", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "tanh", "nope")
OLD = {  # names of before, which classes still read
    "rope_theta": [500.0],
    "partial_rotary_factor": [0.5],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}],
    "rotary_emb_base": [500.0],
    "rotary_pct": [0.5],
    "rope_local_base_freq": [50.0],
    "global_rope_theta": [500.0],
    "local_rope_theta": [50.0],
    "sliding_window_pattern": [2],
    "global_attn_every_n_layers": [2],
    "full_attention_interval": [2],
    "first_k_dense_replace": [1, 2],
    "intermediate_size": [48],
    "linear_attn_config": [{"head_dim": 8, "num_heads": 3}],
    "n_embed": [32],
    "block_ff_dim": [96],
}
OLD_ROPES = [*OLD][:8]
_MADE = re.compile(r"inv_freq$|slope_rate$|_decay$")  # which follow from the config
GONE = "GONE"


def values_of(key: str, value: Any, config: dict[str, Any]) -> Iterator[Any]:
    """Other values of a key."""
    if key in ("architectures", "model_type", "transformers_version", "dtype"):
        return
    yield GONE
    if value is not None:
        yield None
    if "act" in key.split("_") or key in ("activation", "activation_function", "hidden_activation"):
        yield from (a for a in ACTIVATIONS if a != value)
    elif key == "feed_forward_proj":
        yield from ("relu", "gated-gelu", "gated-silu", "gated-relu", "gelu", "silu")
    elif key in ("rope_parameters", "rope_scaling"):
        yield from _ropes(value or {})
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        if not re.search("token", key):
            yield from sorted({value * 2, value + 1, value - 1, value // 2, 3, 8} - {value})
        else:
            yield value + 2
    elif isinstance(value, float):
        yield from (value * 2 + 0.125, value / 2)
    elif isinstance(value, list) and value:
        yield list(reversed(value))
        for each in sorted(set(map(str, value))):
            yield [next(v for v in value if str(v) == each)] * len(value)
        if isinstance(value[0], str) and "attention" in value[0]:
            yield ["sliding_attention" if i % 2 else "full_attention" for i in range(len(value))]
    elif isinstance(value, dict):
        for inner, v in value.items():
            yield from ({**value, inner: x} for x in values_of(inner, v, value) if x != GONE)
    elif isinstance(value, str):
        yield "nope"
    elif value is None:
        yield from (True, 4, 0.3)


def _ropes(rope: dict[str, Any]) -> Iterator[Any]:
    nested = [k for k, v in rope.items() if isinstance(v, dict)]
    for kind in nested:
        for other in _ropes(rope[kind]):
            yield {**rope, kind: other}
    if not nested:
        yield {**rope, "rope_theta": 500.0}
        yield {k: v for k, v in rope.items() if k != "rope_theta"}
        yield {**rope, "partial_rotary_factor": 0.5}
        yield {**rope, "rope_type": "linear", "factor": 2.0}
        yield {**rope, "rope_type": "dynamic", "factor": 2.0}
        yarn = {**rope, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        yield from (yarn, {**yarn, "attention_factor": 0.7}, {**yarn, "beta_fast": 8.0}, {**yarn, "truncate": False})
        yield {**yarn, "mscale": 0.7, "mscale_all_dim": 0.9}
        yield {**rope, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
            "original_max_position_embeddings": 64
        }
        yield {**rope, "rope_type": "nope"}


class Library:
    """The transformers library's answers, without its messages."""

    def __init__(self) -> None:
        import torch
        import transformers

        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity(logging.CRITICAL)
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(1)
        torch.Tensor.float = torch.Tensor.double  # norms and routers go through float32
        self.torch, self.transformers = torch, transformers

    def model(self, config: dict[str, Any]) -> Any:
        """A model of that config, with weights that follow from their names."""
        cls = getattr(self.transformers, config["architectures"][0])
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
            said = cls.config_class.from_pretrained(folder)
        said._experts_implementation = said._attn_implementation = "eager"
        model = cls(said).eval()
        seen: set[int] = set()
        with self.torch.no_grad():
            for name, p in sorted(model.state_dict().items()):
                if p.data_ptr() in seen or not p.is_floating_point() or _MADE.search(name):
                    continue
                seen.add(p.data_ptr())
                bits = weights(name.replace("model.", ""), list(p.shape)).astype(np.uint32) << 16
                a = bits.view(np.float32)
                a = np.log(np.abs(a) + 1) if name.endswith("A_log") else a
                p.copy_(self.torch.from_numpy(np.ascontiguousarray(a)).reshape(p.shape))
        return model

    def answer(self, model: Any, tokens: list[int]) -> np.ndarray:
        """Logits, or of encoders what they give of each token."""
        torch = self.torch
        model = model.to(torch.float64)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.tensor([tokens[::-1]])
        elif hasattr(model.config, "use_cache"):
            inputs["use_cache"] = False
        f32, torch.float32 = torch.float32, torch.float64
        try:
            with torch.no_grad():
                out = model(**inputs)
        finally:
            torch.float32 = f32
        found = out.logits if hasattr(out, "logits") else out.last_hidden_state
        return found[0].double().numpy()


def ours(folder: Path, tokens: list[int]) -> np.ndarray:
    """What pyggml makes of the folder."""
    model = load_model(folder, repack=False)
    if model.weights.unused:
        raise GGMLError(f"tensors without use: {sorted(model.weights.unused)[:2]}")
    if not model.architecture.logits:
        ctx = model.new_context(n_ctx=64)
        ctx.encode(tokens)
        return np.array(ctx.embeddings)
    ctx = model.new_context(n_ctx=64, n_batch=64, n_ubatch=64, type_k=DType.F32, type_v=DType.F32)
    if model.architecture.encode is not None:
        ctx.encode(tokens)
        tokens = tokens[::-1]
    batch = Batch()
    for i, token in enumerate(tokens):
        batch.add(token, i, [0], logits=True)
    ctx.decode(batch)
    return np.array(ctx.logits)


def _same(got: np.ndarray, want: np.ndarray, nmse: float = 1e-9) -> bool:
    return got.shape == want.shape and bool(((got - want) ** 2).sum() <= nmse * (want**2).sum())


class Checkpoint:
    """One golden checkpoint, whose config is varied."""

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, name
        self.config: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
        if "index_topk" in self.config:
            self.config["index_topk"] = 64  # with these weights scores are equal, and any of them may be taken
        self.tokens = [int(t) for t in np.load(GOLDEN / "logits.npz")[f"{name}/tokens"]]
        self.base = library.answer(library.model(self.config), self.tokens)

    def outcome(self, key: str, value: Any) -> tuple[str, str]:
        """What became of a variation, and what there is to say of it."""
        without = {key, "rope_parameters"} if key in OLD_ROPES else {key}  # an old config has no new names
        config = {k: v for k, v in self.config.items() if k not in without} | ({} if value == GONE else {key: value})
        if key == "use_sliding_window":
            config |= {"sliding_window": 8, "max_window_layers": 1, "layer_types": None}
        try:
            model = self.library.model(config)
            with tempfile.TemporaryDirectory() as path:
                folder = Path(path)
                model.save_pretrained(folder)
                (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
                want = self.library.answer(model, self.tokens)
                if not np.isfinite(want).all():
                    return "nonsense", ""
                inert = _same(want, self.base, 1e-18)
                try:
                    got = ours(folder, self.tokens)
                except GGMLError as e:
                    text = str(e).replace(path, "")
                    kind = "needless" if inert else "refused" if re.search(rf"\b{key}\b", text) else "unnamed"
                    return kind, text
                if not _same(got, want):
                    return "rough" if _same(got, want, 1e-6) else "WRONG", ""
                return "inert" if inert else "honoured", ""
        except Exception as e:  # whatever the library does of it
            return self._loose(config, f"{type(e).__name__}: {e}")

    def _loose(self, config: dict[str, Any], why: str) -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            for file in (GOLDEN / self.name).glob("*.safetensors*"):
                os.symlink(file, folder / file.name)
            (folder / "config.json").write_text(json.dumps(config))
            try:
                ours(folder, self.tokens)
            except GGMLError:
                return "neither", ""
            except Exception as e:
                return "CRASH", repr(e)
        return "loose", why[:100].replace("\n", " ")


def main(names: list[str]) -> None:
    library = Library()
    total: collections.Counter[str] = collections.Counter()
    for name in names or sorted(p.name for p in GOLDEN.iterdir() if p.is_dir()):
        try:
            checkpoint = Checkpoint(library, name)
        except Exception as e:
            print(f"{name}: the library has no such model: {e!r:.200}", flush=True)
            continue
        read = {*find_family(Config(".", checkpoint.config)).keys}
        keys = {**checkpoint.config, **{k: None for k in OLD if k not in checkpoint.config}}
        for key, value in keys.items():
            if INERT.search(key) and key not in read and os.environ.get("DEEP") is None:
                continue
            others = [*values_of(key, value, checkpoint.config)] if key in checkpoint.config else []
            for other in [*others, *OLD.get(key, [])]:
                kind, text = checkpoint.outcome(key, other)
                total[kind] += 1
                if kind in ("WRONG", "rough", "unnamed", "needless", "loose", "CRASH"):
                    print(f"{kind:9}{name:16}{key} = {other!r:.130}  {text:.200}", flush=True)
    print(dict(total))


if __name__ == "__main__":
    main(sys.argv[1:])
