"""The kernels of code predictors, in Triton's interpreter: against `transformers`' own modules."""

from __future__ import annotations

from tests.unit.interpreted import needs_triton, run_interpreted

pytestmark = needs_triton

CHILD = """
import torch
from torch import nn
from omnistage.core.errors import InternalError
from omnistage.engines.ar import triton_depth
from omnistage.engines.ar.depth_decoder import DepthDecoder
from omnistage.hf import transformers
from omnistage.models.csm.backbone import Backbone
from omnistage.models import decoder
from omnistage.models.csm import backbone
from omnistage.models.csm import tiny as csm_tiny
from omnistage.models.qwen3_omni_moe import tiny
from omnistage.models.qwen3_omni_moe.components import Talker

decoder.apply_cpu_kernels = backbone.apply_cpu_kernels = lambda model: None  # the layers that a GPU has

def randomise(model):
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2 if weight.dim() > 1 else 0.1)
    return model.eval().requires_grad_(False)

def check(component, width, vocab, what):
    hidden = torch.randn(19, width) if what == "Qwen3-Omni" else nn.functional.pad(torch.randn(19, width - 1), (0, 1))
    ids = torch.randint(0, vocab, (19,))
    greedy = lambda logits, index: logits.argmax(-1)
    with torch.inference_mode():
        expected = component.predict(hidden, ids, greedy)
        component.use_kernels()
        kernels = component._depth if what == "Qwen3-Omni" else component._kernels
        if kernels is None:
            raise SystemExit(f"{what}: the kernels do not agree with the module")
        found, alone = component.predict(hidden, ids, greedy), component.predict(hidden[:1], ids[:1], greedy)
    if not torch.equal(found, expected):
        raise SystemExit(f"{what}: {found.tolist()} instead of {expected.tolist()}")
    if not torch.equal(found[:1], alone):
        raise SystemExit(f"{what}: the others of its batch change a row's codes")
    return kernels

whole = tiny.config_for(0.0)
whole.talker_config.audio_config = whole.thinker_config.audio_config
whole.talker_config.code_predictor_config.vocab_size = 80  # few, as all is interpreted; the last tile is not full
cls = transformers.Qwen3OmniMoeTalkerForConditionalGeneration
talker = randomise(cls._from_config(whole.talker_config, dtype=torch.float32))
check(Talker(talker, whole, {"ethan": 2302}, {}), whole.talker_config.text_config.hidden_size, 2000, "Qwen3-Omni")

config = csm_tiny.config_for(0.0)
csm = randomise(transformers.CsmForConditionalGeneration._from_config(config, dtype=torch.float32))
kernels = check(Backbone(csm), config.hidden_size + 1, 40, "CSM")

frame = kernels.start(1)
for _ in range(config.num_codebooks):
    frame.step(torch.randn(1, kernels.width))
try:
    frame.step(torch.randn(1, kernels.width))
    raise SystemExit("a frame takes more rows than it has")
except InternalError:
    pass

csm.depth_decoder.model.layers[0].mlp.act_fn = nn.ReLU()  # the kernels compute another activation
if DepthDecoder.of(csm.depth_decoder.model, config.num_codebooks) is not None:
    raise SystemExit("another activation is not noticed")
if DepthDecoder.of(nn.Linear(2, 2), 4) is not None:
    raise SystemExit("another module is not noticed")
x, weight, factor = torch.randn(3, 96), torch.randn(80, 96) / 10, torch.rand(96)
for gated in (False, True):  # in 16 bits a tile is as deep as the row
    found = triton_depth.linear(x.half(), weight.half(), norm=(factor.half(), 1e-6), gated=gated).float()
    expected = nn.functional.rms_norm(x, (96,), factor, 1e-6) @ weight.T
    if gated:
        expected = nn.functional.silu(expected[:, :40]) * expected[:, 40:]
    if not torch.allclose(found, expected, rtol=0.02, atol=0.02):
        raise SystemExit(f"16 bits: {(found - expected).abs().max()}")
print("equal")
"""


def test_the_kernels_give_the_codes_of_the_modules() -> None:
    child = run_interpreted("-c", CHILD)
    assert child.stdout.strip() == "equal", child.stdout + child.stderr
