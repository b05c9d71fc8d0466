"""Convert fetched files to the layout that stages load."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from pathlib import Path

from omnistage.core.errors import CheckpointError, MissingDependencyError
from omnistage_starter.parts.store import PARTIAL


def gguf_to_folder(source: Path, folder: Path) -> None:
    """Convert a GGUF language model to a checkpoint folder: half-precision safetensors, tokenizer, chat template.

    The folder appears complete or not at all.
    """
    try:
        import gguf  # noqa: F401  (transformers reads the file with it)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("reading GGUF needs the package gguf: pip install 'omnistage[starter]'") from error
    import torch

    from omnistage.hf import transformers

    source_options = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    transformers.utils.logging.disable_progress_bar()  # the caller has one
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source_options, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source_options)
    # A model that was loaded from quantised weights refuses to change its precision: copy the weights to a new one.
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
    """Convert a PyTorch file of named tensors to safetensors. Anything else in it is refused, not executed."""
    import torch
    from safetensors.torch import save_file

    try:
        tensors = torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{source.name} contains more than weights ({str(error).splitlines()[0]})") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{source.name} does not contain named tensors")
    save_file({str(name): tensor.clone().contiguous() for name, tensor in tensors.items()}, target)


def extract_characters(source: Path, target: Path) -> None:
    """Write the characters that an ONNX recogniser knows, from its metadata: one per line, in their order."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "reading ONNX files needs ONNX Runtime: pip install 'omnistage[starter]'"
        ) from error
    session = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
    if "character" not in metadata:
        raise CheckpointError(f"{source.name} does not list its characters in its metadata")
    target.write_text("\n".join(metadata["character"].splitlines()), encoding="utf-8")
