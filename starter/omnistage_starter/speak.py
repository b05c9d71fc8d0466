"""Speech synthesis, a sentence at a time."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError, InternalError
from omnistage.core.family import LoadContext
from omnistage.core.types import AudioChunk, ModuleInput, ModuleOutput
from omnistage.engines.codec.module import Job, ModuleComponent
from omnistage_starter.text_to_speech import Voice

_THREADS = 1
"""A second of speech takes milliseconds on one core and the language model needs the others; with more threads the
same seed would give slightly different samples from machine to machine."""


class SpeechSynthesis(ModuleComponent):
    """Each piece of text is synthesised by itself; voices other than the default are loaded on first use."""

    def __init__(self, default: Voice) -> None:
        self._default = default
        self._voices = {default.name: default}

    @property
    def voices(self) -> tuple[str, ...]:
        return self._default.available

    def run(self, jobs: Sequence[Job]) -> list[AudioChunk | ModuleOutput]:
        return [self._synthesise(job) for job in jobs]

    def _synthesise(self, job: Job) -> AudioChunk:
        if not isinstance(job.payload, ModuleInput):
            raise InternalError(f"the speak stage takes a ModuleInput, not a {type(job.payload).__name__}")
        voice = self._voice(job.info.voice or self._default.name)
        return AudioChunk(voice.synthesise(job.payload.text, seed=job.params.seed or 0), voice.sample_rate)

    def _voice(self, name: str) -> Voice:
        if name not in self._voices:
            self._voices[name] = Voice(_THREADS, name)
        return self._voices[name]


def load_speak(context: LoadContext) -> SpeechSynthesis:
    """The voice named in `speak/voice.json` of the folder (`{"voice": NAME}`), else the package's default."""
    path = context.model.folder / "speak" / "voice.json"
    if not path.is_file():
        return SpeechSynthesis(Voice(_THREADS))
    name = read_json(path).get("voice")
    if not isinstance(name, str):
        raise CheckpointError(f'{path} names no voice; write {{"voice": NAME}}, or remove it')
    return SpeechSynthesis(Voice(_THREADS, name))
