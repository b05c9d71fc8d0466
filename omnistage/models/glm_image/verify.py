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
class PriorOutput:
    """What a language model wrote: all tokens, and what goes on to be drawn."""

    tokens: list[int]
    drawing: DiffusionInput


def make_cases(count: int, seed: int) -> list[Case]:
    """`count` random cases; every second one has pictures to look at."""
    cases = []
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
        cases.append(Case(f"{index}:{kind}", DiffusionInput(str(rng.choice(_WORDS)), sources), params))
    return cases


def run(runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Greedy tokens of all requests in one batch, then each picture; float32 on the CPU."""
    check_cases(cases)
    report = progress or (lambda _what, _done: None)
    selected = make_cases(cases, seed)
    report("our prior", 0.0)
    answers = write_ours(load_prior_stage(runner), GlmImageInputProcessor.load(runner.folder), selected)
    report("loading", 0.3)
    parts, reference = load_components(runner), Reference(runner.folder)
    rows: list[VerifyRow] = []
    for index, (case, ours) in enumerate(zip(selected, answers, strict=True)):
        report(case.name, 0.4 + 0.6 * index / cases)
        theirs = reference.write(replace(case, payload=ours.drawing))
        rows.append(VerifyRow.judge(case.name, "prior tokens", differing(ours, theirs), 0.0))
        case = replace(case, payload=theirs.drawing)
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


def write_ours(stage: ARStage, processor: GlmImageInputProcessor, cases: Sequence[Case]) -> list[PriorOutput]:
    """Greedy tokens of all cases in one batch, and what the bridge makes of them."""
    infos = [RequestInfo(case.name) for case in cases]
    for info, case in zip(infos, cases, strict=True):
        payload: ARInput = processor.draw(case.payload.prompt, case.payload.images, None, case.params)
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
    def write(self, case: Case) -> PriorOutput:
        """The tokens as `generate_prior_tokens` makes them, but for the sampling.

        The method itself cannot be called with pictures: it takes their features for a tensor that the present
        transformers gives as a list.
        """
        inputs, model = self._inputs(case), self.pipe.vision_language_encoder
        grids = inputs["image_grid_thw"]
        count, offset, rows, columns = private_api.glm_generation_params(grids, from_text=not case.payload.images)
        start = inputs["input_ids"].shape[1]
        tokens = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0, start : start + count - 1]
        picture = tokens[offset : offset + rows * columns].tolist()
        context = {"grid": torch.tensor([rows, columns])}
        if case.payload.images:
            features = model.get_image_features(inputs["pixel_values"], grids[:-1], return_dict=True).pooler_output
            context |= {"source_tokens": model.get_image_tokens(features), "source_grids": grids[:-1, 1:]}
        return PriorOutput(tokens.tolist(), replace(case.payload, tokens=tuple(picture), context=context))

    def _inputs(self, case: Case) -> BatchFeature:
        content: list[dict[str, object]] = [
            {"type": "image", "image": Image.fromarray(image)} for image in case.payload.images
        ]
        content.append({"type": "text", "text": case.payload.prompt})
        size = {"target_h": case.params.height, "target_w": case.params.width}
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
