"""Sound of a diffusion model over HTTP: files with both channels, chat, the parameters of diffusion."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import openai
import pytest
import soundfile

from omnistage.core.params import DiffusionParams
from omnistage.omni import AsyncOmni, Omni
from omnistage.server.service import ServedModel, Service
from tests.server.harness import Running, serving

PROMPT = "rain on a roof"
SETTINGS = {"seed": 5, "steps": 3, "seconds": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omnistage.models.diffusers_pipeline import tiny

    made = tmp_path_factory.mktemp("sound") / "model"
    tiny.write(made)
    return made


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    with Omni(folder, device="cpu", dtype="float32", progress=False) as omni:
        [output] = omni.generate(PROMPT, DiffusionParams(**SETTINGS))
    assert output.audio is not None
    return output.audio.samples


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from omnistage.models.text_to_speech import tiny as vits

    voice = tmp_path_factory.mktemp("speech") / "vits"
    vits.write(voice)
    models = {"rain": AsyncOmni(folder, progress=False), "vits": AsyncOmni(voice, progress=False)}
    with serving(Service({name: ServedModel(name, omni) for name, omni in models.items()})) as running:
        yield running
    for omni in models.values():
        omni.orchestrator.check_idle()
        omni.orchestrator.shutdown(False)


def sound(server: Running, format: str = "wav", **extra: object) -> bytes:
    answer = server.client().audio.speech.create(
        model="rain",
        input=PROMPT,
        voice="",
        response_format=format,  # type: ignore[arg-type]
        extra_body={**SETTINGS, "voice": None, **extra},
    )
    return answer.content


def test_a_file_holds_both_channels(server: Running, wanted: np.ndarray) -> None:
    samples, rate = soundfile.read(io.BytesIO(sound(server, "wav")), dtype="float32")
    assert rate == 8000
    np.testing.assert_allclose(samples, wanted.clip(-1, 1), atol=1e-4)
    with av.open(io.BytesIO(sound(server, "flac"))) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    packed = np.concatenate([frame.reshape(-1) for frame in frames]).reshape(-1, 2)
    np.testing.assert_allclose(packed / 32767, wanted.clip(-1, 1), atol=1e-4)


@pytest.mark.parametrize("format", ["mp3", "opus", "aac"])
def test_other_formats_are_stereo_too(server: Running, format: str) -> None:
    with av.open(io.BytesIO(sound(server, format))) as container:
        assert container.streams.audio[0].layout.name == "stereo"
        frames = list(container.decode(audio=0))
    assert sum(frame.samples / frame.sample_rate for frame in frames) == pytest.approx(0.5, abs=0.2)


def test_bare_samples_are_mono(server: Running, wanted: np.ndarray) -> None:
    samples = np.frombuffer(sound(server, "pcm"), "<i2") / 32767
    np.testing.assert_allclose(samples, wanted.clip(-1, 1).mean(axis=1), atol=1e-4)


def test_chat_gives_sound(server: Running) -> None:
    """As long as the model has it: a chat has no fields for the parameters of diffusion."""
    answer = server.client().chat.completions.create(
        model="rain",
        messages=[{"role": "user", "content": PROMPT}],
        modalities=["audio"],  # type: ignore[list-item]
        extra_body={"audio": {"format": "wav"}},
    )
    audio = answer.choices[0].message.audio
    assert audio is not None
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio.data)), dtype="float32")
    assert rate == 8000
    assert samples.shape == (128 * 64, 2)


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ({"seconds": 400}, None, "longer than the model maximum"),
        ({"seconds": -1}, "seconds", "greater than 0"),
        ({"steps": 0}, "steps", "greater than or equal to 1"),
        ({"speed": 2}, "speed", "must be 1 for sound with several channels"),
    ],
)
def test_what_a_sound_cannot_have_is_refused(
    server: Running, extra: dict[str, object], param: str | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        sound(server, **extra)
    assert caught.value.param == param


def test_parameters_of_diffusion_are_refused_by_other_models(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="diffusion models that generate sound") as caught:
        server.client().audio.speech.create(model="vits", input="Hello", voice="1", extra_body={"steps": 3})
    assert caught.value.param == "steps"
