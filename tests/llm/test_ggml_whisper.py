"""whisper.cpp's model files: the same as the folder of the same weights; damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.errors import GGMLError, GGUFError, ModelError
from pyggml.hf.safetensors import open_folder
from pyggml.llm.model import Model, load_model

from ..random_whisper import ALPHABET, IDS, N_CTX, N_TEXT, N_VOCAB, D, sound, weights, write_whisper

ROLES = {
    "self_attn_layer_norm": "attn_ln",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "final_layer_norm": "mlp_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "embed_positions.weight": "positional_embedding",
    "embed_tokens": "token_embedding",
}


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    return int(e.value.code or 0)


def theirs(name: str) -> str:
    """OpenAI's name of a tensor."""
    name = name.removeprefix("model.").replace("layers", "blocks")
    for ours, other in ROLES.items():
        name = name.replace(ours, other)
    return name.replace("encoder.layer_norm", "encoder.ln_post").replace("decoder.layer_norm", "decoder.ln")


def ff(a: np.ndarray, name: str) -> np.ndarray:
    """The network is four times as wide as the embeddings: further rows of zeros change nothing."""
    if ".fc1." in name:
        return np.concatenate([a, np.zeros((4 * D - len(a), *a.shape[1:]), np.float32)])
    return np.pad(a, ((0, 0), (0, 4 * D - a.shape[1]))) if name.endswith("fc2.weight") else a


def file_of(tokens: list[bytes], tensors: dict[str, np.ndarray], n_vocab: int = N_VOCAB, n_layer: int = 2) -> bytes:
    out = struct.pack("<12i", 0x67676D6C, n_vocab, 1500, D, 4, n_layer, N_CTX, D, 4, 2, 80, 0)
    out += struct.pack("<2i", 80, 201) + bytes(4 * 80 * 201) + struct.pack("<i", len(tokens))
    out += b"".join(struct.pack("<i", len(t)) + t for t in tokens)
    for name, a in tensors.items():
        a = a.reshape(-1, 1) if name.endswith(("conv1.bias", "conv2.bias")) else a
        out += struct.pack("<3i", a.ndim, len(name), int(a.dtype == np.float16))
        out += struct.pack(f"<{a.ndim}i", *a.shape[::-1]) + name.encode() + a.tobytes()
    return out


TENSORS = {theirs(name): ff(a, name) for name, a in weights(0).items()}
TOKENS = [bytes([b]) for b in range(N_TEXT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = write_whisper(tmp_path_factory.mktemp("folder"), suppress_tokens=None, begin_suppress_tokens=None)
    return load_model(path, repack=False)


def test_it_is_the_folders_model(folder: Model, tmp_path: Path) -> None:
    (path := tmp_path / "ggml-tiny.bin").write_bytes(file_of(TOKENS, TENSORS))
    model, x = load_model(path, repack=False), sound(3.0, 2)
    np.testing.assert_allclose(model.encode_audio(x), folder.encode_audio(x), atol=1e-5)
    got, want = (m.transcribe(x, temperature=0.0) for m in (model, folder))
    assert got.segments and got.language == "de"  # the third language, which the folder calls fr
    assert [s.tokens for s in got.segments] == [s.tokens for s in want.segments]
    assert model.tokenize("Hi", False) == [72, 105] and got.text == want.text
    assert load_model(path, vocab_only=True).detokenize([72, 105]) == "Hi"
    assert load_model(path).transcribe(x, temperature=0.0).segments  # repacked


def test_tokens_of_several_bytes_have_merges(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-6], b"Hi", b" t", b"he", b" the", b"Hi the", b"\xc3\xa9"]
    del tokens[200:206]
    tokens += [bytes([b]) for b in range(200, 206)]
    (path := tmp_path / "a.bin").write_bytes(file_of(tokens, TENSORS))
    model = load_model(path, vocab_only=True)
    ids = model.tokenize("Hi the", False)
    assert [model.vocab.token_to_piece(i) for i in ids] == [b"Hi", b" the"]  # words are not merged


def test_half_precision(folder: Model, tmp_path: Path) -> None:
    half = {name: a.astype(np.float16) if a.ndim > 1 and "positional" not in name else a for name, a in TENSORS.items()}
    (path := tmp_path / "a.bin").write_bytes(file_of(TOKENS, half))
    x = sound(3.0)
    got, want = load_model(path).encode_audio(x), folder.encode_audio(x)
    assert ((got - want) ** 2).sum() / (want**2).sum() < 1e-4


def test_damaged_files(tmp_path: Path) -> None:
    whole, path = file_of(TOKENS, TENSORS), tmp_path / "a.bin"
    for cut in (4, 20, 60, 64620, 66000, 70000, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(GGMLError, match=r"a\.bin"):
            load_model(path)
    for at, value in ((4, -1), (4, 1 << 30), (20, 1 << 20), (40, 81), (48, 1 << 30), (52, -5)):
        path.write_bytes(whole[:at] + struct.pack("<i", value) + whole[at + 4 :])
        with pytest.raises(GGUFError, match=r"a\.bin"):
            load_model(path)
    for tensors, says in (
        ({**TENSORS, "encoder.other": TENSORS["decoder.ln.bias"]}, "not known"),
        ({**TENSORS, "other": TENSORS["decoder.ln.bias"]}, "not known"),  # has no parts
        ({**TENSORS, "encoder.blocks.\u0662.mlp_ln.bias": TENSORS["decoder.ln.bias"]}, "not known"),
        ({k: v for k, v in TENSORS.items() if k != "encoder.conv1.weight"}, "conv1d"),
        ({**TENSORS, "decoder.ln.weight": np.zeros(3, np.float32)}, "output_norm"),
    ):
        path.write_bytes(file_of(TOKENS, tensors))
        with pytest.raises(ModelError, match=says):
            load_model(path)
    path.write_bytes(whole)
    with pytest.raises(ModelError, match="take no ram"):
        load_model(path, ram="1GiB")
    path.write_bytes(file_of(TOKENS[:-1], TENSORS, N_VOCAB + 300))
    with pytest.raises(GGUFError, match="no places"):
        load_model(path)
    path.write_bytes(file_of([*TOKENS[:-1], b"ab" * 1000], TENSORS))  # merges would take time by the square of that
    with pytest.raises(GGUFError, match="has 2000 bytes; up to 256 are read"):
        load_model(path)


def test_gguf_and_the_way_back(folder: Model, tmp_path: Path) -> None:
    """A GGUF has decoder and encoder, whether a folder or a file of whisper.cpp became it; so has the folder that is
    made of it, with the names, shapes and values of the first one."""
    pair = [*TOKENS[:-1], b"Hi"]  # a vocabulary must have a merge
    (path := tmp_path / "a.bin").write_bytes(file_of(pair, TENSORS))
    first = Path(folder.path)
    source = write_whisper(tmp_path / "a")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].pop(ALPHABET[255])
    tokenizer["model"] |= {"vocab": tokenizer["model"]["vocab"] | {"Hi": 255}, "merges": ["H i"]}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    x, want = sound(1.0, 2), weights(0)
    for given, gguf in ((path, tmp_path / "of_file.gguf"), (source, tmp_path / "of_folder.gguf")):
        assert run("convert", given, gguf) == 0
        model = load_model(gguf, repack=False)
        assert not model.unused
        np.testing.assert_allclose(model.encode_audio(x), folder.encode_audio(x), atol=1e-5)
        back = gguf.with_suffix("")
        assert run("convert", "--hf", gguf, back) == 0
        made = open_folder(back)
        assert made.keys() == open_folder(first).keys()
        for name, a in want.items():
            found = made[name].stored()
            np.testing.assert_array_equal(found, ff(a, name) if given is path else a)
        said = json.loads((back / "generation_config.json").read_text())
        assert said["decoder_start_token_id"] == IDS["<|startoftranscript|>"]
    assert load_model(tmp_path / "of_file", repack=False).transcribe(x, temperature=0.0).segments
    assert run("convert", "--hf", path, tmp_path / "at_once") == 0
    assert open_folder(tmp_path / "at_once").keys() == open_folder(first).keys()
    assert run("convert", path, tmp_path / "q.gguf", "--type", "Q8_0") == 2
    config = json.loads((source / "config.json").read_text()) | {"use_weighted_layer_sum": True}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="use_weighted_layer_sum is True"):
        load_model(source)
