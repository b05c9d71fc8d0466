"""`omnistage tiny`: write a small checkpoint with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnistage.cli.common import out, progress_bar
from omnistage.core.errors import InvalidRequestError, UnsupportedModelError

if TYPE_CHECKING:
    from omnistage.core.family import Family

_MARKER_FILES = frozenset({"config.json", "tokenizer.json", "model_index.json"})
_CHECKPOINT_FILES = frozenset({".json", ".safetensors", ".txt", ".pt", ".jinja"})


def tiny(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="A model family, like qwen2_5_omni or causal_lm.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the checkpoint.")],
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same weights.", min=0)] = 0,
    scale: Annotated[
        float,
        typer.Option(metavar="X", help="0: the smallest that works; 1: the true shapes, gigabytes.", min=0.0, max=1.0),
    ] = 0.0,
    variant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which kind of checkpoint, where the family has several, like schnell or i2v."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there already.")] = False,
) -> None:
    """Make a small checkpoint of FAMILY in DIR, with random weights.

    It has all the parts of a real one and loads through the same code, so a whole pipeline can be tried and tested
    in seconds, without a download. Its output is noise.

    Examples:

    ```
    omnistage tiny qwen2_5_omni out/tiny
    omnistage tiny causal_lm out/lm --seed 7 --scale 0.2
    omnistage tiny flux out/schnell --variant schnell
    ```
    """
    model_family = find_family(family)
    if model_family.tiny is None:
        raise UnsupportedModelError(f"the family {model_family.name} has no small checkpoint", param="FAMILY")
    options = _variant(model_family, variant)
    if folder.exists() and not folder.is_dir():
        raise InvalidRequestError(f"{folder} is a file; name a folder", param="DIR")
    if folder.is_dir() and any(folder.iterdir()):
        if not force:
            raise InvalidRequestError(f"{folder} is not empty; name another folder or add --force", param="DIR")
        remove_checkpoint(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with progress_bar(f"making a small {model_family.name}") as report:
        model_family.tiny(folder, seed=seed, scale=scale, progress=report, **options)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    console = out()
    console.print(f"wrote {folder} ({size / 2**20:.1f} MiB)", soft_wrap=True)
    console.print(f"try: omnistage generate {folder} 'Hello'", soft_wrap=True)


def _variant(family: Family, name: str | None) -> dict[str, str]:
    """The options of a family's `tiny` for `--variant`. Raises, before anything is removed, for an unknown one."""
    if name is None:
        return {}
    from omnistage.core.validation import short_repr

    variants = family.variants
    if not variants:
        raise InvalidRequestError(f"the family {family.name} has no variants; omit it", param="--variant")
    if name not in variants:
        raise InvalidRequestError(f"there is no {short_repr(name)}; known: {', '.join(variants)}", param="--variant")
    return {"variant": name}


def remove_checkpoint(folder: Path) -> None:
    """Delete the files of a checkpoint. Raises, and deletes nothing, if the folder holds anything else."""
    parts = _part_folders(folder)
    entries = [*folder.iterdir(), *(path for part in parts for path in part.iterdir())]
    foreign = [
        path.name
        for path in entries
        if path not in parts and (not path.is_file() or path.suffix not in _CHECKPOINT_FILES)
    ]
    # config.json is written last, so one that was interrupted has none.
    if foreign or not any(path.name in _MARKER_FILES or path.suffix == ".safetensors" for path in entries):
        raise InvalidRequestError(
            f"{folder} is not just a checkpoint ({', '.join(sorted(foreign)[:3]) or 'it has no weights'}), "
            "so --force does not replace it; name another folder",
            param="DIR",
        )
    for path in entries:
        if path not in parts:
            path.unlink()
    for part in parts:
        part.rmdir()


def _part_folders(folder: Path) -> list[Path]:
    """The folders of a diffusers checkpoint's parts, by its index."""
    from omnistage.core.checkpoint import read_json

    index = folder / "model_index.json"
    names = list(read_json(index)) if index.is_file() else []
    return [part for part in folder.iterdir() if part.name in names and part.is_dir() and not part.is_symlink()]


def find_family(name: str) -> Family:
    """A family by its name or an alias. Raises `UnsupportedModelError`."""
    from omnistage.core.graph import did_you_mean
    from omnistage.core.validation import short_repr
    from omnistage.models.registry import REGISTRY

    families = REGISTRY.families()
    for family in families.values():
        if name == family.name or name in family.aliases:
            return family
    near = did_you_mean(name, families, limit=3)
    raise UnsupportedModelError(f"there is no family {short_repr(name)}; {near}", param="FAMILY")
