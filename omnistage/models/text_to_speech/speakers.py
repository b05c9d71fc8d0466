"""How each kind of model speaks: what is called, and what becomes of its result."""

from __future__ import annotations

from typing import Any

import torch

from omnistage.models.text_to_speech.synthesiser import Synthesiser, audible

_VITS_SCORE_BYTES = 40
"""For each pair of tokens and head: the scores of one layer, their relative positions, and copies of both. Measured:
38 with 2,049 tokens, 34 from there on."""


class Vits(Synthesiser):
    def memory_of(self, tokens: int) -> int:
        """Its encoder attends from every token to every other one in one piece; a character is two tokens."""
        return _VITS_SCORE_BYTES * int(self.model.config.num_attention_heads) * tokens**2

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        speaker = int(voice or 0) if self.model.config.num_speakers > 1 else None
        samples: torch.Tensor = self.model(**inputs, speaker_id=speaker).waveform
        return samples


class SpeechT5(Synthesiser):
    def __init__(self, model: Any, device: torch.device, vocoder: Any, speakers: dict[str, torch.Tensor]) -> None:
        super().__init__(model, device, vocoder.config.sampling_rate, vocoder)
        self._vocoder = vocoder
        self._speakers = speakers

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        speaker = self._speakers[voice or min(self._speakers)]
        samples: torch.Tensor = self.model.generate_speech(inputs["input_ids"], speaker, vocoder=self._vocoder)
        return samples


class Generated(Synthesiser):
    """Bark and MusicGen: `generate` gives samples."""

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        samples: torch.Tensor = self.model.generate(**inputs)
        return samples


class Coded(Synthesiser):
    """Dia and Higgs Audio: `generate` gives codes, which the processor decodes with its audio tokenizer."""

    def __init__(self, model: Any, device: torch.device, processor: Any, sample_rate: int) -> None:
        super().__init__(model, device, sample_rate, processor.audio_tokenizer)
        self._processor = processor

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        codes = self.model.generate(**inputs, return_dict_in_generate=False)
        return audible(self._processor.batch_decode(codes)[0])


class Latents(Synthesiser):
    """Pocket TTS and Phonon: `generate` gives latents, which the processor decodes with its audio tokenizer."""

    def __init__(self, model: Any, device: torch.device, processor: Any, sample_rate: int) -> None:
        super().__init__(model, device, sample_rate, processor.audio_tokenizer)
        self._processor = processor

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        output = self.model.generate(**inputs, return_dict_in_generate=True)
        return audible(self._processor.decode(output.audio_latents, output.audio_latents_mask)[0])


class VibeVoice(Synthesiser):
    """Decodes each latent as soon as it has it: speech comes as it is generated."""

    def __init__(self, model: Any, device: torch.device, sample_rate: int) -> None:
        super().__init__(model, device, sample_rate)
        model.model.audio_tower.decoder.register_forward_hook(self._decoded)

    def _decoded(self, module: torch.nn.Module, inputs: object, output: Any) -> None:
        del module, inputs
        samples = output if isinstance(output, torch.Tensor) else output[0]
        self.emit(samples[0].clone())

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        samples = audible(self.model.generate(**inputs, return_dict_in_generate=False)[0])
        return samples[..., :0]  # all of it is emitted already


class Seamless(Synthesiser):
    """SeamlessM4T: a voice is the code of a language; a text is spoken in the one that it is written in."""

    def __init__(self, model: Any, device: torch.device, default: str) -> None:
        super().__init__(model, device, model.config.sampling_rate)
        self._default = default

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        return audible(self.model.generate(**inputs, tgt_lang=voice or self._default)[0])
