"""What a family of diffusion models is to the engine: how it encodes a prompt, takes a step, decodes latents.

A pipeline has three stages, each with one of these components, each with only the weights that it needs:
`PromptEncoder` gives a `Condition`, `Denoiser` turns it into `Latents`, `LatentDecoder` makes pixels of those. All
tensors that pass between stages are without a batch dimension; the engine decides what shares a forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from omnistage.core.errors import InternalError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput, Modality
from omnistage.engines.adapters.library import NOTHING, Selection
from omnistage.engines.peak_memory import peak_bytes

Tensors = Mapping[str, Tensor]
Branch = Literal["positive", "negative"]


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One text to encode: the prompt, or what to keep away from. Equal jobs give equal tensors."""

    text: str
    images: tuple[np.ndarray, ...] = ()
    """For encoders that look at pictures too; `uint8 [h, w, 3]`."""
    options: tuple[Hashable, ...] = ()
    """Whatever else the result depends on. Only jobs with equal options are encoded together."""


class PromptEncoder(ABC):
    """Text encoders, and the VAE's encoder where the family takes pictures.

    `input_modalities` and `check` are read by any thread; the rest is called from the stage's loop.
    """

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All networks that it holds, for the memory plan."""
        return ()

    def planned_size(self) -> tuple[int, int, int]:
        """(width, height, frames) that the memory plan makes room for: the model's default."""
        return 1024, 1024, 1

    def encode_bytes(self, rows: int) -> int:
        """Peak memory of encoding this many texts, and a picture; asked on the meta device."""
        return 0

    @abstractmethod
    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        """Raise an `OmniError` naming the parameter if this can never run: sizes, missing or surplus pictures.

        Cheap: it runs before the request is admitted.
        """

    @abstractmethod
    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        """What must be encoded: the prompt first, then what guides away from it, if anything does."""

    @abstractmethod
    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        """Encode jobs of equal options in one forward, or as few as can be. The results are cached by the stage."""

    @abstractmethod
    def condition(self, payload: DiffusionInput, params: DiffusionParams, encoded: Sequence[Tensors]) -> Condition:
        """The whole condition from the encoded jobs (in their order): sizes resolved, input pictures encoded."""

    def close(self) -> None:  # noqa: B027  (most hold nothing that the garbage collector cannot free)
        """Release what the garbage collector cannot."""


@dataclass(slots=True, eq=False)
class Lane:
    """One picture (or video) on its way: a latent, a schedule, a step counter."""

    latents: Tensor
    """As the family's transformer takes them, without a batch dimension."""
    scheduler: Any
    """A diffusers scheduler of this lane's own, its timesteps set."""
    timesteps: Tensor
    """`[steps]`, on the device."""
    condition: Condition
    params: DiffusionParams
    tokens: int
    """Latent patches of one row: what a row costs of the batch budget."""
    step: int = 0
    adapters: Selection = NOTHING
    context: dict[str, Any] = field(default_factory=dict)
    """The family's own: whatever `open` wants to find again in `forward` and `advance`."""

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    @property
    def done(self) -> bool:
        return self.step >= self.steps


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row of a forward: a lane under its prompt, or under what guides away from it."""

    lane: Lane
    branch: Branch

    @property
    def tensors(self) -> Tensors:
        """The prompt's tensors for this branch."""
        condition = self.lane.condition
        if self.branch == "positive":
            return condition.positive
        return condition.negative if condition.negative is not None else {}

    @property
    def timestep(self) -> Tensor:
        """The lane's current timestep, a scalar on the device."""
        return self.lane.timesteps[self.lane.step]


class Denoiser(ABC):
    """A diffusion transformer and its schedule. Called from the stage's loop only, but for `tokens`.

    The engine's step for a lane: `rows`, `forward` (rows of equal `group`, of any lanes, together), then `advance`
    with the lane's predictions in the order of its rows.
    """

    transformer: nn.Module
    """What caches and `torch.compile` are applied to."""
    default_guidance: float = 1.0
    """Where a request does not say."""
    block_class: str | None = None
    """The class of the blocks to compile, where the network does not have them in lists of their own."""
    text_multiple: int = 1
    """Families that pad texts pad them to a multiple of this."""

    @property
    def transformers(self) -> tuple[nn.Module, ...]:
        """All of them, where a family has several experts."""
        return (self.transformer,)

    @property
    def adapter_pipeline(self) -> Any:
        """The class of diffusers that knows the formats of the model's adapters; None: there is none."""
        return None

    def step_bytes(self, rows: int, width: int, height: int, num_frames: int) -> int:
        """Peak memory of a forward over this many rows; asked on the meta device."""
        condition = self.planned_condition(width, height, num_frames)
        if condition is None:
            raise InternalError(f"{type(self).__name__} has no planned_condition")
        lane = self.open(condition, DiffusionParams(), torch.Generator())
        return peak_bytes(lambda: self.forward([Row(lane, "positive")] * rows))

    def planned_size(self) -> tuple[int, int, int]:
        """(width, height, frames) that a start prepares for: the model's default."""
        return 1024, 1024, 1

    def planned_condition(self, width: int, height: int, num_frames: int) -> Condition | None:
        """A condition of the usual shapes, all zeros, for the memory plan and the start; None: nothing is prepared."""
        return None

    def check(self, params: DiffusionParams) -> None:  # noqa: B027  (most parameters check themselves)
        """Raise an `OmniError` for parameters that this denoiser can never run with. Thread-safe and cheap."""

    @abstractmethod
    def tokens(self, width: int, height: int, num_frames: int) -> int:
        """Latent patches of one row of this size. Thread-safe."""

    @abstractmethod
    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        """Sample the noise from `generator` (on the CPU, so that every device starts alike) and set the schedule.

        The noise must be that of diffusers' pipeline with the same generator.
        """

    def rows(self, lane: Lane) -> Sequence[Row]:
        """The rows of the lane's current step: guided lanes have two."""
        if lane.condition.negative is None:
            return (Row(lane, "positive"),)
        return (Row(lane, "positive"), Row(lane, "negative"))

    def group(self, row: Row) -> Hashable:
        """What rows must have in common to share a forward: by default the shapes of all their tensors.

        A family whose transformer takes a mask may leave the text's length out and pad in `forward`.
        """
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(row.tensors.items()))
        shared = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(row.lane.condition.shared.items()))
        return tuple(row.lane.latents.shape), shapes, shared

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """One forward of the transformer over rows of one group; a prediction for each, without batch dimension.

        A family implements this, or `stacked` where all that its transformer reads is tensors: then the forward can be
        captured in a CUDA graph.
        """
        return self.unstacked(rows, self.predict(self.stacked(rows)))

    @property
    def capturable(self) -> bool:
        """Whether it has `stacked`."""
        return type(self).forward is Denoiser.forward

    def stacked(self, rows: Sequence[Row]) -> Tensors:
        """The transformer's arguments for rows of one group."""
        raise InternalError(f"{type(self).__name__} has neither forward nor stacked")

    def predict(self, inputs: Tensors) -> Tensor:
        """The transformer over `stacked` rows. It copies nothing from or to the host."""
        predicted: Tensor = self.transformer(**inputs, return_dict=False)[0]
        return predicted

    def unstacked(self, rows: Sequence[Row], predicted: Tensor) -> list[Tensor]:
        """A prediction for each row; what stands for input pictures behind a row's own patches is dropped."""
        return list(predicted[:, : len(rows[0].lane.latents)])

    def combine(self, lane: Lane, positive: Tensor, negative: Tensor) -> Tensor:
        """Classifier-free guidance."""
        scale = lane.params.guidance
        return negative + (self.default_guidance if scale is None else scale) * (positive - negative)

    def advance(self, lane: Lane, predictions: Sequence[Tensor]) -> None:
        """Take the step: guidance, then the scheduler. Sets `latents` and `step`."""
        prediction = self.combine(lane, *predictions) if len(predictions) == 2 else predictions[0]
        timestep, dtype = lane.timesteps[lane.step], lane.latents.dtype
        # The scheduler sees a batch of one, as in diffusers.
        options = self.step_options(lane)
        stepped = lane.scheduler.step(prediction[None], timestep, lane.latents[None], return_dict=False, **options)[0]
        lane.latents = stepped[0].to(dtype)
        lane.step += 1

    def step_options(self, lane: Lane) -> Mapping[str, Any]:
        """What else the lane's scheduler takes: the generator, where its steps add noise."""
        return {}

    def result(self, lane: Lane) -> Tensor:
        """What the decoder takes of a lane, finished or not."""
        return lane.latents

    def close(self) -> None:  # noqa: B027
        """Release what the garbage collector cannot."""


class LatentDecoder(ABC):
    """The VAE's decoder."""

    modality: Modality
    """IMAGE or VIDEO."""
    fps: float = 16.0
    """Of videos, where the request does not say."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All networks that it holds, for the memory plan."""
        return ()

    def decode_bytes(self, rows: int, width: int, height: int, num_frames: int) -> int:
        """Peak memory of decoding this many latents together; asked on the meta device."""
        return 0

    def group(self, latents: Tensor) -> Hashable:
        """What latents must have in common to be decoded together."""
        return tuple(latents.shape)

    @abstractmethod
    def decode(self, latents: Sequence[Tensor], *, width: int, height: int, num_frames: int) -> list[np.ndarray]:
        """Pixels of latents of one group: `uint8 [h, w, 3]`, or `[frames, h, w, 3]` for videos."""

    def close(self) -> None:  # noqa: B027
        """Release what the garbage collector cannot."""
