"""From a file that other programs read to the layout that stages load."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from omnistage.errors import MissingDependencyError
from omnistage.hf import transformers


def gguf_to_folder(source: Path, folder: Path) -> None:
    """A language model in GGUF as a checkpoint folder: half-precision safetensors, tokenizer, chat template.

    The folder is there whole or not at all.
    """
    try:
        import gguf  # noqa: F401  (transformers reads the file with it)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("reading GGUF needs more: pip install 'omnistage[starter]'") from error
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    transformers.utils.logging.disable_progress_bar()  # the caller has one
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    # The model remembers that it was quantised and refuses to change its precision: its weights go into a new one.
    config = loaded.config
    del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        model.half().save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
