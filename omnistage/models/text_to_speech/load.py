"""Which synthesiser runs a checkpoint, and the parts of it that lie in folders of their own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.hf import transformers
from omnistage.models.loading import Checkpoint, load_model, read_auto_config, read_generation_config
from omnistage.models.text_to_speech import speakers
from omnistage.models.text_to_speech.processor import SPEAKERS
from omnistage.models.text_to_speech.synthesiser import Synthesiser
from omnistage.models.text_to_speech.voices import default_language

_VOCODER = "vocoder"
"""Folder of SpeechT5's vocoder, inside the checkpoint's."""
_CODEC = "audio_tokenizer"
"""Folder of the model between codes or latents and samples, inside the checkpoint's."""


def load_synthesiser(context: LoadContext) -> Synthesiser:
    folder = context.model.folder
    config = read_auto_config(folder)
    name = (config.architectures or [""])[0]
    model: Any = load_model(
        getattr(transformers, name), config, Checkpoint(folder).tensors(), context.device, context.dtype, attention=None
    )
    if (settings := read_generation_config(folder)) is not None:
        model.generation_config = settings
    kind = config.model_type
    if kind == "vits":
        return speakers.Vits(model, context.device, config.sampling_rate)
    if kind == "speecht5":
        return _load_speecht5(model, context)
    if kind == "bark":
        return speakers.Generated(model, context.device, model.generation_config.sample_rate)
    if name.startswith("Musicgen"):
        if config.decoder.audio_channels != 1:
            raise UnsupportedModelError("MusicGen with two channels is not served; speech has one")
        return speakers.Generated(model, context.device, config.audio_encoder.sampling_rate)
    if kind in ("dia", "higgs_audio_v2", "pocket_tts", "gradium_phonon_tts"):
        codec = _load_codec(context)
        processor = load_processor(folder, codec)
        rate = int(getattr(codec.config, "sampling_rate", None) or codec.config.sample_rate)
        cls = speakers.Coded if kind in ("dia", "higgs_audio_v2") else speakers.Latents
        return cls(model, context.device, processor, rate)
    if kind == "vibevoice":
        return speakers.VibeVoice(model, context.device, int(load_processor(folder).feature_extractor.sampling_rate))
    if kind in ("seamless_m4t", "seamless_m4t_v2"):
        return speakers.Seamless(model, context.device, default_language(folder))
    raise UnsupportedModelError(f"{name} is not served as text to speech")


def load_processor(folder: Path, codec: Any = None) -> Any:
    """The checkpoint's processor around a model between codes and samples that is loaded already.

    transformers' own loading would fetch that model by the name in the configuration.
    """
    path = folder / "processor_config.json"
    settings = read_json(path) if path.is_file() else {}
    cls = getattr(transformers, str(settings.get("processor_class")), None)
    if cls is None:
        raise CheckpointError(f"{path} names no processor class of transformers; fetch the checkpoint again")
    places = inspect.signature(cls.__init__).parameters
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        extractor = transformers.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(f"no usable tokenizer or feature extractor in {folder}: {error}") from error
    options = {name: value for name, value in settings.items() if name in places and not isinstance(value, dict)}
    if "chat_template" in places:
        options["chat_template"] = tokenizer.chat_template
    if "audio_tokenizer" in places:
        options["audio_tokenizer"] = codec
    return cls(extractor, tokenizer, **options)


def _load_codec(context: LoadContext) -> Any:
    folder = context.model.folder
    place = folder / _CODEC
    path = folder / "processor_config.json"
    codec_name = read_json(path).get("audio_tokenizer") if path.is_file() else None
    where = codec_name.get("audio_tokenizer_name_or_path") if isinstance(codec_name, dict) else None
    if not (place / "config.json").is_file():
        raise CheckpointError(f"the model needs its audio tokenizer ({where or 'see its page'}): put it into {place}")
    config = read_auto_config(place)
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    if cls is None:
        raise CheckpointError(f"{place / 'config.json'} names no architecture of transformers; fetch it again")
    tensors = Checkpoint(place).tensors()
    try:
        return load_model(cls, config, tensors, context.device, context.dtype, attention=None)
    except ImportError as error:  # that of Higgs Audio needs torchaudio
        raise UnsupportedModelError(" ".join(str(error).split())) from error


def _load_speecht5(model: Any, context: LoadContext) -> speakers.SpeechT5:
    folder, config = context.model.folder, model.config
    vocoder = folder / _VOCODER
    if not (vocoder / "config.json").is_file():
        raise CheckpointError(f"SpeechT5 needs its vocoder (microsoft/speecht5_hifigan): put it into {vocoder}")
    settings = transformers.SpeechT5HifiGanConfig.from_pretrained(vocoder, local_files_only=True)
    tensors = Checkpoint(vocoder).tensors()
    hifigan = load_model(transformers.SpeechT5HifiGan, settings, tensors, context.device, context.dtype, attention=None)
    vectors = {name: vector.reshape(1, -1) for name, vector in load_file(folder / SPEAKERS).items()}
    wrong = [name for name, vector in vectors.items() if vector.shape[1] != config.speaker_embedding_dim]
    if wrong or not vectors:
        raise CheckpointError(f"{SPEAKERS} must hold vectors of {config.speaker_embedding_dim} numbers; check {wrong}")
    moved_tensors: dict[str, torch.Tensor] = {
        name: vector.to(context.device, context.dtype) for name, vector in vectors.items()
    }
    return speakers.SpeechT5(model, context.device, hifigan, moved_tensors)
