"""The families of checkpoints, by model_type. A page is imported when one of its types is met; it has `FAMILIES`."""

from __future__ import annotations

from importlib import import_module

from pyggml.errors import ModelError, nearest

from ..config import Config
from ..family import Family

PAGES = {  # page -> the model types in it
    "llama": (
        "apertus",
        "arcee",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "smollm3",
        "granitemoe",
        "granitemoeshared",
    ),
    "plain": (
        *("ernie4_5", "glm4", "hunyuan_v1_dense", "minicpm3", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3"),
        *("seed_oss", "starcoder2", "cohere", "cohere2", "exaone4", "nemotron", "jais2", "stablelm", "phi"),
        *("qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl", "qwen3_vl_text", "glm4v_text"),
        *("minicpmv", "minicpmo"),
    ),
    "gemma": (
        *("gemma", "gemma2", "gemma3_text", "gemma3", "gemma3n_text", "gemma3n"),
        *("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
    ),
    "gpt": ("gpt2", "gptj", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "mpt"),
    "moe": (
        *("afmoe", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss", "hunyuan_v1_moe", "llama4_text"),
        *("bailing_moe_v2", "llama4", "mimo_v2_flash", "minimax_m2", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
    ),
    "recurrent": (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2"),
        "nemotron_h",
    ),
    "linear": ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "kimi_linear", "minimax"),
    "encoders": ("bert", "eurobert", "modernbert", "nomic_bert", "roberta", "xlm-roberta"),
    "mla": ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    "t5": ("t5", "mt5", "umt5"),
    "whisper": ("whisper",),
}
_PAGE_OF = {name: page for page, names in PAGES.items() for name in names}


def find_family(c: Config) -> Family:
    """The family of a config. Raises ModelError for an unknown model_type, naming similar ones."""
    name = c.model_type
    if name not in _PAGE_OF:
        near = ", ".join(nearest(name, _PAGE_OF, 5, 0.5)) or "none"
        c.fail(f"the model_type {name!r} is not known; of the {len(_PAGE_OF)} that are, like it: {near}")
    classes = c.get("architectures", default=[])
    pages: list[tuple[Family, ...]] = [
        import_module(f".{page}", __name__).FAMILIES for page in (_PAGE_OF[name], "encoders")
    ]
    found = [f for page in pages for f in page if name in f.types]
    return next((f for f in found if f.cls in classes), found[0])  # encoders share types with decoders


def families_of_arch(arch: str) -> list[Family]:
    """The families that a GGUF with this architecture may belong to. Raises ModelError when there is no such family."""
    pages: list[tuple[Family, ...]] = [import_module(f".{page}", __name__).FAMILIES for page in PAGES]
    found = [family for page in pages for family in page if family.arch == arch]
    if not found:
        raise ModelError(f"no Hugging Face family is known of the architecture {arch!r}")
    return found
