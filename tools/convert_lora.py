"""`pyggml convert --lora`: a PEFT adapter as the GGUF file that llama.cpp reads."""

from __future__ import annotations

from pathlib import Path

from pyggml.errors import ModelError
from pyggml.gguf_io.split import open_model, refuse_own_output, refuse_source
from pyggml.hf.folder import is_folder
from pyggml.hf.parts import read_object
from pyggml.llm.adapters.lora import Lora, save_lora
from pyggml.llm.adapters.peft import CONFIG
from pyggml.llm.model import load_model


def convert_lora(adapter: Path, out: Path, base: Path | None = None) -> Lora:
    """Write the adapter in a PEFT folder to `out`, and return it. `base`: the adapter's model, a GGUF file or a Hugging
    Face folder (default: the path that the adapter's config names, if it exists).

    Raises ModelError and GGUFError as loading the model and the adapter do.
    """
    if base is None:
        name = read_object(adapter / CONFIG).get("base_model_name_or_path")
        if not isinstance(name, str) or not Path(name).exists():
            raise ModelError(f"{adapter}: its base model {name!r} is not here: name a GGUF or folder of it (--base)")
        base = Path(name)
    for source in (adapter, base):
        refuse_source(source, out)
    if not is_folder(base):  # it may have several parts
        refuse_own_output(open_model(base), [str(out)])
    with load_model(base, repack=False) as model:
        lora = model.load_lora(adapter)
    save_lora(lora, out)
    return lora
