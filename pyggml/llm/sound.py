"""What a model hears: features of a sound, by the tower that its folder has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError
from pyggml.media import Features
from pyggml.media.sound import RATE, Sound, SoundProcessor, read_sound, sound_processor
from pyggml.models.towers.hearing import SoundHParams
from pyggml.types import Floats

from .sense import sense
from .tower import LoadedTower, config_in_file

if TYPE_CHECKING:
    from .loaded import LoadedModel


class Hearing(NamedTuple):
    """The tower of a model that hears, and what makes its input of samples."""

    tower: LoadedTower
    processor: SoundProcessor

    def arrays(self, samples: Floats) -> dict[str, npt.NDArray[Any]]:
        """What the checkpoint's processor makes of a sound: `input_features`, float32 [n, n_mels, n_frames] (of
        Ultravox one, with as many frames as the sound has), and for a tower that hears the sound without the silence
        after it `feature_attention_mask`, int32 [1, n_frames]."""
        p = self.processor
        if self.tower.name == "qwen2a":
            own = np.arange(p.n_frames) < -(-min(len(samples), p.n_samples) // p.hop)
            return {**p(samples), "feature_attention_mask": own.astype(np.int32)[None]}
        if self.tower.name == "ultravox":
            whole = np.pad(samples, (0, -len(samples) % p.hop))
            return {"input_features": p.frames(whole)[None]}
        return {"input_features": p.parts(samples)} if self.tower.name == "voxtral" else dict(p(samples))


def hearing(model: LoadedModel) -> Hearing:
    """The tower of a model that hears, loaded when it is first asked for. Raises ModelError when there is none."""
    return sense(model, "audio", hearing_of)


def hearing_of(model: LoadedModel, tower: LoadedTower) -> Hearing:
    """A tower with the processor of its folder, or with the one that suits it. Taps and edits of the model see its
    graphs. Raises ModelError when the folder's processor does not suit it."""
    tower.watches = model.watches
    hp = tower.hparams
    assert isinstance(hp, SoundHParams), hp
    config: dict[str, Any] = {"feature_size": hp.n_mels}
    own = config_in_file(tower)
    if own:
        config |= own
    elif os.path.isdir(model.path):
        from pyggml.hf.parts import read_object

        config |= read_object(Path(model.path) / "preprocessor_config.json")
    processor = sound_processor(config)
    if (processor.n_mels, processor.n_frames) != (hp.n_mels, 2 * hp.n_pos):
        raise ModelError(
            f"{model.path}: preprocessor_config.json makes {processor.n_frames} frames of {processor.n_mels} features; "
            f"the tower hears {2 * hp.n_pos} of {hp.n_mels}"
        )
    return Hearing(tower, processor)


def encoder_keys(kv: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the tower in a Whisper's own file, from the file's keys."""
    said = {
        "embedding_length": "embedding_length",
        "projection_dim": "embedding_length",
        "max_pos_emb": "encoder_context_length",
        "attention.layer_norm_epsilon": "attention.layer_norm_epsilon",
        "hidden_activation": "hidden_activation",
        **{
            key: f"encoder.{key}"
            for key in ("block_count", "feed_forward_length", "attention.head_count", "num_mel_bins")
        },
    }
    found = {f"clip.audio.{key}": kv.get(f"whisper.{name}") for key, name in said.items()}
    found |= {"clip.has_audio_encoder": True, "clip.projector_type": "whisper"}
    return {key: value for key, value in found.items() if value is not None}


def sound_features(self: LoadedModel, sound: Sound, rate: int | None = None, n_threads: int | None = None) -> Features:
    """What the tower makes of a sound, on its way into the text. Arguments and errors are those of `encode_audio`."""
    h = hearing(self)
    return h.tower.encode(h.arrays(heard(sound, rate)), n_threads).features


def heard(sound: Sound, rate: int | None) -> Floats:
    """The samples of a sound, see `read_sound`. Those of an array are 16,000 in a second, or `rate`."""
    in_file = isinstance(sound, (str, os.PathLike, bytes, bytearray, memoryview))
    return read_sound(sound, RATE if rate is None and not in_file else rate)


def encode_audio(self: LoadedModel, sound: Sound, rate: int | None = None, n_threads: int | None = None) -> Floats:
    """float32 [n_tokens, n_embd]: what takes the places of a sound's tokens in the text; of Whisper, what its decoder
    attends to.

    sound  a path, the bytes of a file, or samples, see `pyggml.media.sound.read_sound`
    rate   how many samples make a second, for samples (16,000 when it is not given)

    Whisper and Qwen2-Audio hear the first 30 seconds, Voxtral and Ultravox all of it in parts of 30 seconds. Raises
    ModelError for a model that does not hear, MediaError for a sound that cannot be read, ShapeError for one that is
    too short.
    """
    return sound_features(self, sound, rate, n_threads).rows
