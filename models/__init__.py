"""Model builders: hyperparameters, weights, the KV cache, building blocks, and one page per family of architectures.

An architecture of another package or of a notebook is a page there that calls `register_architecture`
(docs/own_architecture.md). How to add one to this package:

1. One line in PAGES: its `general.architecture` and the module of its page.
2. Its record in ARCHITECTURES of that page. A decoder that differs from Llama in what blocks are given is a
   `decoder(...)` in `plain.py`. A decoder with one part of its own (attention, network, or a whole layer) is a subclass
   of `PlainDecoder` that overrides that method, as in `apertus.py`, `deepseek2.py` and `arctic.py`. A model with
   another structure has a builder that reads top to bottom, as `llama.py` has.
3. The builder is the declaration of its tensors. It is run on shapes alone when a file is loaded: `b.linear`,
   `b.weight` and `b.optional` say which tensors the file must and may have, and their ne. Roles and keys are the gguf
   package's.
4. Hyperparameters that one family has are a subclass `XParams` of HParams in its page. `read` returns it:
   `read_hparams(XParams, r, own=r.integer(Keys...))`. The builder is `def build_x(b: Build[XParams])`, and
   `b.hparams` has that type; pyright compares the two when `Architecture` is made.
5. An input that only this model has is `b.input(name, type, ne, fill)` in its page, see `Build.input`.
6. What differs within a block becomes an argument of the block. No block knows the name of an architecture.
7. `tests/models/test_zoo.py` compares the logits with llama.cpp's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NamedTuple

from pyggml.errors import ModelError, nearest
from pyggml.graph import Graph

from .architecture import Architecture
from .blocks import Build
from .hparams import HParams
from .weights import ShapeOnlyWeights

PAGES = {  # general.architecture -> the module that describes it
    "afmoe": "windowed",
    "apertus": "apertus",
    "arcee": "plain",
    "arctic": "arctic",
    "arwkv7": "rwkv",
    "baichuan": "plain",
    "bailingmoe": "plain_moe",
    "bailingmoe2": "plain_moe",
    "bailingmoe3": "kimi_linear",
    "bert": "bert",
    "bloom": "plain_gpt",
    "chatglm": "plain",
    "codeshell": "plain_gpt",
    "cogvlm": "cogvlm",
    "cohere2": "windowed",
    "cohere2moe": "cohere2moe",
    "command-r": "plain_gpt",
    "dbrx": "plain_moe",
    "deci": "deci",
    "deepseek": "plain_moe",
    "deepseek2": "deepseek2",
    "deepseek32": "sparse",
    "deepseek4": "deepseek4",
    "dots1": "plain_moe",
    "dots3note": "dots3note",
    "dream": "plain",
    "ernie4_5": "plain_moe",
    "ernie4_5-moe": "plain_moe",
    "eurobert": "encoders",
    "exaone": "plain",
    "exaone-moe": "windowed",
    "exaone4": "windowed",
    "falcon": "plain_gpt",
    "falcon-h1": "falcon_h1",
    "gemma": "plain",
    "gemma2": "windowed",
    "gemma3": "windowed",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "gemma-embedding": "encoders",
    "glm-dsa": "sparse",
    "glm4": "plain",
    "glm4moe": "plain_moe",
    "glm5-next": "glm5_next",
    "gpt-oss": "gpt_oss",
    "gpt2": "plain_gpt",
    "gptj": "plain_gpt",
    "gptneox": "plain_gpt",
    "granite": "plain_moe",
    "granite_swa": "windowed",
    "granitehybrid": "granite_hybrid",
    "granitemoe": "plain_moe",
    "grok": "grok",
    "grovemoe": "grovemoe",
    "hrm_text": "hrm_text",
    "hunyuan-dense": "plain",
    "hunyuan-moe": "plain_moe",
    "hunyuan_vl": "plain",
    "hy_v3": "hy_v3",
    "hy_v4": "hy_v4",
    "internlm2": "plain",
    "jais": "plain_gpt",
    "jais2": "plain_gpt",
    "jamba": "jamba",
    "kimi-k3": "kimi_k3",
    "kimi-linear": "kimi_linear",
    "jina-bert-v2": "bert",
    "jina-bert-v3": "bert",
    "laguna": "windowed",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "llada": "plain",
    "llada-moe": "plain_moe",
    "llama": "llama",
    "llama4": "llama4",
    "maincoder": "plain",
    "mamba": "mamba",
    "mamba2": "mamba",
    "maple": "maple",
    "mellum": "plain_moe",
    "mimo2": "mimo2",
    "minicpm": "plain_moe",
    "minicpm3": "minicpm3",
    "minimax-01": "minimax01",
    "minimax-m2": "plain_moe",
    "minimax-m3": "sparse",
    "mistral3": "plain_moe",
    "mistral4": "deepseek2",
    "modern-bert": "encoders",
    "mpt": "plain_gpt",
    "muse-glimmer": "muse_glimmer",
    "nanbeige": "nanbeige",
    "nemotron": "plain_gpt",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "neo-bert": "encoders",
    "nomic-bert": "bert",
    "nomic-bert-moe": "bert",
    "olmo": "plain_gpt",
    "olmo2": "windowed",
    "olmoe": "plain_moe",
    "openelm": "plain",
    "orion": "plain_gpt",
    "paddleocr": "plain_moe",
    "pangu-embedded": "plain",
    "phi2": "plain_gpt",
    "phi3": "plain",
    "phimoe": "phimoe",
    "plamo": "plain",
    "plamo2": "plamo2",
    "plamo3": "plamo3",
    "pockettts": "plain_gpt",
    "qwen": "plain",
    "qwen2": "plain",
    "qwen2moe": "plain_moe",
    "qwen2vl": "plain",
    "qwen3": "plain",
    "qwen35": "qwen3next",
    "qwen35moe": "qwen3next",
    "qwen3moe": "plain_moe",
    "qwen3next": "qwen3next",
    "qwen3tts": "qwen3vl",
    "qwen3vl": "qwen3vl",
    "qwen3vlmoe": "qwen3vl",
    "qwen4exp": "qwen4exp",
    "refact": "refact",
    "rnd1": "plain_moe",
    "rwkv6": "rwkv",
    "rwkv6qwen2": "rwkv",
    "rwkv7": "rwkv",
    "seed_oss": "plain",
    "smallthinker": "smallthinker",
    "smollm3": "plain",
    "spark2_5": "windowed",
    "stablelm": "plain_gpt",
    "starcoder": "plain_gpt",
    "starcoder2": "plain_gpt",
    "t5": "t5",
    "t5encoder": "t5",
    "talkie": "talkie",
    "whisper": "whisper",
    "xverse": "plain",
}


ENTRY_POINTS = "pyggml.architectures"  # the group in which packages name the modules that register architectures


class _Registered(NamedTuple):
    architecture: Architecture
    module: str  # that registered it


_registered: dict[str, _Registered] = {}


def register_architecture(architecture: Architecture[Any]) -> None:
    """Let `load_model` read files of an architecture that pyggml does not have: those whose `general.architecture` is
    one of `architecture.names`.

    The module that registered a name may register it again, as a notebook does whose cell runs twice. Models that are
    loaded from then on get the new record. A package that lists such a module in its pyproject.toml is found by name,
    on the command line too. The module is imported when a file asks for the architecture:

        [project.entry-points."pyggml.architectures"]
        my-arch = "my_package.my_page"

    Raises ModelError for a name that pyggml or another module has taken, and for an argument that is no `Architecture`.
    """
    if not isinstance(architecture, Architecture):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"register_architecture takes an Architecture, not {architecture!r:.60}")
    module = str(sys._getframe(1).f_globals.get("__name__", "__main__"))  # pyright: ignore[reportPrivateUsage]
    names: tuple[object, ...] = architecture.names
    if not isinstance(names, tuple) or not names or not all(isinstance(n, str) and n for n in names):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"the names of an architecture must be a tuple of strings, not {names!r:.60}")
    for name in architecture.names:
        owner = "pyggml" if name in PAGES else _registered[name].module if name in _registered else module
        if owner != module:
            raise ModelError(f"the architecture {name!r} is {owner}'s: give yours ({module}'s) another name")
    _registered.update(dict.fromkeys(architecture.names, _Registered(architecture, module)))


def get_architecture(name: str) -> Architecture:
    """The architecture of that name. Raises ModelError naming those whose names are like it, and when the package that
    has it cannot be imported."""
    if name in PAGES:
        page: tuple[Architecture, ...] = import_module(f".{PAGES[name]}", __name__).ARCHITECTURES
        return next(a for a in page if name in a.names)
    if name not in _registered:
        _import_module_of(name)
    if name in _registered:
        return _registered[name].architecture
    known = [*PAGES, *_registered]
    near = ", ".join(nearest(name, known, 5, 0.5)) or "none"
    raise ModelError(
        f"the architecture {name!r} is not supported; of the {len(known)} that are, like it: {near}. "
        "One of your own: pyggml.register_architecture"
    )


def _import_module_of(name: str) -> None:
    """Import the modules that installed packages name for this architecture."""
    from importlib.metadata import entry_points  # slow to import, seldom needed

    for entry in entry_points(group=ENTRY_POINTS, name=name):
        try:
            entry.load()
        except Exception as e:
            raise ModelError(f"the architecture {name!r} is in {entry.value}, whose import failed: {e}") from e
        if name not in _registered:
            raise ModelError(f"{entry.value} is to register the architecture {name!r}, and does not")


def graph_of_hparams(
    hp: HParams,
    n_tokens: int,
    n_outputs: int = 1,
    n_ctx: int = 512,
    *,
    n_kv: int | None = None,
    flash_attn: bool = False,
    arch: str = "llama",
) -> Graph:
    """The graph of a model that needs no file: weights and cache have no memory. `n_kv` defaults to the whole cache.

    Raises ModelError, GraphError for sizes that do not fit.
    """
    architecture = get_architecture(arch)
    memory = architecture.new_memory(hp, n_ctx, flash_attn=flash_attn)
    sizes = tuple(c.size if n_kv is None else n_kv for c in memory.caches)
    return architecture.build(Build(hp, ShapeOnlyWeights(), memory, n_tokens, n_outputs, sizes))
