"""DiT caches: states of their own for every lane and branch, work really skipped, all of it forgotten."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import ConfigError, StageError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition
from omnistage.engines.diffusion.caching import KINDS, StepCache
from omnistage.engines.diffusion.component import Denoiser, Lane, Row
from omnistage.engines.diffusion.runner import DiffusionRunner
from omnistage.engines.diffusion.scheduler import LaneKey
from omnistage.engines.streams import DeviceStream

TEXT = 6


def flux(layers: int = 2) -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=layers,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )


def flux2() -> Any:
    return diffusers.Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        pos_embed_max_size=8,
    )


def qwen() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=4,
        cross_attn_norm=True,
        rope_max_seq_len=16,
    )


MODELS: dict[str, Callable[[], Any]] = {"flux": flux, "flux2": flux2, "sd3": sd3, "qwen": qwen, "wan": wan}
SHAPES = {"flux": (16, 4), "flux2": (16, 4), "sd3": (4, 8, 8), "qwen": (16, 4), "wan": (4, 1, 8, 8)}


def made(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = MODELS[name]().eval().requires_grad_(False)
    for parameter in model.parameters():  # norms and modulation start at zero: nothing would reach the output
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


class SmallDenoiser(Denoiser):
    """One tiny transformer on diffusers' flow-matching schedule, or two in turn."""

    def __init__(self, name: str, *transformers: nn.Module) -> None:
        self.name = name
        self._all = transformers or (made(name),)
        self.transformer = self._all[0]

    @property
    def transformers(self) -> tuple[nn.Module, ...]:
        return self._all

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        return 16

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(params.steps)
        scheduler.set_begin_index(0)
        latents = torch.randn(SHAPES[self.name], generator=generator)
        timesteps = scheduler.timesteps
        if params.strength is not None:
            start = int(len(timesteps) * (1 - params.strength))
            timesteps = timesteps[start:]
            scheduler.set_begin_index(start)
        return Lane(latents, scheduler, timesteps, condition, params, 16)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        (row,) = rows
        half = 2 * row.lane.step >= row.lane.steps
        model: Any = self._all[-1] if half else self._all[0]
        inputs: dict[str, Any] = {
            "hidden_states": row.lane.latents[None],
            "encoder_hidden_states": row.tensors["embeds"][None],
            "timestep": row.timestep[None] / (1000 if self.name in ("flux", "flux2", "qwen") else 1),
        }
        if self.name in ("flux", "sd3"):
            inputs["pooled_projections"] = row.tensors["pooled"][None]
        if self.name == "flux":
            inputs |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(TEXT, 3)}
        if self.name == "flux2":
            inputs |= {"img_ids": torch.zeros(1, 16, 4), "txt_ids": torch.zeros(1, TEXT, 4), "guidance": None}
        if self.name == "qwen":
            mask = torch.ones(1, TEXT, dtype=torch.bool)
            inputs |= {"img_shapes": [[(1, 4, 4)]], "encoder_hidden_states_mask": mask}
        output: Tensor = model(**inputs, return_dict=False)[0]
        return list(output)


def condition(seed: int, *, guided: bool = True) -> Condition:
    generator = torch.Generator().manual_seed(seed)

    def one() -> dict[str, Tensor]:
        embeds, pooled = torch.randn(TEXT, 16, generator=generator), torch.randn(8, generator=generator)
        return {"embeds": embeds, "pooled": pooled}

    return Condition(one(), one() if guided else None, width=64, height=64)


def opened(
    denoiser: Denoiser, seed: int, steps: int = 10, *, guided: bool = True, strength: float | None = None
) -> Lane:
    params = DiffusionParams(steps=steps, guidance=3.0, strength=strength)
    return denoiser.open(condition(seed, guided=guided), params, torch.Generator().manual_seed(seed))


def step(denoiser: Denoiser, lane: Lane, cache: StepCache | None) -> None:
    rows = denoiser.rows(lane)
    forward = denoiser.forward if cache is None else lambda part: cache.forward(denoiser, part)
    denoiser.advance(lane, [forward([row])[0] for row in rows])


@torch.inference_mode()
def alone(denoiser: Denoiser, lane: Lane, cache: StepCache | None) -> Tensor:
    while not lane.done:
        step(denoiser, lane, cache)
    if cache is not None:
        cache.forget(lane)
    return lane.latents


class Calls:
    """Counts forwards of modules below the hooks: what is really computed."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.count = 0
        for module in modules:
            self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return inner(*args, **kwargs)

        # The hooks of diffusers read parameter names from the class, so an instance attribute is invisible to them.
        module.forward = forward


def blocks_of(model: Any) -> list[nn.Module]:
    lists = [child for name, child in model.named_children() if name.endswith("blocks")]
    return [block for part in lists for block in part]


def attentions_of(model: Any) -> list[nn.Module]:
    return [
        m for name, m in model.named_modules() if name.split(".")[-1] in ("attn", "attn1", "attn2") and m is not None
    ]


FITTING = [
    *[(model, spec) for model in MODELS for spec in ("first_block:1.5", "taylorseer:3", "taylorseer:4:2")],
    *[(model, spec) for model in MODELS for spec in ("faster:2", "pyramid:3")],
    ("flux", "mag:0.2"),
]


@pytest.mark.parametrize(("model", "spec"), FITTING)
def test_interleaved_lanes_are_as_alone(model: str, spec: str) -> None:
    denoiser = SmallDenoiser(model)
    plain = [alone(denoiser, opened(denoiser, seed, steps), None) for seed, steps in ((1, 12), (2, 9))]
    cache = StepCache.open(spec, denoiser)
    expected = [alone(denoiser, opened(denoiser, seed, steps), cache) for seed, steps in ((1, 12), (2, 9))]
    lanes = [opened(denoiser, 1, 12), opened(denoiser, 2, 9)]
    with torch.inference_mode():
        step(denoiser, lanes[0], cache)  # so that they are at different steps
        while not all(lane.done for lane in lanes):
            for lane in lanes:
                if not lane.done:
                    step(denoiser, lane, cache)
    assert cache.states == 4
    for lane, wanted, full in zip(lanes, expected, plain, strict=True):
        assert torch.equal(lane.latents, wanted)
        assert not torch.equal(wanted, full)  # it does something
        assert torch.isfinite(wanted).all()


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        *[(model, "first_block:0") for model in MODELS],
        *[(model, f"{name}:1") for model in MODELS for name in ("taylorseer", "pyramid")],
    ],
)
def test_nothing_skipped_is_no_cache(model: str, spec: str) -> None:
    denoiser = SmallDenoiser(model)
    full = alone(denoiser, opened(denoiser, 3), None)
    cache = StepCache.open(spec, denoiser)
    assert torch.equal(alone(denoiser, opened(denoiser, 3), cache), full)


@pytest.mark.parametrize(("model", "spec"), FITTING)
def test_work_is_skipped(model: str, spec: str) -> None:
    denoiser = SmallDenoiser(model)
    by_attention = spec.startswith(("faster", "pyramid"))
    modules = attentions_of(denoiser.transformer) if by_attention else blocks_of(denoiser.transformer)
    calls = Calls(modules)
    steps = 20
    alone(denoiser, opened(denoiser, 4, steps, guided=False), None)
    assert calls.count == len(modules) * steps
    calls.count = 0
    cache = StepCache.open(spec, denoiser)
    alone(denoiser, opened(denoiser, 4, steps, guided=False), cache)
    assert len(modules) < calls.count < 0.85 * len(modules) * steps


def test_the_last_block_of_sd3_always_runs() -> None:
    denoiser = SmallDenoiser("sd3")
    calls = Calls([denoiser.transformer.transformer_blocks[-1]])
    cache = StepCache.open("first_block:10", denoiser)
    alone(denoiser, opened(denoiser, 1, 8, guided=False), cache)
    assert calls.count == 8


@pytest.mark.parametrize(("model", "spec"), FITTING)
def test_forget_releases_everything(model: str, spec: str) -> None:
    denoiser = SmallDenoiser(model)
    cache = StepCache.open(spec, denoiser)
    keep, drop = opened(denoiser, 1), opened(denoiser, 2)
    alive: list[weakref.ref[Tensor]] = []
    with torch.inference_mode():
        for _ in range(5):
            step(denoiser, keep, cache)
            step(denoiser, drop, cache)
    held = tensors_of(cache._states[drop])
    assert held
    alive = [weakref.ref(tensor) for tensor in held]
    others = len(tensors_of(cache._states[keep]))
    assert cache.states == 4
    del held
    cache.forget(drop)
    cache.forget(drop)  # nothing to forget is not an error
    assert cache.states == 2
    assert not [ref for ref in alive if ref() is not None]
    assert len(tensors_of(cache._states[keep])) == others
    lane = weakref.ref(drop.latents)
    del drop
    assert lane() is None
    hooks = [m._diffusers_hook.hooks.values() for m in denoiser.transformer.modules() if hasattr(m, "_diffusers_hook")]
    left = [tensors_of(vars(hook).get("state")) for part in hooks for hook in part if "state" in vars(hook)]
    managers = [vars(hook).get("state_manager") for part in hooks for hook in part]
    left += [tensors_of(manager._state_cache) for manager in managers if manager is not None]
    assert not any(left)  # the hooks themselves hold nothing


def tensors_of(value: object, seen: set[int] | None = None) -> list[Tensor]:
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    inside: Sequence[object] = ()
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, (list, tuple)):
        inside = value
    elif hasattr(value, "__dict__"):
        inside = list(vars(value).values())
    return [tensor for item in inside for tensor in tensors_of(item, seen)]


@pytest.mark.parametrize("spec", ["first_block:0.5", "taylorseer:3", "faster:2", "pyramid:2"])
def test_two_experts(spec: str) -> None:
    denoiser = SmallDenoiser("wan", made("wan", 1), made("wan", 2))
    cache = StepCache.open(spec, denoiser)
    expected = [alone(denoiser, opened(denoiser, seed, 12), cache) for seed in (1, 2)]
    lanes = [opened(denoiser, seed, 12) for seed in (1, 2)]
    with torch.inference_mode():
        for _ in range(12):
            for lane in lanes:
                step(denoiser, lane, cache)
    assert all(torch.equal(lane.latents, wanted) for lane, wanted in zip(lanes, expected, strict=True))


@pytest.mark.parametrize("spec", ["first_block:1.5", "taylorseer:3", "faster:2", "pyramid:2", "mag:0.1"])
def test_a_lane_that_starts_midway(spec: str) -> None:
    """FasterCache of diffusers fails there by itself; MagCache must use the end of its ratios."""
    denoiser = SmallDenoiser("flux")
    cache = StepCache.open(spec, denoiser)
    result = alone(denoiser, opened(denoiser, 1, 16, strength=0.5), cache)
    assert torch.isfinite(result).all()


def test_mag_uses_the_ratios_of_each_lane() -> None:
    """As diffusers does with a configuration made for the lane's number of steps."""
    denoiser = SmallDenoiser("flux")
    cache = StepCache.open("mag:0.1", denoiser)
    served = {steps: alone(denoiser, opened(denoiser, 1, steps, guided=False), cache) for steps in (8, 15, 28)}
    from diffusers.hooks import MagCacheConfig, apply_mag_cache
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    for steps, ours in served.items():
        stock = SmallDenoiser("flux")
        config = MagCacheConfig(threshold=0.1, num_inference_steps=steps, mag_ratios=FLUX_MAG_RATIOS)
        apply_mag_cache(stock.transformer, config)
        assert torch.equal(alone(stock, opened(stock, 1, steps, guided=False), None), ours)


@pytest.mark.parametrize("model", ["flux", "qwen", "wan"])
def test_first_block_is_diffusers_own(model: str) -> None:
    denoiser, stock = SmallDenoiser(model), SmallDenoiser(model)
    cache = StepCache.open("first_block:1.5", denoiser)
    ours = alone(denoiser, opened(denoiser, 1, guided=False), cache)
    stock.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=1.5))
    with stock.transformer.cache_context("cond"):
        assert torch.equal(alone(stock, opened(stock, 1, guided=False), None), ours)


def test_failed_forward_leaves_nothing() -> None:
    denoiser = SmallDenoiser("flux")
    cache = StepCache.open("first_block:1.5", denoiser)
    lane, other = opened(denoiser, 1, guided=False), opened(denoiser, 2, guided=False)
    broken = lane.condition.positive["embeds"]
    with torch.inference_mode():
        step(denoiser, lane, cache)
        step(denoiser, other, cache)
        lane.condition.positive["embeds"] = broken[:, :3]  # type: ignore[index]
        with pytest.raises(RuntimeError):
            step(denoiser, lane, cache)
    assert cache.states == 1
    fresh = opened(denoiser, 2, guided=False)
    assert torch.equal(alone(denoiser, other, cache), alone(denoiser, fresh, cache))


def test_the_runner_forgets_aborted_and_finished_lanes() -> None:
    denoiser = SmallDenoiser("flux")
    params = DiffusionParams(steps=4, guidance=3.0, seed=5)
    wanted = opened(denoiser, 5, 4)
    wanted.condition = condition(1)
    cache = StepCache.open("first_block:1.5", denoiser)
    latents = alone(denoiser, wanted, cache)
    budget = DiffusionBudget(max_batch_tokens=1000, max_batch=8)
    runner = DiffusionRunner(denoiser, budget, DeviceStream(torch.device("cpu")), cache)
    keys = [LaneKey("a", 0), LaneKey("b", 0)]
    for seed, key in enumerate(keys, start=1):
        runner.add(key.request_id, condition(seed), params)
        runner.open(key)
    assert not runner.execute(keys).failed
    assert cache.states == 4
    runner.remove("b")
    assert cache.states == 2
    for _ in range(3):
        result = runner.execute(keys[:1])
    assert result.finished == keys[:1]
    assert torch.equal(runner.result(keys[0], preview=False, final=True).picture, latents)
    assert cache.states == 0


def test_rows_of_two_lanes_are_refused() -> None:
    denoiser = SmallDenoiser("flux")
    cache = StepCache.open("first_block", denoiser)
    lanes = [opened(denoiser, seed) for seed in (1, 2)]
    with pytest.raises(StageError, match="several requests"):
        cache.forward(denoiser, [Row(lane, "positive") for lane in lanes])
    with pytest.raises(StageError, match="several requests"):
        cache.forward(denoiser, list(denoiser.rows(lanes[0])))


# ------------------------------------------------------------------------------------------------ bad specs


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("teacache:0.1", "first_block:0.1, taylorseer:5, mag:0.06, faster:2, pyramid:2"),
        ("", "there is no cache"),
        ("x" * 1000, "there is no cache"),
        ("first_block:", "threshold must be a number from 0 to 10"),
        ("first_block:abc", "like first_block:0.1"),
        ("first_block:-0.1", "from 0 to 10"),
        ("first_block:nan", "from 0 to 10"),
        ("first_block:inf", "from 0 to 10"),
        ("first_block:0.1:2", "write first_block:threshold"),
        ("taylorseer:2.5", "interval must be a whole number"),
        ("taylorseer:0", "from 1 to 1000"),
        ("taylorseer:5:9", "order must be a whole number from 0 to 4"),
        ("taylorseer:5:1:1", "write taylorseer:interval:order"),
        ("pyramid:0", "from 1 to 1000"),
        ("faster:1e3", "a whole number"),
        ("mag:-1", "from 0 to 10"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match="cache") as caught:
        StepCache.open(spec, SmallDenoiser("flux"))
    assert says in str(caught.value)
    assert caught.value.param == "cache"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", list(KINDS))
def test_numbers_may_be_left_out(name: str) -> None:
    denoiser = SmallDenoiser("flux")
    assert StepCache.open(name, denoiser).kind.name == name


@pytest.mark.parametrize("model", ["sd3", "qwen", "wan"])
def test_mag_needs_calibrated_ratios(model: str) -> None:
    denoiser = SmallDenoiser(model)
    with pytest.raises(ConfigError, match="no calibrated magnitude ratios") as caught:
        StepCache.open("mag:0.06", denoiser)
    assert "first_block:0.1" in str(caught.value)
    assert "mag:" not in str(caught.value)


def test_unsupported_transformers() -> None:
    linear = SmallDenoiser("flux", nn.Linear(2, 2))
    for name in KINDS:
        with pytest.raises(ConfigError, match=r"does not support Linear.*none, leave it out"):
            StepCache.open(name, linear)
    torch.manual_seed(0)
    dit = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 4, 8],
    )
    with pytest.raises(ConfigError, match="does not support ZImageTransformer2DModel"):
        StepCache.open("first_block:0.1", SmallDenoiser("flux", dit))


def test_blocks_unknown_to_diffusers() -> None:
    glm = diffusers.GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=8,
    )
    with pytest.raises(ConfigError, match="diffusers does not know what its GlmImageTransformerBlock gives"):
        StepCache.open("first_block:0.1", SmallDenoiser("flux", glm))


def test_a_single_block_is_too_few() -> None:
    wan_of_one = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=16,
    )
    with pytest.raises(ConfigError, match="at least two blocks"):
        StepCache.open("first_block:0.1", SmallDenoiser("wan", wan_of_one))


@pytest.mark.parametrize("spec", ["first_block:0.5", "taylorseer:3", "mag:0.5", "faster:2", "pyramid:2"])
def test_a_closed_cache_leaves_the_transformer_as_it_was(spec: str) -> None:
    denoiser = SmallDenoiser("flux")
    plain = alone(denoiser, opened(denoiser, 1), None)
    cache = StepCache.open(spec, denoiser)
    assert not torch.equal(alone(denoiser, opened(denoiser, 1), cache), plain)
    cache.close()
    assert torch.equal(alone(denoiser, opened(denoiser, 1), None), plain)
    StepCache.open(spec, denoiser)  # and there is room for another


def test_only_one_cache() -> None:
    denoiser = SmallDenoiser("flux")
    StepCache.open("first_block:0.1", denoiser)
    with pytest.raises(ConfigError, match="has a cache already"):
        StepCache.open("taylorseer:5", denoiser)
