"""Our stages against transformers' `generate` and diffusers' pipeline: the same tokens, then the same picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from omnistage.compat import prepare_torchvision
from omnistage.core.errors import InternalError
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import ARInput, DiffusionInput, RequestInfo, StageInput, TokenChunk
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases
from omnistage.engines.ar.stage import ARStage
from omnistage.models._diffusers import private_api
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.verify import Case, DiffusionResult, Recorder, drive, load_components, rows_of
from omnistage.models.glm_image.bridges import prior2encode
from omnistage.models.glm_image.layout import CELL
from omnistage.models.glm_image.processor import GlmImageInputProcessor

if TYPE_CHECKING:
    from transformers import BatchFeature

_WORDS = ("a red bicycle", "two 'OPEN' signs", 'a shop called "第三"', "fog over water", "「春」 on paper", "an owl")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What to draw. `params` must set the size and the seed."""

    name: str
    prompt: str
    params: DiffusionParams
    images: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PriorOutput:
    """What a language model wrote: all tokens, and what goes on to be drawn."""

    tokens: list[int]
    drawing: DiffusionInput


def make_requests(count: int, seed: int) -> list[Request]:
    """`count` random requests; every second one has pictures to look at."""
    requests = []
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        sides = rng.integers(2, 5, size=2) * CELL
        images = rng.integers(0, 256, size=(int(rng.integers(1, 3)), 64, 96, 3), dtype=np.uint8)
        params = DiffusionParams(
            width=int(sides[0]),
            height=int(sides[1]),
            steps=int(rng.integers(2, 5)),
            guidance=float(rng.choice([1.0, 1.5, 4.0])),
            seed=index,
        )
        kind, sources = ("edit", tuple(images)) if index % 2 else ("text", ())
        requests.append(Request(f"{index}:{kind}", str(rng.choice(_WORDS)), params, sources))
    return requests


def run(runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Greedy tokens of all requests in one batch, then each picture; float32 on the CPU."""
    check_cases(cases)
    report = progress or (lambda _what, _done: None)
    requests = make_requests(cases, seed)
    report("our prior", 0.0)
    answers = write_ours(load_prior_stage(runner), GlmImageInputProcessor.load(runner.folder), requests)
    report("loading", 0.3)
    parts, reference = load_components(runner), Reference(runner.folder)
    rows: list[VerifyRow] = []
    for index, (request, ours) in enumerate(zip(requests, answers, strict=True)):
        report(request.name, 0.4 + 0.6 * index / len(requests))
        theirs = reference.write(replace(request, images=ours.drawing.images))
        rows.append(VerifyRow.judge(request.name, "prior tokens", differing(ours, theirs), 0.0))
        case = Case(request.name, theirs.drawing, request.params)
        rows += rows_of(case, drive(*parts, case), reference.draw(case))
    report("done", 1.0)
    return rows


def differing(ours: PriorOutput, theirs: PriorOutput) -> float:
    """How many tokens differ, those of input pictures included; infinite where their numbers do."""
    pairs = [(torch.tensor(ours.tokens), torch.tensor(theirs.tokens))]
    for name, expected in theirs.drawing.context.items():
        pairs.append((ours.drawing.context.get(name, expected.new_empty(0)), expected))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    return float(sum(int((a != b).sum()) for a, b in pairs))


# ---------------------------------------------------------------------------------------------------- ours


def load_prior_stage(runner: ModelRunner) -> ARStage:
    stage = runner.build_stage("prior")
    if not isinstance(stage, ARStage):
        raise InternalError("the prior is not an autoregressive stage")
    return stage


def write_ours(stage: ARStage, processor: GlmImageInputProcessor, requests: Sequence[Request]) -> list[PriorOutput]:
    """Greedy tokens of all requests in one batch, and what the bridge makes of them."""
    infos = [RequestInfo(request.name) for request in requests]
    for info, request in zip(infos, requests, strict=True):
        payload: ARInput = processor.draw(request.prompt, request.images, None, request.params)
        stage.submit(StageInput(info, SamplingParams(temperature=0.0), payload))
    states: dict[str, object] = {}
    tokens: dict[str, list[int]] = {info.request_id: [] for info in infos}
    drawings: dict[str, DiffusionInput] = {}
    while stage.has_work():
        for chunk in stage.step():
            if chunk.error is not None:
                raise chunk.error
            key = chunk.request_id
            if isinstance(chunk.payload, TokenChunk):
                tokens[key] += chunk.payload.token_ids
            states[key], inputs = prior2encode(RequestInfo(key), states.get(key), chunk)
            for item in inputs:
                if isinstance(item, DiffusionInput):
                    drawings[key] = item
    return [PriorOutput(tokens[info.request_id], drawings[info.request_id]) for info in infos]


# ------------------------------------------------------------------------------------------------ the stock


class Reference:
    """diffusers' pipeline in float32 on the CPU, with its language model decoding greedily."""

    def __init__(self, folder: Path) -> None:
        prepare_torchvision()
        self.pipe = diffusers().GlmImagePipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.pipe.set_progress_bar_config(disable=True)

    @torch.inference_mode()
    def write(self, request: Request) -> PriorOutput:
        """The tokens as `generate_prior_tokens` makes them, but for the sampling.

        The method itself cannot be called with pictures: it takes their features for a tensor that the present
        transformers gives as a list.
        """
        inputs, model = self._inputs(request), self.pipe.vision_language_encoder
        grids = inputs["image_grid_thw"]
        count, offset, rows, columns = private_api.glm_generation_params(grids, from_text=not request.images)
        start = inputs["input_ids"].shape[1]
        tokens = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0, start : start + count - 1]
        picture = tokens[offset : offset + rows * columns].tolist()
        context = {"grid": torch.tensor([rows, columns])}
        if request.images:
            features = model.get_image_features(inputs["pixel_values"], grids[:-1], return_dict=True).pooler_output
            context |= {"source_tokens": model.get_image_tokens(features), "source_grids": grids[:-1, 1:]}
        return PriorOutput(
            tokens.tolist(), DiffusionInput(request.prompt, request.images, tokens=tuple(picture), context=context)
        )

    def _inputs(self, request: Request) -> BatchFeature:
        content: list[dict[str, object]] = [
            {"type": "image", "image": Image.fromarray(image)} for image in request.images
        ]
        content.append({"type": "text", "text": request.prompt})
        size = {"target_h": request.params.height, "target_w": request.params.width}
        return self.pipe.processor.apply_chat_template(
            [[{"role": "user", "content": content}]],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=size,
        )

    @torch.inference_mode()
    def draw(self, case: Case) -> DiffusionResult:
        """The picture of a case's tokens."""
        payload, params = case.payload, case.params
        rows, columns = payload.context["grid"].tolist()
        options: dict[str, object] = {}
        if payload.images:
            grids = payload.context["source_grids"]
            split = torch.split(payload.context["source_tokens"], grids.prod(-1).tolist())
            sources = [
                private_api.glm_upsample(tokens, *grid)[0] for tokens, grid in zip(split, grids.tolist(), strict=True)
            ]
            ones = torch.ones(len(grids), 1, dtype=grids.dtype)
            options = {
                "image": [Image.fromarray(image) for image in payload.images],
                "prior_token_image_ids": [torch.cat(sources)],
                "source_image_grid_thw": [torch.cat((ones, grids * 2), dim=1)],
            }
        recorder = Recorder()
        pictures = self.pipe(
            prompt=payload.prompt,
            height=rows * CELL,
            width=columns * CELL,
            num_inference_steps=params.steps or 50,
            guidance_scale=1.5 if params.guidance is None else params.guidance,
            generator=torch.Generator().manual_seed(params.seed or 0),
            prior_token_ids=private_api.glm_upsample(torch.tensor(payload.tokens), rows, columns),
            callback_on_step_end=recorder,
            callback_on_step_end_tensor_inputs=["latents"],
            **options,
        ).images
        return DiffusionResult(recorder.latents[0], np.asarray(pictures[0]))
