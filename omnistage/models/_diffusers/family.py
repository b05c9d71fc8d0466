"""The families of diffusers models differ in a name, a list of pipelines and their own modules; the rest is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.core.family import AnyProcessor, Bridge, ComponentFactory, Family
from omnistage.models.lazy import lazy, lazy_factory

if TYPE_CHECKING:
    from omnistage.core.checkpoint import Checkpoint


def drawing_family(
    name: str,
    architectures: tuple[str, ...],
    *,
    processor: Callable[[Checkpoint], AnyProcessor] | None = None,
    takes_images: Callable[[Checkpoint], bool] = lambda model: True,
    components: Mapping[str, ComponentFactory] | None = None,
    bridges: Mapping[str, Bridge] | None = None,
    variants: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    full_precision: tuple[str, ...] = (),
    verify: str = "Reference.run",
) -> Family:
    """A family in the folder `models/<name>`: its `components`, `tiny` and `verify` are imported on first use.

    `components` are those beyond the encoder, the denoiser and the decoder. `name` is one of ours, never a user's.
    """
    loaders = {
        f"{name}.{role}": lazy_factory(f"{name}.components", f"load_{role}")
        for role in ("encoder", "denoiser", "decoder")
    }
    drawing = lazy("_diffusers.processor", "DrawingProcessor")
    return Family(
        name=name,
        architectures=architectures,
        pipeline=Path(__file__).parents[1] / name / "pipeline.yaml",
        components={**(components or {}), **loaders},
        bridges=bridges or {},
        processor=processor or (lambda model: drawing(takes_images=takes_images(model))),
        tiny=lazy(f"{name}.tiny", "write"),
        verify=lazy(f"{name}.verify", verify),
        variants=variants,
        aliases=aliases,
        plans_memory=True,
        full_precision=full_precision,
    )
