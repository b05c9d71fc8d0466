"""Diffusers' LoRAs give the pictures that diffusers draws with them, different ones in one batch of steps."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import DiffusionBudget
from omnistage.core.errors import AdapterError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput, Latents, RequestInfo, StageInput
from omnistage.engines.adapters.library import AdapterLibrary, AdapterLimits, AdapterSource
from omnistage.engines.diffusion.stage import DenoiseStage
from omnistage.models._diffusers.verify import Case, load_components
from omnistage.omni import Omni
from tests.parity.conftest import Checkpoints

ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "style": {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]},
    "subject": {"r": 3, "lora_alpha": 3, "target_modules": ["to_q", "add_q_proj", "net.2", "ffn.net.2"]},
}
FAMILIES = ["stable_diffusion_3", "flux", "flux2", "qwen_image", "wan", "z_image"]
SIZE = {"width": 64, "height": 64, "max_sequence_length": 24}


def write_adapters(pipe: Any, folder: Path) -> None:
    """Adapters with random weights as diffusers saves them: one with its alphas in the header, one without."""
    import peft

    transformer = pipe.transformer
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        transformer.add_adapter(peft.LoraConfig(**options), adapter_name=name)
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in transformer.named_parameters():
            if f".lora_A.{name}." in key or f".lora_B.{name}." in key:
                parameter.data.normal_(0, 0.1, generator=generator)
        layers = peft.utils.get_peft_model_state_dict(transformer, adapter_name=name)
        metadata = {"transformer_lora_adapter_metadata": dict(options)} if seed == 0 else {}
        type(pipe).save_lora_weights(folder / name, transformer_lora_layers=layers, **metadata)
        transformer.delete_adapters(name)


class Drawn:
    """A family's checkpoint with adapters, ours and theirs."""

    def __init__(self, family: str, folder: Path, adapters: Path) -> None:
        self.folder, self.adapters = folder, adapters
        self.reference = importlib.import_module(f"omnistage.models.{family}.verify").Reference(folder)
        write_adapters(self.reference.pipe, adapters)
        self.encoder, self.denoiser, _ = load_components(OmniRunner(folder))

    def stage(self, slots: int = 2, names: Sequence[str] = tuple(ADAPTERS), **budget: Any) -> DenoiseStage:
        sources = {name: AdapterSource(self.adapters / name) for name in names}
        library = AdapterLibrary("denoise", sources, AdapterLimits(slots, None, 1 << 28, False))
        return DenoiseStage("denoise", self.denoiser, DiffusionBudget(**budget), None, library)

    @torch.inference_mode()
    def draw(self, stage: DenoiseStage, cases: Sequence[Case]) -> list[torch.Tensor]:
        """Latents of cases that are denoised together."""
        found: dict[str, torch.Tensor] = {}
        for index, case in enumerate(cases):
            jobs = self.encoder.jobs(case.payload, case.params)
            encoded = [self.encoder.encode([job])[0] for job in jobs]
            condition = self.encoder.condition(case.payload, case.params, encoded)
            stage.check_params(case.params)
            stage.submit(StageInput(RequestInfo(f"r{index}"), case.params, condition))
        while stage.has_work():
            for chunk in stage.step():
                assert chunk.error is None, chunk.error
                if isinstance(chunk.payload, Latents):
                    found[chunk.request_id] = chunk.payload.picture
        return [found[f"r{index}"] for index in range(len(cases))]

    def expected(self, case: Case) -> torch.Tensor:
        pipe = self.reference.pipe
        for each in case.params.lora:
            pipe.load_lora_weights(self.adapters / each.name, adapter_name=each.name)
        if case.params.lora:
            pipe.set_adapters([each.name for each in case.params.lora], [each.weight for each in case.params.lora])
        try:
            latents: torch.Tensor = self.reference(case).latents
        finally:
            if case.params.lora:
                pipe.unload_lora_weights()
        return latents


def case(seed: int, lora: object = (), **options: Any) -> Case:
    params = DiffusionParams.parse({**SIZE, "steps": 3, "seed": seed, "lora": lora, **options})
    return Case(f"case {seed}", DiffusionInput("a red cat under a tree"), params)


@pytest.fixture(scope="module", params=FAMILIES)
def drawn(
    request: pytest.FixtureRequest, checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Drawn:
    return Drawn(request.param, checkpoint_of(request.param), tmp_path_factory.mktemp("adapters"))


def test_pictures_of_one_batch_have_the_adapters_of_their_requests(drawn: Drawn) -> None:
    mix = [{"name": "style", "weight": 0.6}, {"name": "subject", "weight": -0.4}]
    cases = [case(1), case(1, "style"), case(1, "subject"), case(1, mix), case(2, "style", steps=2)]
    stage = drawn.stage()
    ours = drawn.draw(stage, cases)
    for each, latents in zip(cases, ours, strict=True):
        torch.testing.assert_close(latents, drawn.expected(each), atol=2e-5, rtol=1e-5)
    assert all(not torch.allclose(ours[0], other, atol=1e-3) for other in ours[1:4])
    assert stage.stats().extra["rows"] > stage.stats().extra["forwards"]  # they did share steps


@pytest.fixture(scope="module")
def sd3(checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return Drawn("stable_diffusion_3", checkpoint_of("stable_diffusion_3"), tmp_path_factory.mktemp("adapters"))


def test_more_adapters_than_places_take_turns(sd3: Drawn) -> None:
    cases = [case(1), case(1, "style"), case(1, "subject"), case(2, "style")]
    together = sd3.draw(sd3.stage(slots=1), cases)
    for each, latents in zip(cases, together, strict=True):
        torch.testing.assert_close(latents, sd3.expected(each), atol=2e-5, rtol=1e-5)


def test_a_scale_is_on_top_of_the_adapters_own(sd3: Drawn) -> None:
    source = AdapterSource(sd3.adapters / "style", 0.5)
    library = AdapterLibrary("denoise", {"half": source}, AdapterLimits(1, None, 1 << 28, False))
    components = load_components(OmniRunner(sd3.folder))
    stage = DenoiseStage("denoise", components[1], DiffusionBudget(), None, library)
    (ours,) = sd3.draw(stage, [case(3, "half")])
    torch.testing.assert_close(ours, sd3.expected(case(3, [{"name": "style", "weight": 0.5}])), atol=2e-5, rtol=1e-5)


def test_omni_draws_with_adapters_by_name(sd3: Drawn) -> None:
    adapters = {name: sd3.adapters / name for name in ADAPTERS}
    with Omni(sd3.folder, device="cpu", dtype="float32", adapters=adapters, progress=False) as omni:
        params = [case(1).params, case(1, "style").params, case(1, "subject").params]
        outputs = omni.generate(["a cat"] * 3, params, progress=False)
        pictures = [output.images[0].pixels.tobytes() for output in outputs]
        assert len(set(pictures)) == 3
        with pytest.raises(AdapterError, match="there is no adapter 'other'"):
            omni.generate("a cat", case(1, "other").params, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rename": ("transformer.", "text_encoder.")}, "it changes text_encoder"),
        ({"rename": ("transformer.", "unet.")}, "it changes unet"),
        ({"rename": ("transformer_blocks.0.", "transformer_blocks.90.")}, "is not a linear layer of stage 'denoise'"),
        ({"add": "transformer.transformer_blocks.0.attn.to_q.lora_B.bias"}, "is a bias"),
        ({"add": "transformer.transformer_blocks.0.attn.to_q.dora_scale"}, "DoRA"),
        ({"narrow": True}, "trained on another base"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_name(
    sd3: Drawn, tmp_path: Path, change: Mapping[str, Any], message: str
) -> None:
    tensors = load_file(sd3.adapters / "subject" / "pytorch_lora_weights.safetensors")
    if "rename" in change:
        old, new = change["rename"]
        tensors = {key.replace(old, new, 1): tensor for key, tensor in tensors.items()}
    if "add" in change:
        tensors[change["add"]] = torch.zeros(4)
    if "narrow" in change:
        tensors = {key: t[:, :-1].contiguous() if "lora_A" in key else t for key, t in tensors.items()}
    (tmp_path / "bad").mkdir()
    save_file(tensors, tmp_path / "bad" / "pytorch_lora_weights.safetensors")
    library = AdapterLibrary(
        "denoise", {"bad": AdapterSource(tmp_path / "bad")}, AdapterLimits(1, None, 1 << 28, False)
    )
    with pytest.raises(AdapterError, match=message):
        DenoiseStage("denoise", load_components(OmniRunner(sd3.folder))[1], DiffusionBudget(), None, library)
