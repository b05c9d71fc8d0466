"""The sampling kernels in Triton's interpreter, which holds for a whole process: the cases run in a child."""

from __future__ import annotations

import pytest

from omnistage.engines.ar.sampling import triton_sample
from tests.unit.interpreted import needs_triton, run_interpreted

pytestmark = needs_triton

TYPES = {
    "x_ptr": "*bf16", "out_ptr": "*i64", "longs_ptr": "*i64", "numbers_ptr": "*fp64", "sums_ptr": "*i64", "rows": "i32",
    "firsts_ptr": "*i32", "flags_ptr": "*i32", "counts_ptr": "*i32", "places_ptr": "*i32",
}  # fmt: skip
SIZES = {
    "VOCAB": 8448, "BLOCK": 2048, "BLOCKS": 8, "COUNT": 5, "GROUP": 64, "MAXIMA": 160, "WIDTH": 256, "LIKELIEST": 1024,
    "SEARCH": 1024, "SEARCHES": 16, "CANDIDATES": 1024,
}  # fmt: skip


@pytest.mark.parametrize("cases", ["sampling_kernels.py", "sampling_graphs.py"])
def test_the_kernels_sample_what_the_host_samples(cases: str) -> None:
    child = run_interpreted("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/unit/{cases}")
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("name", ["process", "reduce", "weigh", "gather", "choose"])
def test_the_kernels_compile_for_a_gpu(name: str) -> None:
    """The interpreter accepts more than the compiler. Fused multiply-add would round in another way than the host."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(triton_sample, f"_{name}_kernel")
    types = {argument: SIZES.get(argument, TYPES.get(argument, "*fp32")) for argument in kernel.arg_names}
    signature = {argument: "constexpr" if isinstance(kind, int) else kind for argument, kind in types.items()}
    sizes = {(i,): kind for i, kind in enumerate(types.values()) if isinstance(kind, int)}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(ASTSource(kernel, signature, sizes), target=GPUTarget("cuda", 90, 32), options=options)
    assert "fma." not in compiled.asm["ptx"]
