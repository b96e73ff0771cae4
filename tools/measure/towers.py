"""`python -m pyggml.tools.measure.towers PYTHON [SHAPE ...]`: towers beside the transformers library in F32.

PYTHON is the interpreter of an environment with torch and transformers. For each shape (clip: CLIP ViT-L/14-336,
siglip: SigLIP so400m/14-384, qwen: Qwen2.5-VL's tower with 8 of its 32 layers on 504 x 504 pixels) it makes checkpoints
with random weights in F32 and F16 in a temporary folder, and encodes one picture in turns: each round starts every
program once. It prints the median over the rounds of each program's fastest time, its CPU time, and its memory.
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
}
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
}
_MAKE = """
import sys, torch, transformers
folder, name, dtype = sys.argv[1:]
torch.manual_seed(0)
model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(folder))
model.to(getattr(torch, dtype)).save_pretrained(folder)
"""
_TORCH = """
import sys, torch, transformers
folder, name, threads, repeats = sys.argv[1:]
torch.set_num_threads(int(threads))
model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
torch.manual_seed(0)
if name.startswith("Qwen"):
    grid = torch.tensor([[1, 36, 36]])
    patches = torch.randn(36 * 36, 1176)
    run = lambda: model.model.visual(patches, grid_thw=grid)
else:
    side = model.config.image_size
    pixels = torch.randn(1, 3, side, side)
    run = lambda: model(pixels)
no_grad = torch.no_grad()
no_grad.__enter__()
"""
_OURS = """
import sys, numpy as np, pyggml as gg
folder, _, threads, repeats = sys.argv[1:]
model = gg.load_model(folder)
picture = np.random.default_rng(0).integers(0, 256, (504, 504, 3)).astype(np.uint8)
run = lambda: model.encode_image(picture, n_threads=int(threads))
"""
_TIMES = """
import json, resource, time
best = (1e9, 1e9)
for i in range(int(repeats)):
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    best = min(best, (time.perf_counter() - wall, time.process_time() - cpu))
print(json.dumps([*best, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def measured(python: str, program: str, folder: str, name: str) -> list[float]:
    """Seconds, seconds of CPU, and MiB of one process."""
    command = [python, "-c", program + _TIMES, folder, name, str(THREADS), str(REPEATS)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(x) for x in json.loads(out.stdout.splitlines()[-1])]


def main(python: str, shapes: list[str]) -> None:
    """Print a line for each program and shape."""
    for shape in shapes or list(SHAPES):
        name = str(SHAPES[shape]["architectures"][0])
        with tempfile.TemporaryDirectory() as top:
            folders = {dtype: os.path.join(top, dtype) for dtype in ("float32", "float16")}
            for dtype, folder in folders.items():
                os.mkdir(folder)
                for file, values in (("config", SHAPES[shape]), ("preprocessor_config", PROCESSORS[shape])):
                    with open(os.path.join(folder, f"{file}.json"), "w", encoding="utf-8") as f:
                        json.dump(values, f)
                subprocess.run([python, "-c", _MAKE, folder, name, dtype], check=True, capture_output=True)
            programs = {
                "transformers F32": (python, _TORCH, folders["float32"]),
                "pyggml F32": (sys.executable, _OURS, folders["float32"]),
                "pyggml F16": (sys.executable, _OURS, folders["float16"]),
            }
            found: dict[str, list[list[float]]] = {label: [] for label in programs}
            for _ in range(ROUNDS):
                for label, (interpreter, program, folder) in programs.items():
                    found[label].append(measured(interpreter, program, folder, name))
        for label, rows in found.items():
            wall, cpu, memory = np.median(rows, axis=0)
            print(f"{shape:6s} {label:16s} {wall:6.2f} s, {cpu:6.2f} s of CPU, {memory:5.0f} MiB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of an environment with torch and transformers")
    parser.add_argument("shapes", nargs="*", metavar="shape", help=f"{', '.join(SHAPES)} (default: all)")
    given = parser.parse_args()
    if unknown := set(given.shapes) - set(SHAPES):
        parser.error(f"no shape is called {', '.join(sorted(unknown))}; known are {', '.join(SHAPES)}")
    main(given.python, given.shapes)
