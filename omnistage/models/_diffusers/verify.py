"""Our components against the diffusers pipeline on the same checkpoint, noise and prompt."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from omnistage.core.errors import UnsupportedModelError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases
from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder
from omnistage.models._diffusers.loading import diffusers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

LATENT_TOLERANCE = 1e-4
PIXEL_TOLERANCE = 1 / 255

_ARGUMENTS = {
    "width": "width",
    "height": "height",
    "num_frames": "num_frames",
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "true_cfg_scale": "true_cfg",
    "negative_prompt": "negative_prompt",
    "max_sequence_length": "max_sequence_length",
    "strength": "strength",
    "controlnet_conditioning_scale": "control_scale",
}
"""Arguments of diffusers' pipelines, and the parameters of ours that they stand for."""

Kind = tuple[str, DiffusionInput, Mapping[str, object]]
"""A name, the input, and the parameters of a request."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request to draw one picture or video. `params.seed` must be set, `n` must be 1."""

    name: str
    payload: DiffusionInput
    params: DiffusionParams


@dataclass(frozen=True, slots=True, eq=False)
class DiffusionResult:
    """Final latents as the family's denoiser gives them, without batch dimension, and `uint8` pixels."""

    latents: Tensor
    pixels: np.ndarray


class DiffusersReference(ABC):
    """diffusers' own pipelines over one set of weights, in float32 on the CPU."""

    text_tokens: int | None = None
    """`max_sequence_length` of all `kinds` that do not set it; None: the pipeline's own."""

    def __init__(self, folder: Path, pipeline: str = "DiffusionPipeline", absent: Sequence[str] = ()) -> None:
        """`absent` are parts that the checkpoint lacks, which diffusers must be given as None."""
        cls = getattr(diffusers(), pipeline)
        options = {"dtype": torch.float32, "local_files_only": True}
        self.pipe = self._quiet(cls.from_pretrained(folder, **options, **dict.fromkeys(absent)))

    @classmethod
    def run(
        cls, runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None
    ) -> list[VerifyRow]:
        """A family's `verify`: latents and pixels of each case, compared."""
        check_cases(cases)
        return compare(runner, cls(runner.folder), cases, seed, progress)

    @abstractmethod
    def __call__(self, case: Case) -> DiffusionResult:
        """What diffusers draws for a case."""

    def cases(self, count: int, seed: int) -> list[Case]:
        """Small requests of every kind that the checkpoint takes, in turn."""
        kinds = self.kinds(seed)
        usual = {} if self.text_tokens is None else {"max_sequence_length": self.text_tokens}
        cases = []
        for number in range(count):
            name, payload, settings = kinds[number % len(kinds)]
            params = DiffusionParams.parse({**usual, **settings, "seed": seed + number})
            cases.append(Case(f"{name} {number + 1}", payload, params))
        return cases

    @abstractmethod
    def kinds(self, seed: int) -> Sequence[Kind]:
        """What `cases` are made of."""

    def variant(self, pipeline: str, leave_out: Sequence[str] = (), **settings: object) -> DiffusionPipeline:
        """Another pipeline class over the same parts."""
        parts = {name: part for name, part in self.pipe.components.items() if name not in leave_out}
        return self._quiet(getattr(diffusers(), pipeline)(**parts, **settings))

    def decode(self, latents: Tensor) -> np.ndarray:
        """Pixels of latents `[1, ...]` as the transformer gives them."""
        vae = self.pipe.vae
        decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return self.picture(decoded)

    def picture(self, decoded: Tensor) -> np.ndarray:
        """Pixels of what the VAE has decoded."""
        return to_uint8(self.pipe.image_processor.postprocess(decoded, output_type="np")[0])

    def video(self, decoded: Tensor) -> np.ndarray:
        """Frames of what the VAE has decoded."""
        return to_uint8(self.pipe.video_processor.postprocess_video(decoded, output_type="np")[0])

    @staticmethod
    def _quiet(pipe: DiffusionPipeline) -> DiffusionPipeline:
        pipe.set_progress_bar_config(disable=True)
        return pipe


class Recorder:
    """A `callback_on_step_end` that keeps the last latents."""

    latents: Tensor

    def __call__(self, _pipe: object, _step: int, _time: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        self.latents = tensors["latents"]
        return tensors


def call_arguments(pipe: DiffusionPipeline, params: DiffusionParams) -> dict[str, object]:
    """What a pipeline's `__call__` takes of the parameters that are set, with the generator of their seed."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    values = {name: getattr(params, field) for name, field in _ARGUMENTS.items() if name in parameters}
    generator = torch.Generator().manual_seed(params.seed or 0)
    return {"generator": generator, **{name: value for name, value in values.items() if value is not None}}


def to_uint8(pixels: np.ndarray) -> np.ndarray:
    """`uint8` of pixels in 0..1."""
    return (pixels * 255).round().astype(np.uint8)


def load_components(runner: ModelRunner) -> tuple[PromptEncoder, Denoiser, LatentDecoder]:
    """The three networks of a drawing pipeline, on no engine."""
    loaded = [runner.load_component(name) for name in runner.stage_names]
    encoder = next((part for part in loaded if isinstance(part, PromptEncoder)), None)
    denoiser = next((part for part in loaded if isinstance(part, Denoiser)), None)
    decoder = next((part for part in loaded if isinstance(part, LatentDecoder)), None)
    if encoder is None or denoiser is None or decoder is None:
        raise UnsupportedModelError(f"{runner.folder} is not a pipeline that encodes, denoises and decodes")
    return encoder, denoiser, decoder


@torch.inference_mode()
def drive(encoder: PromptEncoder, denoiser: Denoiser, decoder: LatentDecoder, case: Case) -> DiffusionResult:
    """Draw with the components alone, no engine: one request, one step after the other."""
    payload, params = case.payload, case.params
    encoder.check(payload, params)
    encoded = [encoder.encode([job])[0] for job in encoder.jobs(payload, params)]
    condition = encoder.condition(payload, params, encoded)
    lane = denoiser.open(condition, params, torch.Generator().manual_seed(params.seed or 0))
    while not lane.done:
        rows = denoiser.rows(lane)
        denoiser.advance(lane, [denoiser.forward([row])[0] for row in rows])
    latents = denoiser.result(lane)
    size = {"width": condition.width, "height": condition.height, "num_frames": condition.num_frames}
    return DiffusionResult(latents, decoder.decode([latents], **size)[0])


def rows_of(case: Case, ours: DiffusionResult, reference: DiffusionResult) -> list[VerifyRow]:
    """How far the two are apart."""
    if ours.latents.shape != reference.latents.shape or ours.pixels.shape != reference.pixels.shape:
        return [VerifyRow.judge(case.name, "shape", float("inf"), 0.0)]
    latents = float((ours.latents.float() - reference.latents.float()).abs().max())
    pixels = pixel_difference(ours.pixels, reference.pixels)
    return [
        VerifyRow.judge(case.name, "latents", latents, LATENT_TOLERANCE),
        VerifyRow.judge(case.name, "pixels", pixels, PIXEL_TOLERANCE),
    ]


def compare(
    runner: ModelRunner, reference: DiffusersReference, count: int, seed: int, progress: Progress | None
) -> list[VerifyRow]:
    """The reference's cases through our components and through diffusers one by one, then all at once on the engine.

    The engine's pictures are judged by their pixels: latents stay inside it.
    """
    cases, report = reference.cases(count, seed), progress or (lambda _what, _done: None)
    parts = load_components(runner)
    rows: list[VerifyRow] = []
    expected: list[DiffusionResult] = []
    for index, case in enumerate(cases):
        report(case.name, index / (count + 1))
        expected.append(reference(case))
        rows += rows_of(case, drive(*parts, case), expected[-1])
    report("all at once", count / (count + 1))
    del parts
    together = runner.draw([(case.payload, case.params) for case in cases])
    for case, pixels, reference_drawn in zip(cases, together, expected, strict=True):
        difference = pixel_difference(pixels, reference_drawn.pixels)
        rows.append(VerifyRow.judge(case.name, "pixels, all at once", difference, PIXEL_TOLERANCE))
    return rows


def pixel_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of `uint8` pixels, in 0..1; infinite where the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours.astype(np.int16) - theirs.astype(np.int16)).max()) / 255
