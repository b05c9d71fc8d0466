"""The voice, a sentence at a time."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError, InternalError
from omnistage.core.family import LoadContext
from omnistage.core.types import AudioChunk, ModuleInput, ModuleOutput
from omnistage.engines.codec.module import Job, ModuleComponent
from omnistage_starter.speaking import Speaker

_THREADS = 1
"""A second of speech takes milliseconds on one core, the language model needs the others meanwhile, and with more of
them the same seed would sound a little different from machine to machine."""


class Voice(ModuleComponent):
    """Every piece of text is spoken by itself; other voices than the first are read when they are first asked for."""

    def __init__(self, speaker: Speaker) -> None:
        self._first = speaker
        self._speakers = {speaker.voice: speaker}

    @property
    def voices(self) -> tuple[str, ...]:
        return self._first.voices

    def run(self, jobs: Sequence[Job]) -> list[AudioChunk | ModuleOutput]:
        return [self._say(job) for job in jobs]

    def _say(self, job: Job) -> AudioChunk:
        if not isinstance(job.payload, ModuleInput):
            raise InternalError(f"a {type(job.payload).__name__} came to be spoken")
        speaker = self._speaker(job.info.voice or self._first.voice)
        return AudioChunk(speaker.say(job.payload.text, seed=job.params.seed or 0), speaker.sample_rate)

    def _speaker(self, voice: str) -> Speaker:
        if voice not in self._speakers:
            self._speakers[voice] = Speaker(_THREADS, voice)
        return self._speakers[voice]


def load_speak(context: LoadContext) -> Voice:
    """The voice that `speak/voice.json` of the folder names (`{"voice": NAME}`), else the package's own."""
    path = context.model.folder / "speak" / "voice.json"
    if not path.is_file():
        return Voice(Speaker(_THREADS))
    named = read_json(path).get("voice")
    if not isinstance(named, str):
        raise CheckpointError(f'{path} names no voice; write {{"voice": NAME}}, or remove it')
    return Voice(Speaker(_THREADS, named))
