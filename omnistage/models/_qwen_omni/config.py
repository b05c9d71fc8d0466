"""Reading config.json of a Qwen-Omni checkpoint."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError
from omnistage.hf import transformers
from omnistage.models.loading import positive


def read_sections(folder: Path, name: str, codec: str, *, speaks: bool | None = None) -> Any:
    """config.json as `transformers`' class `name`, with all sections that are needed; `codec` is the vocoder's.

    `speaks` None: as the file says.
    """
    raw = read_json(folder / "config.json")
    if speaks is None:
        speaks = bool(raw.get("enable_audio_output", True))
    for section in ("thinker_config", "talker_config", codec)[: 3 if speaks else 1]:
        # `transformers` would take its defaults for a section that is not there.
        if not isinstance(raw.get(section), dict):
            raise CheckpointError(f"config.json in {folder} has no section {section}; fetch the file again")
    try:
        config = _parse(name, folder, json.dumps(raw))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"config.json in {folder} is no {name}: {error}") from error
    positive(config.thinker_config.text_config, "vocab_size")
    return copy.deepcopy(config)


@lru_cache(maxsize=4)
def _parse(name: str, folder: Path, content: str) -> Any:
    """Each stage needs it twice, and `transformers` takes a fifth of a second for it. The content may change."""
    del content
    return getattr(transformers, name).from_pretrained(folder, local_files_only=True)
