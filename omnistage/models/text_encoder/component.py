"""Encoders as one-shot modules: texts of all requests in padded batches of similar lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import InternalError, PromptTooLongError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import CodecParams
from omnistage.core.types import TOKEN_IDS, Modality, ModuleInput, ModuleOutput, RequestInfo
from omnistage.engines.codec.module import UNFINISHED, Job, ModuleComponent, ModulePayload, Unfinished
from omnistage.hf import transformers
from omnistage.models.loading import Checkpoint, check_complete, load_model, read_auto_config
from omnistage.models.text_encoder.layout import Layout, read_layout
from omnistage.models.text_encoder.processor import LENGTHS, SEGMENTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_RUN_TOKENS, _FORWARD_TOKENS = 32_768, 8192
"""Tokens of one run, after which others have their turn, and of one forward, padding included."""
_PROBE_LENGTHS = (11, 5)
_PROBE_TOLERANCE = {torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 5e-2
"""Relative to the largest value: of a padded row against the row by itself."""
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": F.gelu,
    "torch.nn.modules.linear.Identity": lambda value: value,
}


@dataclass(frozen=True, slots=True)
class _Row:
    """One text of one job."""

    job: int
    ids: np.ndarray
    segments: np.ndarray


class TextModule(ModuleComponent):
    """A network of transformers that gives a vector for each text. Subclasses make it of the network's output."""

    uses_torch = True
    max_batch = 64
    output: str

    def __init__(self, model: PreTrainedModel, device: torch.device, pad_token: int | None) -> None:
        self.model = model
        self._device = device
        self._pad = pad_token or 0
        parameters = inspect.signature(model.forward).parameters
        self._takes_segments = "token_type_ids" in parameters
        self.max_tokens = _positions(model)
        self._results: dict[str, list[np.ndarray]] = {}
        """Of jobs that are not done, by request."""
        if pad_token is None and self.output == Modality.SCORES:
            self.max_batch = 1  # transformers finds the last token of several rows by their padding
        self._pads = self.max_batch > 1 and self._pads_exactly()

    def pooled(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        """The vectors `[rows, n]` of a forward over texts that are as long as `mask` says."""
        raise NotImplementedError

    def check(self, info: RequestInfo, params: CodecParams, payload: ModulePayload) -> None:
        del info, params
        longest = int(_arrays(payload)[LENGTHS].max())
        if self.max_tokens is not None and longest > self.max_tokens:
            raise PromptTooLongError(
                f"has {longest} tokens, and the model takes {self.max_tokens}; shorten it", param="input"
            )

    def run(self, jobs: Sequence[Job]) -> list[ModuleOutput | Unfinished]:
        batches: list[list[_Row]] = []
        for number, job in enumerate(jobs):
            rows = _rows(number, job)[len(self._results.get(job.info.request_id, ())) :]
            batches.append(_first(rows, _RUN_TOKENS // len(jobs)))
        order = sorted((row for rows in batches for row in rows), key=lambda row: len(row.ids), reverse=True)
        vectors: dict[int, np.ndarray] = {}
        while order:
            count = self._batch(order)
            for row, vector in zip(order[:count], self._forward(order[:count]), strict=True):
                vectors[id(row)] = vector
            order = order[count:]
        results: list[ModuleOutput | Unfinished] = []
        for job, rows in zip(jobs, batches, strict=True):  # only now: a run that failed has changed nothing
            so_far = self._results.setdefault(job.info.request_id, [])
            so_far += [vectors[id(row)] for row in rows]
            if len(so_far) < len(_arrays(job.payload)[LENGTHS]):
                results.append(UNFINISHED)
            else:
                results.append(ModuleOutput({self.output: np.stack(so_far)}))
        return results

    def forget(self, request_id: str) -> None:
        self._results.pop(request_id, None)

    def _batch(self, rows: Sequence[_Row]) -> int:
        """How many of these rows, longest first, share the next forward."""
        longest = len(rows[0].ids)
        shortest = longest // 2 if self._pads else longest
        limit = max(1, min(len(rows), _FORWARD_TOKENS // longest)) if self.max_batch > 1 else 1
        return next((place for place in range(1, limit) if len(rows[place].ids) < shortest), limit)

    @torch.inference_mode()
    def _forward(self, rows: Sequence[_Row]) -> list[np.ndarray]:
        """Padded at the end, whatever the model: its mask hides that, and causal models never see it."""
        longest = len(rows[0].ids)
        ids = np.full((len(rows), longest), self._pad, dtype=np.int64)
        segments, mask = np.zeros_like(ids), np.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row.ids)], segments[place, : len(row.ids)] = row.ids, row.segments
            mask[place, : len(row.ids)] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._takes_segments and segments.any():
            inputs["token_type_ids"] = segments
        tensors = {name: torch.from_numpy(value).to(self._device) for name, value in inputs.items()}
        vectors = self.pooled(self.model(**tensors), tensors["attention_mask"])
        return list(vectors.float().cpu().numpy())

    def _pads_exactly(self) -> bool:
        """Whether a text's vector is the same beside a longer one: not where a model looks past its mask."""
        rows = [_Row(0, np.arange(1, length + 1), np.zeros(length, np.int64)) for length in _PROBE_LENGTHS]
        lone, padded = self._forward(rows[1:])[0], self._forward(rows)[1]
        tolerance = _PROBE_TOLERANCE.get(self.model.dtype, _LOW_PRECISION_TOLERANCE)
        return bool(np.abs(lone - padded).max() <= tolerance * max(np.abs(lone).max(), 1e-6))


class Embedder(TextModule):
    """Hidden states, pooled as the checkpoint's layout says."""

    output = str(Modality.EMBEDDING)

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        pad_token: int | None,
        layout: Layout,
        dense: Sequence[tuple[nn.Linear, str]] = (),
    ) -> None:
        self._layout = layout
        self._dense = dense
        super().__init__(model, device, pad_token)

    def pooled(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        hidden = output.last_hidden_state
        vectors = torch.cat([_pool(hidden, mask, mode) for mode in self._layout.pooling], dim=1)
        for linear, activation in self._dense:
            vectors = _ACTIVATIONS[activation](linear(vectors))
        return F.normalize(vectors, p=2, dim=1) if self._layout.normalize else vectors


class Classifier(TextModule):
    """Logits of a sequence classifier."""

    output = str(Modality.SCORES)

    def pooled(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        del mask
        logits: torch.Tensor = output.logits
        return logits


def _pool(hidden: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """One vector for each row of `hidden [rows, tokens, n]`."""
    lengths, weights = mask.sum(dim=1, keepdim=True), mask.unsqueeze(-1).to(hidden.dtype)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths[:, 0] - 1]
    if mode == "max":
        return hidden.masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(dim=1)
    if mode == "weightedmean":
        weights = (
            weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)[None, :, None]
        )
        return (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    total = (hidden * weights).sum(dim=1)
    return total / (lengths.to(hidden.dtype).sqrt() if mode == "mean_sqrt_len" else lengths.to(hidden.dtype))


def _arrays(payload: ModulePayload) -> dict[str, np.ndarray]:
    if not isinstance(payload, ModuleInput):
        raise InternalError(f"an encoder takes a ModuleInput, not a {type(payload).__name__}")
    return dict(payload.arrays)


def _rows(number: int, job: Job) -> list[_Row]:
    arrays = _arrays(job.payload)
    ends = np.cumsum(arrays[LENGTHS])
    starts = ends - arrays[LENGTHS]
    return [
        _Row(number, arrays[TOKEN_IDS][start:end], arrays[SEGMENTS][start:end])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def _first(rows: Sequence[_Row], budget: int) -> list[_Row]:
    """At least one row, and as many as the budget of tokens holds."""
    batch: list[_Row] = []
    for row in rows:
        budget -= len(row.ids)
        if batch and budget < 0:
            break
        batch.append(row)
    return batch


def _positions(model: PreTrainedModel) -> int | None:
    """Positions of a learned embedding; some models leave those up to their padding's out."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None


# --------------------------------------------------------------------------------------------------- loading


def load_embedder(context: LoadContext) -> Embedder:
    folder = context.model.folder
    config, layout = read_auto_config(folder), read_layout(folder)
    encoders, models = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING, transformers.MODEL_MAPPING
    cls = encoders[type(config)] if type(config) in encoders else models.get(type(config), None)
    if cls is None or isinstance(cls, tuple):
        raise UnsupportedModelError(f"transformers has no text model for {type(config).__name__}")
    model = _load(context, cls, config, "pooler.")  # which no pooling reads
    dense = [_load_dense(path, context) for path in layout.dense]
    return Embedder(model, context.device, config.pad_token_id, layout, dense)


def load_classifier(context: LoadContext) -> Classifier:
    config = read_auto_config(context.model.folder)
    mapping = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in mapping:
        raise UnsupportedModelError(f"transformers has no sequence classifier for {type(config).__name__}")
    model = _load(context, mapping[type(config)], config, None)
    return Classifier(model, context.device, config.pad_token_id)


def _load(
    context: LoadContext, cls: type[PreTrainedModel], config: PreTrainedConfig, unused: str | None
) -> PreTrainedModel:
    tensors = Checkpoint(context.model.folder).tensors()
    return load_model(cls, config, tensors, context.device, context.dtype, attention=None, unused=unused)


def _load_dense(folder: Path, context: LoadContext) -> tuple[nn.Linear, str]:
    """A linear layer behind the pooling, with the name of its activation."""
    config, tensors = read_json(folder / "config.json"), Checkpoint(folder).tensors("linear.")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{folder.name} has the activation {activation}, which is not served")
    outputs, inputs = tensors["weight"].shape
    linear = nn.Linear(inputs, outputs, bias="bias" in tensors)
    info = linear.load_state_dict(tensors, strict=False)
    check_complete(folder.name, {"missing_keys": info.missing_keys, "mismatched_keys": ()})
    return linear.to(context.device, context.dtype).eval().requires_grad_(False), activation
