"""Speech of one-shot models over HTTP, with OpenAI's own client."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import soundfile

from omnistage.omni import AsyncOmni
from omnistage.server.service import ServedModel, Service
from tests.server.harness import Running, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from omnistage.models.text_to_speech import tiny

    folder = tmp_path_factory.mktemp("speech") / "vits"
    tiny.write(folder)
    omni = AsyncOmni(folder, progress=False)
    with serving(Service({"vits": ServedModel("vits", omni)})) as running:
        yield running
    omni.orchestrator.check_idle()
    omni.orchestrator.shutdown(False)


def speak(client: openai.OpenAI, text: str = "Hello there", voice: str = "1", seed: int = 3) -> np.ndarray:
    answer = client.audio.speech.create(
        model="vits", input=text, voice=voice, response_format="wav", extra_body={"seed": seed}
    )
    samples, rate = soundfile.read(io.BytesIO(answer.content))
    assert rate == 16_000
    return np.asarray(samples)


def test_a_seed_and_a_voice_give_the_same_speech_each_time(server: Running) -> None:
    client = server.client()
    first = speak(client)
    assert np.abs(first).max() > 0.01
    np.testing.assert_array_equal(first, speak(client))
    for other in (speak(client, seed=4), speak(client, voice="2")):
        assert len(other) != len(first) or np.abs(other - first).max() > 1e-3


def test_what_cannot_be_spoken_is_refused(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="voices: 0, 1, 2"):
        speak(client, voice="9")
    with pytest.raises(openai.BadRequestError, match="nothing in this text") as caught:
        speak(client, text="!?")
    assert caught.value.param == "input"
    with pytest.raises(openai.APIStatusError, match="over the limit of 4096"):
        speak(client, text="a" * 5000)
