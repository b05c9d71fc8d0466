"""The families of diffusers models differ in a name, a list of pipelines and their own modules; the rest is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from omnistage.core.family import AnyProcessor, Bridge, ComponentFactory, Family, LoadContext

if TYPE_CHECKING:
    from omnistage.core.checkpoint import Checkpoint
    from omnistage.core.verification import ModelRunner


def drawing_family(
    name: str,
    architectures: tuple[str, ...],
    *,
    processor: Callable[[Checkpoint], AnyProcessor] | None = None,
    components: Mapping[str, ComponentFactory] | None = None,
    bridges: Mapping[str, Bridge] | None = None,
    variants: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Family:
    """A family in the folder `models/<name>`: its `components`, `tiny` and `verify` are imported on first use.

    `components` are those beyond the encoder, the denoiser and the decoder. `name` is one of ours, never a user's.
    """

    def part(module: str) -> ModuleType:
        return import_module(f"omnistage.models.{name}.{module}")

    def factory(role: str) -> ComponentFactory:
        def load(context: LoadContext) -> object:
            component: object = getattr(part("components"), f"load_{role}")(context)
            return component

        return load

    def tiny(folder: Path, **options: object) -> None:
        part("tiny").write(folder, **options)

    def verify(runner: ModelRunner, **options: object) -> object:
        rows: object = part("verify").run(runner, **options)
        return rows

    return Family(
        name=name,
        architectures=architectures,
        pipeline=Path(__file__).parents[1] / name / "pipeline.yaml",
        components={
            **(components or {}),
            **{f"{name}.{role}": factory(role) for role in ("encoder", "denoiser", "decoder")},
        },
        bridges=bridges or {},
        processor=processor or _takes_pictures,
        tiny=tiny,
        verify=verify,
        variants=variants,
        aliases=aliases,
        plans_memory=True,
    )


def _takes_pictures(model: Checkpoint) -> AnyProcessor:
    from omnistage.models._diffusers.processor import DrawingProcessor

    return DrawingProcessor(takes_images=True)
