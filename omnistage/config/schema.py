"""The configuration as typed, frozen models: pipeline, deployment, limits.

Every model refuses unknown keys. Checks that need more than one stage are in `core.graph`.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from omnistage.config.arrays import BATCH, ArraySpec, are_batched, parse_specs
from omnistage.config.deployment import DeploymentConfig
from omnistage.config.quantize import Quantize
from omnistage.config.remote import RemoteStageConfig
from omnistage.config.scalars import (
    ConfigModel,
    Count,
    CountOrZero,
    DeviceName,
    PictureSize,
    Seconds,
    Size,
    SizeOrAuto,
    refuse_bool,
)
from omnistage.core.family import StageSettings
from omnistage.core.params import CodecParams, DiffusionParams, SamplingParams
from omnistage.core.types import Modality
from omnistage.core.validation import short_repr
from omnistage.media.limits import MediaLimits

# -------------------------------------------------------------------------------------------------- budgets


class ARBudget(ConfigModel):
    """Limits of an autoregressive stage."""

    max_batch_tokens: Count = Field(default=2048, description="Tokens computed in one step, over all requests.")
    max_running: Count = Field(default=64, description="Requests in the batch at once.")
    max_model_len: Count | None = Field(default=None, description="Longest sequence; null: as the model's config says.")
    block_size: Literal[8, 16, 32, 64] = Field(default=16, description="Tokens in one block of the KV cache.")
    kv_memory: SizeOrAuto = Field(default="auto", description="Size of the KV cache; auto: as the memory plan says.")
    kv_blocks: Count | None = Field(default=None, description="Blocks of the KV cache; overrides kv_memory.")
    kv_dtype: Literal["auto", "float8"] = Field(
        default="auto", description="Of keys and values; float8: half the memory of 16 bits; auto: the stage's dtype."
    )
    prefix_caching: bool = Field(default=True, description="Reuse the KV blocks of equal prompt beginnings.")
    ageing_steps: Count = Field(default=64, description="Steps of waiting that count as one priority level.")
    encoder_cache: Size = Field(default=256 * 2**20, description="Memory for the outputs of media encoders.")
    attention: Literal["auto", "sdpa", "triton"] = Field(default="auto", description="sdpa runs on every device.")
    experts: Literal["auto", "eager", "grouped_mm", "batched_mm"] = Field(
        default="auto",
        description="How a mixture of experts is computed; auto: our kernels and grouped_mm on CUDA, else a loop.",
    )
    cuda_graphs: bool = Field(default=True, description="Replay decode steps as CUDA graphs; only used on CUDA.")
    graph_batch_sizes: tuple[Count, ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64), description="Batch sizes to capture a graph for, ascending."
    )
    graph_prefill_tokens: tuple[Count, ...] = Field(
        default=(128, 256, 512, 1024), description="Tokens of small steps with prompts to capture graphs for; []: none."
    )
    sample_in_graph: bool = Field(
        default=True, description="Sample tokens inside the captured decode steps; only used with CUDA graphs."
    )
    compile: Literal["auto"] | bool = Field(
        default="auto", description="Compile the layers: slower start, faster steps; auto: large models on CUDA."
    )
    merge_linears: Literal["auto"] | bool = Field(
        default="auto",
        description="Compute layers over the same input as one product; auto: on CUDA, and where weights are packed.",
    )
    pack_weights: bool = Field(
        default=True,
        description="Keep weights in the layout of the CPU's kernels for few rows; only used on x86 in float32.",
    )
    torchscript: bool = Field(
        default=True, description="Run decode steps as TorchScript, without Python between operators; only on the CPU."
    )
    run_ahead: Literal["auto"] | bool = Field(
        default="auto", description="Launch a step before the last one's tokens are read; auto: on CUDA."
    )
    prefill_chunk: Count | None = Field(
        default=None, description="Maximum prompt tokens of one request in a step; null: as many as the batch takes."
    )

    @field_validator("graph_batch_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes:
            raise ValueError("name at least one batch size, or turn graphs off with cuda_graphs: false")
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"list each batch size once, ascending: {sorted(set(sizes))}")
        return sizes


class CodecBudget(ConfigModel):
    """Limits of a codec stage. A stage of a one-shot module reads `max_batch` alone."""

    max_batch: Count = Field(default=64, description="Chunks decoded in one forward.")
    max_batch_blocks: Count = Field(
        default=192, description="Blocks decoded in one forward, look-ahead included; a longer chunk runs alone."
    )
    max_running: Count = Field(default=64, description="Requests held at once.")
    first_chunk_blocks: Count = Field(default=1, description="Blocks in the first chunk: small means early audio.")
    max_chunk_blocks: Count = Field(
        default=8, description="Each chunk is as long as all before it, up to this many blocks."
    )
    lookahead_blocks: CountOrZero = Field(
        default=1,
        description="Blocks that must be known beyond those decoded; more is closer to the whole utterance, and later.",
    )
    max_hold_seconds: float = Field(
        default=3.0,
        ge=0.0,
        le=60.0,
        description="First sound is held back, at most so long after the first code, until more will follow in time.",
    )
    cuda_graphs: bool = Field(default=True, description="Replay forwards as CUDA graphs; only used on CUDA.")
    precision: Literal["auto", "float32", "tf32", "float16"] = Field(
        default="auto",
        description="Of large matrix products. auto: float16 on CUDA, float32 elsewhere or in a float32 deployment.",
    )
    early_vocoder: bool = Field(
        default=True, description="Use the look-ahead as the vocoder's right context: audio comes sooner."
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        default="auto", description="Of the transformer's layers; auto: triton on CUDA, torch elsewhere."
    )

    @model_validator(mode="after")
    def _chunks_grow(self) -> Self:
        if self.first_chunk_blocks > self.max_chunk_blocks:
            raise ValueError(
                f"first_chunk_blocks ({self.first_chunk_blocks}) must not exceed max_chunk_blocks "
                f"({self.max_chunk_blocks}); lower the first or raise the second"
            )
        return self


class DiffusionBudget(ConfigModel):
    """Limits of a diffusion stage. Each kind of stage reads some of them."""

    max_batch_tokens: Count = Field(
        default=65_536, description="Latent patches in one forward, guidance counted; a larger picture is refused."
    )
    max_batch: Count = Field(default=16, description="Rows in one forward: pictures, twice where guided.")
    max_running: Count = Field(default=16, description="Pictures being denoised at once.")
    ageing_steps: Count = Field(default=16, description="Steps of waiting that count as one priority level.")
    prompt_cache: Size = Field(default=256 * 2**20, description="Memory for the cache of encoded prompts.")
    tiling_pixels: CountOrZero = Field(
        default=2_000_000, description="Decode pictures with more pixels than this in tiles; 0: never."
    )
    cache: str | None = Field(default=None, max_length=100, description="A DiT cache, like first_block:0.1.")
    compile: Literal["auto"] | bool = Field(
        default="auto",
        description="Compile the transformer's blocks: slower start, faster steps; auto: large models on CUDA.",
    )
    cuda_graphs: bool = Field(
        default=True, description="Replay steps over few patches as CUDA graphs; only used on CUDA, without a cache."
    )
    warm_sizes: tuple[PictureSize, ...] = Field(
        default=(),
        max_length=8,
        description="Sizes like 512x512 that a start on CUDA prepares for; empty: the default size.",
    )


# --------------------------------------------------------------------------------------------------- stages


class _StageConfig(StageSettings):
    device: DeviceName | None = Field(default=None, description="null: the deployment's.")


class _QuantisedStageConfig(_StageConfig):
    quantize: Quantize | None = Field(
        default=None, description="Scheme of quantised weights, or a section with more settings; null: none."
    )

    @property
    def ranks(self) -> int:
        """Processes that run it."""
        return 1

    @model_validator(mode="after")
    def _quantises_alone(self) -> Self:
        if self.quantize is not None and self.ranks > 1:
            raise ValueError(f"quantize needs a stage in one process, and this one runs in {self.ranks}; remove one")
        return self


def _only(modality: Modality, output: Modality | None, engine: str) -> Modality | None:
    if output not in (None, modality):
        raise ValueError(f"{engine} stage outputs {modality}, not {output}; use {modality}, or null for no output")
    return output


Ranks = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=64)]


class ARStageConfig(_QuantisedStageConfig):
    """A stage on the autoregressive engine."""

    engine: Literal["autoregressive"]
    params: SamplingParams = Field(default_factory=SamplingParams)
    budget: ARBudget = Field(default_factory=ARBudget)
    tensor_parallel: Ranks = Field(
        default=1,
        description="Processes among which the model is divided, each with a GPU, from `device` on.",
    )

    @property
    def ranks(self) -> int:
        return self.tensor_parallel

    @field_validator("output")
    @classmethod
    def _is_text(cls, output: Modality | None) -> Modality | None:
        return _only(Modality.TEXT, output, "an autoregressive")


def _check_module_file(value: str) -> str:
    parts = PurePosixPath(value).parts
    if not value.endswith(".onnx") or value.startswith("/") or ".." in parts or re.search(r"[\\:\x00-\x1f]", value):
        raise ValueError(f"{short_repr(value)} is not a file of the model's folder; use a name like vocoder.onnx")
    return value


class ModuleAudio(ConfigModel):
    """The output of a module that is audio."""

    output: str = Field(description="Name of the output with samples in [-1, 1]; int16 is scaled.")
    sample_rate: Annotated[int, BeforeValidator(refuse_bool), Field(ge=1000, le=768_000)] = Field(
        description="Samples a second."
    )


class ModuleConfig(ConfigModel):
    """An ONNX file as a stage, with its inputs and outputs."""

    file: Annotated[str, AfterValidator(_check_module_file)] = Field(
        max_length=1000, description="An .onnx file inside the model's folder."
    )
    inputs: dict[str, str] = Field(description="Every input of the file, like `mel: float32[batch, 80, frames]`.")
    outputs: dict[str, str] = Field(description="Outputs to compute, like `wave: float32[batch, samples]`.")
    audio: ModuleAudio | None = Field(
        default=None, description="The output that is audio; null: the stage outputs arrays."
    )
    max_batch: Count = Field(
        default=1,
        description="Inputs of equal shapes in one run; over 1 every array has `batch` as its first dimension.",
    )
    threads: Count | None = Field(default=None, description="CPU threads; null: as many as torch_threads says.")

    @field_validator("inputs", "outputs")
    @classmethod
    def _readable(cls, arrays: dict[str, str]) -> dict[str, str]:
        if not arrays:
            raise ValueError("is empty; declare at least one array, like x: float32[batch, 80]")
        parse_specs(arrays)
        return arrays

    @model_validator(mode="after")
    def _fits(self) -> Self:
        specs = [*self.input_specs.values(), *self.output_specs.values()]
        if self.max_batch > 1 and not are_batched(specs):
            raise ValueError(
                f"max_batch is {self.max_batch}, but not every input and output has `{BATCH}` as its first dimension; "
                "declare it so, or leave max_batch out"
            )
        if self.audio is not None:
            _check_audio(self.audio.output, self.output_specs)
        return self

    @property
    def input_specs(self) -> dict[str, ArraySpec]:
        return parse_specs(self.inputs)

    @property
    def output_specs(self) -> dict[str, ArraySpec]:
        return parse_specs(self.outputs)


def _check_audio(name: str, outputs: dict[str, ArraySpec]) -> None:
    spec = outputs.get(name)
    if spec is None:
        raise ValueError(f"audio.output is {short_repr(name)}, which outputs does not declare; declare it there")
    long = [dim for dim in spec.dims[spec.is_batched :] if dim != 1]
    if len(long) != 1 or spec.dtype not in ("float16", "float32", "float64", "int16"):
        raise ValueError(
            f"audio.output is {spec}, which is not one channel of audio; it must be like float32[{BATCH}, samples]"
        )


ONNX_MODULE = "onnx.module"
"""Registry name of the component that runs what `module` describes."""


class CodecStageConfig(_StageConfig):
    """A stage on the codec engine: a streaming vocoder, or a one-shot module."""

    engine: Literal["codec"]
    params: CodecParams = Field(default_factory=CodecParams)
    budget: CodecBudget = Field(default_factory=CodecBudget)
    module: ModuleConfig | None = Field(default=None, description=f"Of component `{ONNX_MODULE}` only, see below.")

    @model_validator(mode="after")
    def _module_is_read(self) -> Self:
        if (self.module is None) == (self.component == ONNX_MODULE):
            raise ValueError(
                f"component {ONNX_MODULE} needs a module section with file, inputs and outputs"
                if self.module is None
                else f"module is read by component {ONNX_MODULE} alone, not by {self.component}; remove it"
            )
        return self

    @field_validator("output")
    @classmethod
    def _is_audio(cls, output: Modality | None) -> Modality | None:
        if output in (Modality.IMAGE, Modality.VIDEO):
            raise ValueError(
                f"a codec stage outputs audio, or as a module text, embedding or scores, not {output}; use one of "
                "them, or null"
            )
        return output


class DiffusionStageConfig(_QuantisedStageConfig):
    """A stage on the diffusion engine: it encodes prompts, denoises, or decodes latents, as its component does."""

    engine: Literal["diffusion"]
    params: DiffusionParams = Field(default_factory=DiffusionParams)
    budget: DiffusionBudget = Field(default_factory=DiffusionBudget)
    context_parallel: Ranks = Field(
        default=1,
        description="Processes that compute each picture together, each with the whole model and a GPU, from `device` "
        "on.",
    )

    @property
    def ranks(self) -> int:
        return self.context_parallel

    @field_validator("output")
    @classmethod
    def _is_medium(cls, output: Modality | None) -> Modality | None:
        if output not in (None, Modality.IMAGE, Modality.VIDEO, Modality.AUDIO):
            raise ValueError(f"a diffusion stage outputs image, video or audio, not {output}; use one, or null")
        return output


LocalStageConfig = ARStageConfig | CodecStageConfig | DiffusionStageConfig
"""Of a stage that runs a network of its own."""
StageConfig = LocalStageConfig | RemoteStageConfig
STAGE_TYPES: dict[str, type[StageSettings]] = {
    "autoregressive": ARStageConfig,
    "codec": CodecStageConfig,
    "diffusion": DiffusionStageConfig,
    "remote": RemoteStageConfig,
}
"""Stage model by engine name."""


# ----------------------------------------------------------------------------------------- pipeline and rest


class EdgeConfig(ConfigModel):
    """The input of one stage: chunks of one or more sources, through one bridge."""

    # A plain `alias` would make `from`, a keyword, the only constructor argument.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    source: tuple[str, ...] = Field(
        validation_alias="from", serialization_alias="from", min_length=1, description="One stage, or a list."
    )
    to: str
    bridge: str = Field(description="Registry name of the function that turns chunks into inputs.")

    @field_validator("source", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class PipelineConfig(ConfigModel):
    """The stages of a family and the edges between them. `PipelineGraph` checks it as a whole."""

    name: str = Field(min_length=1, max_length=100)
    entry: str | None = Field(default=None, description="Where requests start; null: the stage that no edge leads to.")
    stages: dict[str, Annotated[StageConfig, Field(discriminator="engine")]]
    edges: tuple[EdgeConfig, ...] = ()

    @property
    def local_stages(self) -> dict[str, LocalStageConfig]:
        """Those that need a device and memory."""
        return {name: stage for name, stage in self.stages.items() if not isinstance(stage, RemoteStageConfig)}


class LimitsConfig(ConfigModel):
    """Limits of a request."""

    media: MediaLimits = Field(default_factory=MediaLimits)
    max_prompt_tokens: Count | None = Field(default=None, description="null: as long as the lead stage can hold.")
    max_deadline_seconds: Seconds = Field(default=3600.0, description="Maximum deadline of a request.")


class OmniConfig(ConfigModel):
    """The whole configuration, as `omnistage config` prints it."""

    pipeline: PipelineConfig
    deployment: DeploymentConfig = Field(default_factory=DeploymentConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
