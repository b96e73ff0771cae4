"""`python -m pyggml.tools.measure.towers PYTHON [SHAPE ...]`: towers beside the transformers library in F32.

PYTHON is the interpreter of an environment with torch and transformers. For each shape (clip: CLIP ViT-L/14-336,
siglip: SigLIP so400m/14-384, qwen: 8 of the 32 layers of Qwen2.5-VL's tower on 504 x 504 pixels, whisper: the encoder
of Whisper small) it makes checkpoints with random weights in F32 and F16 in a temporary folder, and encodes one
picture, or 30 seconds of noise, in turns: each round starts every program once. It prints the median over the rounds of
each program's fastest time, its least CPU time, its memory, and how far its features are from transformers' (NMSE). On
a machine that others use, few layers (`--layers`) and CPU time tell more than the time that passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

ROUNDS, REPEATS, THREADS = 3, 3, 2
SHAPES: dict[str, dict[str, Any]] = {
    "clip": {
        "model_type": "clip_vision_model",
        "architectures": ["CLIPVisionModel"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "siglip": {
        "model_type": "siglip_vision_model",
        "architectures": ["SiglipVisionModel"],
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    },
    "qwen": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": 500,
        "vision_start_token_id": 498,
        "vision_end_token_id": 499,
        "video_token_id": 501,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "vocab_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 8,
            "hidden_size": 1280,
            "num_heads": 16,
            "intermediate_size": 3420,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7],
            "out_hidden_size": 64,
        },
    },
    "whisper": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 768,
        "encoder_layers": 12,
        "encoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_layers": 1,
        "decoder_attention_heads": 12,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 80,
        "vocab_size": 512,
        "pad_token_id": 500,
        "bos_token_id": 501,
        "eos_token_id": 502,
        "decoder_start_token_id": 503,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}
LAYERS = ("num_hidden_layers", "depth", "encoder_layers")  # keys of a config
PROCESSORS = {
    "clip": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    },
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}},
    "qwen": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 504 * 504},
    },
    "whisper": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80},
}
_MAKE = """
import sys, torch, transformers
folder, name, dtype = sys.argv[1:]
torch.manual_seed(0)
model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(folder))
model.to(getattr(torch, dtype)).save_pretrained(folder)
"""
_TORCH = """
import sys, numpy as np, torch, transformers
folder, name, threads, repeats, _ = sys.argv[1:]
torch.set_num_threads(int(threads))
model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
given = {k: torch.from_numpy(v) for k, v in np.load(folder + "/../given.npz").items()}
if name.startswith("Qwen"):
    grid = given["image_grid_thw"].long()
    run = lambda: model.model.visual(given["pixel_values"], grid_thw=grid)
elif name.startswith("Whisper"):
    run = lambda: model.model.encoder(given["input_features"])
else:
    run = lambda: model(given["pixel_values"])
no_grad = torch.no_grad()
no_grad.__enter__()
def features():
    out = run()
    if isinstance(out, torch.Tensor):
        return out.numpy()
    return getattr(out, "pooler_output" if name.startswith("Qwen") else "last_hidden_state").numpy()
"""
_OURS = """
import sys, numpy as np, pyggml as gg
from pyggml.llm.picture import sight
from pyggml.llm.sound import hearing
folder, name, threads, repeats, precision = sys.argv[1:]
model = gg.load_model(folder, precision=precision)
tower = (hearing if name.startswith("Whisper") else sight)(model).tower
given = dict(np.load(folder + "/../given.npz"))
run = lambda: tower.encode(given, int(threads))
features = lambda: run().features.rows
"""
_TIMES = """
import json, resource, time
best = [1e9, 1e9]
for i in range(int(repeats)):
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    best = [min(best[0], time.perf_counter() - wall), min(best[1], time.process_time() - cpu)]
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
found, file = np.asarray(features(), float).reshape(-1), folder + "/../expected.npy"
if "transformers" in sys.modules:
    np.save(file, found)
expected = np.load(file)
print(json.dumps([*best, memory, ((found - expected) ** 2).sum() / (expected**2).sum()]))
"""


_GIVEN = """
import sys, numpy as np, pyggml as gg
folder, name = sys.argv[1:]
rng, model = np.random.default_rng(0), gg.load_model(folder)
if name.startswith("Whisper"):
    from pyggml.llm.sound import hearing
    given = hearing(model).arrays(rng.standard_normal(480000).astype(np.float32))
else:
    given = model.process_image(rng.integers(0, 256, (504, 504, 3)).astype(np.uint8))
np.savez(folder + "/../given.npz", **given)
"""


def measured(python: str, program: str, folder: str, name: str, precision: str) -> list[float]:
    """Seconds, seconds of CPU, MiB of one process, and the NMSE of its features."""
    command = [python, "-c", program + _TIMES, folder, name, str(THREADS), str(REPEATS), precision]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(x) for x in json.loads(out.stdout.splitlines()[-1])]


def with_layers(config: dict[str, Any], n: int) -> dict[str, Any]:
    """The config of a tower with the first `n` layers; Qwen2.5-VL's has windows in all but the last of them."""
    inner = {k: with_layers(v, n) if k == "vision_config" else v for k, v in config.items()}
    changed = {**inner, **{k: n for k in LAYERS if k in config}}
    return {**changed, "fullatt_block_indexes": [n - 1]} if "fullatt_block_indexes" in config else changed


def main(python: str, shapes: list[str], n_layers: int | None) -> None:
    """Print a line for each program and shape."""
    for shape in shapes or list(SHAPES):
        config = SHAPES[shape] if n_layers is None else with_layers(SHAPES[shape], n_layers)
        name = str(SHAPES[shape]["architectures"][0])
        with tempfile.TemporaryDirectory() as top:
            folders = {dtype: os.path.join(top, dtype) for dtype in ("float32", "float16")}
            for dtype, folder in folders.items():
                os.mkdir(folder)
                for file, values in (("config", config), ("preprocessor_config", PROCESSORS[shape])):
                    with open(os.path.join(folder, f"{file}.json"), "w", encoding="utf-8") as f:
                        json.dump(values, f)
                subprocess.run([python, "-c", _MAKE, folder, name, dtype], check=True, capture_output=True)
            subprocess.run([sys.executable, "-c", _GIVEN, folders["float32"], name], check=True)
            programs = {
                "transformers F32": (python, _TORCH, folders["float32"], "exact"),
                "pyggml F32": (sys.executable, _OURS, folders["float32"], "exact"),
                "pyggml F16": (sys.executable, _OURS, folders["float16"], "exact"),
                "pyggml F16 fast": (sys.executable, _OURS, folders["float16"], "fast"),
            }
            found: dict[str, list[list[float]]] = {label: [] for label in programs}
            for _ in range(ROUNDS):
                for label, (interpreter, program, folder, precision) in programs.items():
                    found[label].append(measured(interpreter, program, folder, name, precision))
        for label, rows in found.items():
            wall, _, memory, error = np.median(rows, axis=0)
            cpu = min(row[1] for row in rows)
            times = f"{wall:6.2f} s, {cpu:6.2f} s of CPU"
            print(f"{shape:7s} {label:16s} {times}, {memory:5.0f} MiB, NMSE {error:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of an environment with torch and transformers")
    parser.add_argument("shapes", nargs="*", metavar="shape", help=f"{', '.join(SHAPES)} (default: all)")
    parser.add_argument("--layers", type=int, help="of each tower (default: all; Qwen2.5-VL 8)")
    given = parser.parse_args()
    if unknown := set(given.shapes) - set(SHAPES):
        parser.error(f"no shape is called {', '.join(sorted(unknown))}; known are {', '.join(SHAPES)}")
    main(given.python, given.shapes, given.layers)
