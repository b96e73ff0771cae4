"""`pyggml merge-lora`: a model with a LoRA adapter worked into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pyggml.gguf_io.split import open_model
from pyggml.learn.state_file import check_output
from pyggml.llm.adapters.merge import merge_lora
from pyggml.llm.model import load_model

from .command import Argument, Option
from .split import Source, progress_of


def merge(
    source: Source,
    adapter: Annotated[Path, Argument(metavar="ADAPTER", help="LoRA adapter: GGUF, or a PEFT folder.")],
    out: Annotated[Path, Argument(metavar="OUT", help="GGUF file to write; it appears when it is complete.")],
    scale: Annotated[float, Option("--scale", help="How much the adapter counts.")] = 1.0,
) -> None:
    """Write a GGUF model with a LoRA adapter added to its weights. Quantised weights that it changes become F16."""
    check_output(out, source, adapter)
    with load_model(source, repack=False) as model:
        lora = model.load_lora(adapter)
        with progress_of("merge-lora") as told:
            merge_lora(open_model(source), lora, scale, out, told)
    print(f"{out}: {len(lora.pairs)} weights changed")
