"""A model's folder on disk and the files in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from omnistage.core.errors import CheckpointError

_MAX_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk and the family that serves it."""

    folder: Path
    hf_config: dict[str, object]
    """config.json as it is; model_index.json for a diffusers model."""
    family: str
    name: str
    """What the user called the model."""

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def file(self, name: str) -> Path:
        """A file of the checkpoint. Raises `CheckpointError` where it is missing."""
        path = self.folder / name
        if not path.is_file():
            raise CheckpointError(f"{self.folder} has no {name}; the checkpoint is incomplete, fetch it again")
        return path

    def json(self, name: str) -> dict[str, object]:
        """A JSON object of the checkpoint."""
        return read_json(self.file(name))


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file of a checkpoint, or a `CheckpointError`."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes; it is not a model's JSON file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); fetch the file again") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON text; fetch the file again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not an object; it is not a model's JSON file")
    return data
