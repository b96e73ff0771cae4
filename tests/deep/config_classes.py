"""What the transformers library's config classes say: writes `pyggml/hf/classes.json`, of each model_type the keys that
its code reads, with their defaults.

    python -m tests.deep.config_classes        # with transformers installed: makes the file anew
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from pyggml.hf.families import PAGES

FILE = Path(__file__).resolve().parents[2] / "pyggml" / "hf" / "classes.json"
# What no answer depends on, or what tensors tell by being there (biases): of training, of how things are computed, of
# other heads, of tokens, of what is returned.
# `deep_configs` varies these, too.
INERT = re.compile(
    r"dropout|drop$|bias$|^use_expert_bias|initializer|init_|_init|_token_id|_token_index|output_(router_logits|hidden|attentions)|aux_loss"
    r"|^z_loss|^use_cache$|^pretraining_tp$|^classifier_|^summary_|^sparse_pred|^is_(en)?decoder|^is_encoder_decoder$"
    r"|^dtype$|^transformers_version$|^architectures$|^return_dict$|^(id2label|label2id|problem_type)$|_in_fp32$"
    r"|^rescale_prenorm|^time_step_(max|floor|scale)$|^use_(mamba|associative)|chunk_size$|^num_logits_to_keep$"
    r"|^slow_but_exact$|^add_cross_attention$|^use_falcon_mambapy$|^reorder_and_upcast|^(input_|router_)?jitter|^router_jitter|cache_dtype$|^decoder_bias$"
    r"|^chunk_size_feed|^attn_(impl|type|uses_sequence_id)$|^model_type$|^_|^norm_type$|^deterministic|^(text|vision|audio)_config$|^mtp_|num_(mtp|nextn)|soft_tokens|^mm_tokens"
)
KEPT = ("router_jitter_noise", "decoder_start_token_id", "attention_chunk_size")  # but for these, which are read
_OLD_NAMES = ("mimo_v2_flash",)  # whose checkpoints have a `rope_theta`, which the library takes to be its default
_MASKS = ("tie_word_embeddings", "sliding_window", "attention_chunk_size", "layer_types")  # read by what all share


def defaults_of(cls: Any) -> dict[str, Any]:
    """The keys of a config class and its defaults. Of ropes what the class makes of nothing."""
    text = getattr(cls, "sub_configs", {}).get("text_config")
    if text is not None and "hidden_size" not in {f.name for f in dataclasses.fields(cls)}:
        return defaults_of(text)
    module = inspect.getmodule(cls)
    assert module is not None
    modeling = importlib.import_module(module.__name__.replace("configuration", "modeling"))
    source = re.sub(r'"""(.|\n)*?"""|#.*', "", inspect.getsource(module) + inspect.getsource(modeling))
    made = cls()
    config = inspect.getsource(cls)
    old = re.findall(r'kwargs\.(?:get|pop|setdefault)\(\s*"(\w+)"', config)  # keys that are no fields
    if "rope_parameters" in config:
        own = "def convert_rope_params_to_dict" in config and "super().convert_rope_params_to_dict" not in config
        own = own and cls.model_type not in _OLD_NAMES
        old += ["rope_scaling"] if own else ["rope_theta", "rope_scaling"]
    found: dict[str, Any] = {name: None for name in old if not INERT.search(name)}
    if "partial_rotary_factor" in source:
        found["partial_rotary_factor"] = None
    for f in dataclasses.fields(cls):
        if INERT.search(f.name) and f.name not in KEPT:
            continue
        if len(re.findall(rf"\b{f.name}\b", source)) < 2 and f.name not in _MASKS:
            continue
        name = cls.attribute_map.get(f.name, f.name)
        if f.name == "rope_parameters":
            found[name] = made.rope_parameters
        elif f.name == "attn_config":
            about = made.to_dict()[f.name]
            found |= {f"{f.name}.{k}": v for k, v in about.items() if not INERT.search(k)}
        elif f.default is not dataclasses.MISSING:
            found[name] = f.default
    return found


def main() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    classes: dict[str, Any] = {}
    for name in sorted(name for names in PAGES.values() for name in names):
        if name in CONFIG_MAPPING:
            classes[name] = dict(sorted(defaults_of(CONFIG_MAPPING[name]).items()))
    lines = (f"{json.dumps(name)}: {json.dumps(keys)}" for name, keys in classes.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
