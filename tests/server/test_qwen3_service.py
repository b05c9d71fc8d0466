"""Qwen3-Omni behind the service: what clients do with Qwen2.5-Omni works with it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from omnistage.omni import AsyncOmni
from tests.server import test_transcriptions
from tests.server.harness import SERVE_LIMITS, make
from tests.server.test_chat_completions import (  # noqa: F401
    test_speech_streams_as_pcm,
    test_text_and_speech_from_a_picture,
)
from tests.server.test_realtime import (  # noqa: F401  (the same tests, with the model below)
    connection,
    held,
    omni,
    prompts,
    pytestmark,
    test_a_function_is_called_and_its_result_goes_on,
    test_a_response_is_cancelled_within_a_step,
    test_a_turn_that_is_heard_is_answered,
    test_sound_is_heard_when_it_is_committed,
    test_text_is_answered_with_speech_and_its_transcript,
    test_whoever_speaks_interrupts,
    test_whoever_speaks_interrupts_speech,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    folder = make("qwen3_omni_moe", tmp_path_factory.mktemp("served") / "omni")
    limits = (*SERVE_LIMITS, "thinker.max_tokens=48", "talker.max_tokens=40")  # random models never end by themselves
    made = AsyncOmni(folder, device="cpu", dtype="float32", overrides=limits, progress=False)
    yield {"omni": made}
    asyncio.run(made.shutdown(drain=False))


@pytest.fixture
def name() -> str:
    return "omni"


@pytest.mark.usefixtures("ending")
def test_a_recording_is_written_down_whole_and_streamed(client: openai.OpenAI) -> None:
    test_transcriptions.test_a_stream_gives_the_same_text(client)


def test_a_chat_is_answered_with_speech_in_the_voice_that_was_asked_for(client: openai.OpenAI) -> None:
    assert client.models.retrieve("omni").voices == ["Aiden", "Chelsie", "Ethan"]  # type: ignore[attr-defined]
    sounds = []
    for voice in ("aiden", "Aiden", "Chelsie"):
        answer = client.chat.completions.create(
            model="omni",
            messages=[{"role": "user", "content": "Hello"}],
            modalities=["text", "audio"],
            audio={"voice": voice, "format": "wav"},
            temperature=0,
            seed=3,
            max_completion_tokens=60,
            extra_body={"max_tokens": 6},
        )
        sound = answer.choices[0].message.audio
        assert sound is not None
        assert sound.transcript
        sounds.append(sound.data)
    assert sounds[0] == sounds[1] != sounds[2]


def test_a_text_is_spoken_while_its_sound_is_made(client: openai.OpenAI) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="omni", voice="ethan", input="Hello there.", response_format="pcm", extra_body={"seed": 1}
    ) as response:
        pieces = list(response.iter_bytes())
    samples = np.frombuffer(b"".join(pieces), dtype=np.int16)
    assert len(samples) == 40 * 1920 - 555
    assert np.abs(samples).max() > 300
