"""From files that other programs read to the layout that stages load."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from pathlib import Path

from omnistage.core.errors import CheckpointError, MissingDependencyError
from omnistage_starter.parts.store import PARTIAL


def gguf_to_folder(source: Path, folder: Path) -> None:
    """A language model in GGUF as a checkpoint folder: half-precision safetensors, tokenizer, chat template.

    The folder is there whole or not at all.
    """
    try:
        import gguf  # noqa: F401  (transformers reads the file with it)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("reading GGUF needs more: pip install 'omnistage[starter]'") from error
    import torch

    from omnistage.hf import transformers

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
    scratch = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder.parent))
    try:
        model.half().save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def torch_to_safetensors(source: Path, target: Path) -> None:
    """A file of PyTorch's that holds tensors by name as safetensors. Anything else in it is refused, not run."""
    import torch
    from safetensors.torch import save_file

    try:
        held = torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{source.name} does not hold weights only ({str(error).splitlines()[0]})") from error
    if not isinstance(held, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in held.values()):
        raise CheckpointError(f"{source.name} does not hold tensors by name")
    save_file({str(name): tensor.clone().contiguous() for name, tensor in held.items()}, target)


def characters_of(source: Path, target: Path) -> None:
    """The characters that an ONNX recogniser knows, from the notes in its file: one a line, in their order."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise MissingDependencyError("reading ONNX files needs more: pip install 'omnistage[starter]'") from error
    session = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    notes: dict[str, str] = session.get_modelmeta().custom_metadata_map
    if "character" not in notes:
        raise CheckpointError(f"{source.name} does not say which characters it knows")
    target.write_text("\n".join(notes["character"].splitlines()), encoding="utf-8")
