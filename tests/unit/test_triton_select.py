"""The kernel that selects tokens gives those of a sort, in Triton's interpreter; on a GPU see `test_sampler_cuda.py`.

The interpreter is chosen when a kernel is defined and holds for the whole process, so the cases run in a child.
"""

from __future__ import annotations

from tests.unit.interpreted import needs_triton, run_interpreted

pytestmark = needs_triton

CHILD = """
import torch
from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling import triton_select
from omnistage.engines.ar.sampling.device_selection import DeviceSelector

triton_select._BLOCK = 64
shapes = [
    {}, {"temperature": 0.0}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 40}, {"top_p": 0.3}, {"min_p": 0.1},
    {"temperature": 0.6, "top_p": 0.9}, {"top_k": 100, "top_p": 0.5}, {"top_p": 0.999, "temperature": 0.3},
    {"min_p": 0.02, "top_p": 0.8, "temperature": 2.0}, {"top_k": 7, "min_p": 0.2, "top_p": 0.7},
]
params = [SamplingParams.parse({"seed": i, **shape}) for i, shape in enumerate(shapes)]
for vocab in (50, 150):
    selector = DeviceSelector(params, vocab, torch.device("cpu"))
    for trial in range(5):
        torch.manual_seed(trial)
        x = torch.randn(len(params), vocab) * 2
        if trial % 2:
            x = (x * 2).round() / 2  # many ties
        if trial == 3:
            x[:, ::2] = -torch.inf
        if trial == 4:
            x[0, 3], x[1, 3], x[2, 7], x[3] = torch.nan, torch.inf, torch.nan, -torch.inf
        u = torch.rand(len(params), dtype=torch.float64)
        given = (selector.temperature, selector.top_k, selector.top_p, selector.min_p, u)
        found, expected = triton_select.select(x, *given), selector.select_sorted(x, u)
        if not torch.equal(found, expected):
            raise SystemExit(f"{vocab}, {trial}: {found.tolist()} instead of {expected.tolist()}")
        if trial == 4 and found[:4].tolist() != [-1, -1, -1, -3]:
            raise SystemExit(f"failures: {found[:4].tolist()}")
print("equal")
"""


def test_the_kernel_gives_the_tokens_of_a_sort() -> None:
    child = run_interpreted("-c", CHILD)
    assert child.stdout.strip() == "equal", child.stdout + child.stderr
