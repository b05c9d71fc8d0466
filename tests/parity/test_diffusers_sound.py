"""Sound of diffusers pipelines equals that of diffusers itself, sample by sample; videos keep theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from omnistage import DiffusionParams, Omni
from omnistage.core.errors import InvalidRequestError, UnsupportedModelError
from omnistage.core.types import Modality
from omnistage.models._diffusers.loading import diffusers
from omnistage.models.diffusers_pipeline import tiny
from omnistage.models.diffusers_pipeline.sounds import sample_rate_of, sound_of
from tests import small_sound

PROMPT = "rain on a roof"
Write = Callable[[Path], None]


def reference(name: str, folder: Path, **arguments: object) -> object:
    pipe = getattr(diffusers(), name).from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe(**arguments, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("name", "write", "length", "seconds", "channels"),
    [
        ("StableAudioPipeline", tiny.write, "audio_end_in_s", 0.5, 2),
        ("AudioLDMPipeline", small_sound.write_audioldm, "audio_length_in_s", 0.05, 1),
        ("AudioLDM2Pipeline", small_sound.write_audioldm2, "audio_length_in_s", 0.05, 1),
        ("DanceDiffusionPipeline", small_sound.write_dance_diffusion, "audio_length_in_s", 0.1, 2),
    ],
)
def test_samples_are_those_of_diffusers(
    tmp_path: Path, name: str, write: Write, length: str, seconds: float, channels: int
) -> None:
    write(tmp_path / "model")
    params = DiffusionParams(steps=3, seed=5, seconds=seconds)
    with Omni(tmp_path / "model", dtype="float32", device="cpu", progress=False) as omni:
        assert set(omni.modalities) == {Modality.AUDIO}
        [sound, again, other] = omni.generate([PROMPT] * 3, [params, params, params.model_copy(update={"seed": 6})])
    arguments = {"num_inference_steps": 3, length: seconds}
    if name != "DanceDiffusionPipeline":  # which takes no text
        arguments["prompt"] = PROMPT
    wanted = np.asarray(reference(name, tmp_path / "model", **arguments).audios[0])  # type: ignore[attr-defined]
    assert sound.audio is not None
    assert sound.audio.channels == channels
    assert sound.audio.samples.std() > 0
    np.testing.assert_array_equal(sound.audio.samples, wanted.T)
    np.testing.assert_array_equal(sound.audio.samples, again.audio.samples)
    assert not np.array_equal(sound.audio.samples, other.audio.samples)
    assert sound.audio.seconds == pytest.approx(seconds, abs=0.01)
    assert sound.usage.steps == (1 if name == "DanceDiffusionPipeline" else 3)  # which tells no step


def test_a_video_keeps_its_sound(tmp_path: Path) -> None:
    small_sound.write_ltx2(tmp_path / "model")
    size = {"width": 32, "height": 32, "num_frames": 9}
    with Omni(tmp_path / "model", dtype="float32", device="cpu", progress=False) as omni:
        [output] = omni.generate("waves", DiffusionParams(steps=3, seed=5, n=2, **size))
    wanted = reference("LTX2Pipeline", tmp_path / "model", prompt="waves", num_inference_steps=3, **size)
    video, other = output.videos
    assert video.audio is not None
    np.testing.assert_array_equal(video.audio.samples, wanted.audio[0].numpy().T)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(video.frames, np.stack([np.asarray(frame) for frame in wanted.frames[0]]))  # type: ignore[attr-defined]
    assert not np.array_equal(video.audio.samples, other.audio.samples)
    # The rate for which LTX-2 draws them: at another one frames and sound would drift apart.
    assert video.fps == 24
    with av.open(str(video.save(tmp_path / "video.mp4"))) as container:
        assert container.streams.video[0].average_rate == 24
        assert container.streams.audio[0].rate == video.audio.sample_rate
        assert container.streams.audio[0].layout.name == "stereo"
        assert sum(1 for _ in container.decode(video=0)) == 9


def test_one_sound_a_request(tmp_path: Path) -> None:
    tiny.write(tmp_path / "model")
    with Omni(tmp_path / "model", dtype="float32", device="cpu", progress=False) as omni:
        with pytest.raises(InvalidRequestError, match="must be 1 for sound") as caught:
            omni.generate(PROMPT, DiffusionParams(n=2))
        assert caught.value.param == "n"
        with pytest.raises(InvalidRequestError, match="cannot run this: The total audio length requested"):
            omni.generate(PROMPT, DiffusionParams(steps=2, seconds=500))
        with pytest.raises(InvalidRequestError, match="does not support this parameter") as caught:
            omni.generate(PROMPT, DiffusionParams(width=64))
        assert caught.value.param == "width"


def test_pictures_have_no_length_in_seconds(checkpoint_of: Callable[..., Path]) -> None:
    with Omni(checkpoint_of("flux"), dtype="float32", device="cpu", progress=False) as omni:
        with pytest.raises(InvalidRequestError, match="generates no sound") as caught:
            omni.generate(PROMPT, DiffusionParams(seconds=1))
        assert caught.value.param == "seconds"


def test_a_rate_that_is_unknown_is_refused() -> None:
    class Silent:
        pass

    with pytest.raises(UnsupportedModelError, match="does not state the sample rate"):
        sample_rate_of(Silent())
    assert sound_of(Silent(), 8000) is None
