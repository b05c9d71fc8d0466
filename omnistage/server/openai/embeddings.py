"""`/v1/embeddings`, `/v1/score`, `/v1/rerank` and `/v1/moderations`: models that give numbers for texts."""

from __future__ import annotations

import base64
import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

import numpy as np
from fastapi import Request, Response
from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict

from omnistage.core.errors import InvalidRequestError, StageError, UnsupportedModalityError
from omnistage.core.types import Modality, TextBatch
from omnistage.models.text_encoder.processor import MAX_TEXTS, EncoderProcessor
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.routing import api_router, json_response
from omnistage.server.openai.base import WireModel
from omnistage.server.openai.request_models import Finite
from omnistage.server.openai.running import final_output, with_model_name
from omnistage.server.service import ServedModel

router = api_router()
_SMALL_RESPONSE = 4096
"""Numbers of a response that are written in the event loop."""
_SMALL_TEXT = 65_536
"""The same, in characters of documents that are sent back."""
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
"""Names of prompts, as sentence-transformers looks for them."""
_HARMLESS = frozenset(("ok", "safe", "neutral", "non-toxic", "not toxic", "nontoxic", "benign", "normal", "clean"))
"""Names of the class of a classifier that stands for none of the others."""
_FLAGGED = 0.5
_TextInput = str | tuple[str, ...]
_Input = str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...]


def _parse_texts(value: object) -> _TextInput:
    """By the types of a list's items: pydantic would keep an error for each of many."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        _check_count(value)
        if set(map(type, value)) == {str}:
            return tuple(value)
    raise ValueError("must be a text or a list of texts, and not empty")


def _parse_input(value: object) -> _Input:
    if isinstance(value, list | tuple) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return tuple(value)
        if kinds <= {list, tuple}:
            _check_count(value)
            if all(set(map(type, ids)) == {int} for ids in value):
                return tuple(map(tuple, value))
            raise ValueError("token ids must be lists of whole numbers, none of them empty")
    return _parse_texts(value)


def _check_count(value: Sequence[object]) -> None:
    if len(value) > MAX_TEXTS:
        raise ValueError(f"{len(value)} texts exceed the limit of {MAX_TEXTS}; send fewer")


Texts = Annotated[_TextInput, PlainValidator(_parse_texts), WithJsonSchema(TypeAdapter(_TextInput).json_schema())]


class EmbeddingRequest(WireModel):
    """`POST /v1/embeddings`."""

    model: str | None = Field(default=None, description="May be left out where one model is served.")
    input: Annotated[_Input, PlainValidator(_parse_input), WithJsonSchema(TypeAdapter(_Input).json_schema())]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, description="Cut to so many, then scaled to length 1.")
    user: str | None = None
    # Ours
    prompt_name: str | None = Field(default=None, description="A prompt of the checkpoint, written before each text.")
    timeout: Finite | None = None


class ScoreRequest(WireModel):
    """`POST /v1/score`: one text against several, or as many pairs as there are texts in each."""

    model: str | None = Field(default=None, description="May be left out where one model is served.")
    text_1: Texts
    text_2: Texts
    timeout: Finite | None = None


class RerankDocument(WireModel):
    text: str


class RerankRequest(WireModel):
    """`POST /v1/rerank`, as with Jina and Cohere."""

    model: str | None = Field(default=None, description="May be left out where one model is served.")
    query: str = Field(min_length=1)
    documents: list[str | RerankDocument] = Field(min_length=1, max_length=MAX_TEXTS)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    timeout: Finite | None = None


class ModerationRequest(WireModel):
    """`POST /v1/moderations`."""

    model: str | None = Field(default=None, description="May be left out where one model is served.")
    input: Texts
    timeout: Finite | None = None


class EncodingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """With `encoding_format` base64, an embedding is its little-endian float32 values."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EncodingUsage


class ScoreItem(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: EncodingUsage


class RerankedText(TypedDict):
    text: str


class RerankItem(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RerankedText]


class RerankList(TypedDict):
    """Best first."""

    id: str
    model: str
    results: list[RerankItem]
    usage: EncodingUsage


class ModerationItem(TypedDict):
    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text"]]]


class Moderation(TypedDict):
    """The categories are the model's classes."""

    id: str
    model: str
    results: list[ModerationItem]


@router.post("/v1/embeddings", response_model=None, responses=response_docs(EmbeddingList))
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text."""
    body = with_model_name(body, service_of(request).model(body.model))
    model, processor = _encoder(request, body.model, Modality.EMBEDDING)
    _check_dimensions(processor, body.dimensions)
    texts = _as_batch(body.input)
    prefix = _prompt(processor, body.prompt_name)
    if prefix:
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError("a prompt cannot be put before token ids; send texts", param="prompt_name")
        texts = tuple(f"{prefix}{text}" for text in texts)
    vectors, usage = await _run(request, model, TextBatch(texts), body.timeout)
    if body.dimensions is not None:
        vectors = _cut(vectors, body.dimensions)
    plain = body.encoding_format == "float"

    def build() -> EmbeddingList:
        items: list[EmbeddingItem] = [
            {"object": "embedding", "index": index, "embedding": row.tolist() if plain else _base64(row)}
            for index, row in enumerate(vectors)
        ]
        return {"object": "list", "data": items, "model": body.model or "", "usage": usage}

    owner = service_of(request).owner_of(caller(request))
    return await json_response(build, small=vectors.size <= _SMALL_RESPONSE, owner=owner)


@router.post("/v1/score", response_model=None, responses=response_docs(ScoreList))
async def score(body: ScoreRequest, request: Request) -> Response:
    """How well texts go together: a cross-encoder's score of each pair, or the cosine of two embeddings."""
    body = with_model_name(body, service_of(request).model(body.model))
    firsts, seconds = _as_texts(body.text_1), _as_texts(body.text_2)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequestError(
            f"has {len(firsts)} texts and text_2 has {len(seconds)}; send one, or as many", param="text_1"
        )
    names = _names("text_1", body.text_1, len(firsts)), _names("text_2", body.text_2, len(seconds))
    scores, usage = await _relevance(request, body.model, firsts, seconds, body.timeout, names)
    items: list[ScoreItem] = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    head: ScoreList = {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or "",
        "data": items,
        "usage": usage,
    }
    return await json_response(lambda: head, small=True, owner=None)


@router.post("/v1/rerank", response_model=None, responses=response_docs(RerankList))
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Documents by how well they answer a query, best first."""
    body = with_model_name(body, service_of(request).model(body.model))
    documents = tuple(one if isinstance(one, str) else one.text for one in body.documents)
    queries = (body.query,) * len(documents)
    names = ["query"] * len(documents), [f"documents[{i}]" for i in range(len(documents))]
    scores, usage = await _relevance(request, body.model, queries, documents, body.timeout, names)
    order = sorted(range(len(documents)), key=lambda place: -scores[place])[: body.top_n]
    items: list[RerankItem] = [{"index": place, "relevance_score": scores[place]} for place in order]
    if body.return_documents:
        for item in items:
            item["document"] = {"text": documents[item["index"]]}
    ranked: RerankList = {
        "id": f"rerank-{secrets.token_hex(16)}",
        "model": body.model or "",
        "results": items,
        "usage": usage,
    }
    size = sum(map(len, documents)) if body.return_documents else len(documents)
    owner = service_of(request).owner_of(caller(request))
    return await json_response(lambda: ranked, small=size <= _SMALL_TEXT, owner=owner)


@router.post("/v1/moderations", response_model=None, responses=response_docs(Moderation))
async def moderations(body: ModerationRequest, request: Request) -> Response:
    """Which classes of a sequence classifier texts belong to."""
    body = with_model_name(body, service_of(request).model(body.model))
    model, processor = _encoder(request, body.model, Modality.SCORES)
    harmless = [label for label in processor.labels if label.lower().replace("_", " ") in _HARMLESS]
    if not processor.multi_label and len(harmless) != 1:
        raise UnsupportedModalityError(
            "this classifier names no harmless class and is not a multi-label one, so what it would flag is unknown; "
            "use another",
            param="model",
        )
    logits, _usage = await _run(request, model, TextBatch(_as_texts(body.input)), body.timeout)
    scores = _sigmoid(logits) if processor.multi_label else _softmax(logits)
    results = [_moderation(processor.labels, row, processor.multi_label, harmless) for row in scores.tolist()]
    moderation: Moderation = {"id": f"modr-{secrets.token_hex(16)}", "model": body.model or "", "results": results}
    return await json_response(lambda: moderation, small=scores.size <= _SMALL_RESPONSE, owner=None)


def _moderation(labels: Sequence[str], scores: Sequence[float], multi: bool, harmless: Sequence[str]) -> ModerationItem:
    best = max(scores)
    flags = {
        label: (value >= _FLAGGED if multi else value == best)
        for label, value in zip(labels, scores, strict=True)
        if label not in harmless
    }
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": {label: value for label, value in zip(labels, scores, strict=True) if label in flags},
        "category_applied_input_types": {label: ["text"] for label in flags},
    }


# ------------------------------------------------------------------------------------------------- running


def _encoder(request: Request, name: str | None, *kinds: Modality) -> tuple[ServedModel, EncoderProcessor]:
    """A model that gives one of these outputs. Raises for any other."""
    model = service_of(request).model(name)
    processor = model.omni.processor
    if not isinstance(processor, EncoderProcessor) or not set(kinds) & set(model.omni.modalities):
        outputs = ", ".join(model.omni.modalities)
        raise UnsupportedModalityError(
            f"this model gives {outputs}, not {' or '.join(kinds)}; use one that does", param="model"
        )
    return model, processor


async def _run(
    request: Request, model: ServedModel, batch: TextBatch, timeout: float | None, names: Sequence[str] | None = None
) -> tuple[np.ndarray, EncodingUsage]:
    """The numbers of all texts `[texts, n]`. `names` are those of the texts, in errors; by default `input[i]`."""
    options = RequestOptions(timeout=timeout)

    def rename(path: str) -> str:
        match = re.fullmatch(r"input\[(\d+)\]", path)
        return path if names is None or match is None else names[int(match[1])]

    running = service_of(request).run_request(caller(request), model, batch, None, options, rename=rename)
    final = await final_output(running)
    tokens = final.usage.prompt_tokens
    (numbers,) = final.arrays.values()
    check_finite(numbers)
    return numbers, {"prompt_tokens": tokens, "total_tokens": tokens}


def check_finite(numbers: np.ndarray) -> None:
    """Raise where a model gave what JSON has no numbers for; clients would get null in their place."""
    if not np.isfinite(numbers).all():
        raise StageError("the model gave numbers that are not finite; check its weights, or use dtype float32")


async def _relevance(
    request: Request,
    name: str | None,
    firsts: Sequence[str],
    seconds: Sequence[str],
    timeout: float | None,
    names: tuple[Sequence[str], Sequence[str]],
) -> tuple[list[float], EncodingUsage]:
    """The score of each pair. `names` are those of the texts, in errors."""
    for text, field in zip((*firsts, *seconds), (*names[0], *names[1]), strict=True):
        if not text:
            raise InvalidRequestError("is empty; send a text", param=field)
    model, processor = _encoder(request, name, Modality.SCORES, Modality.EMBEDDING)
    if Modality.SCORES in model.omni.modalities:
        if len(processor.labels) != 1:
            raise UnsupportedModalityError(
                f"this model has {len(processor.labels)} classes and no single score; use a cross-encoder "
                "with one, or an embedding model",
                param="model",
            )
        # A pair is read as one text: what is too long is told of its second.
        logits, usage = await _run(request, model, TextBatch(tuple(firsts), tuple(seconds)), timeout, names[1])
        scores = _sigmoid(logits[:, 0]) if processor.scores_sigmoid else logits[:, 0]
        return scores.tolist(), usage
    # Each text once: a query that stands before every document is encoded with the first.
    before, behind = _prompt(processor, *_QUERY), _prompt(processor, *_DOCUMENT)
    texts_by_row: dict[str, str] = {}
    for prefix, side, fields in ((before, firsts, names[0]), (behind, seconds, names[1])):
        for text, field in zip(side, fields, strict=True):
            texts_by_row.setdefault(f"{prefix}{text}", field)
    texts = tuple(texts_by_row)
    vectors, usage = await _run(request, model, TextBatch(texts), timeout, tuple(texts_by_row.values()))
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    row = {text: place for place, text in enumerate(texts)}
    left = unit[[row[f"{before}{text}"] for text in firsts]]
    right = unit[[row[f"{behind}{text}"] for text in seconds]]
    return (left * right).sum(axis=1).tolist(), usage


def _prompt(processor: EncoderProcessor, *names: str | None) -> str:
    """The text of the first of these prompts that the checkpoint has; without a name its default."""
    if names == (None,):
        return processor.prompts.get(processor.default_prompt or "", "")
    prompt_names = [name for name in names if name is not None and name in processor.prompts]
    if not prompt_names and names not in (_QUERY, _DOCUMENT):
        has = f"its prompts: {', '.join(processor.prompts)}" if processor.prompts else "it has none"
        raise InvalidRequestError(f"this model has no prompt of this name; {has}", param="prompt_name")
    return processor.prompts[prompt_names[0]] if prompt_names else ""


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def _names(field: str, value: _TextInput, count: int) -> list[str]:
    """The names of so many texts in errors; one text may stand for all of them."""
    return [field] * count if isinstance(value, str) else [f"{field}[{min(i, len(value) - 1)}]" for i in range(count)]


def _as_texts(value: _TextInput) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _as_batch(value: _Input) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value[0], int):
        return (value,)
    return value


def _check_dimensions(processor: EncoderProcessor, dimensions: int | None) -> None:
    if dimensions is None:
        return
    if processor.dimensions is None:
        raise InvalidRequestError(
            "this model's embeddings may not be cut; leave it out, or say `is_matryoshka: true` in its config.json "
            "where it was trained for that",
            param="dimensions",
        )
    if processor.size is not None and dimensions > processor.size:
        raise InvalidRequestError(f"is {dimensions}, and the model gives {processor.size}", param="dimensions")
    if processor.dimensions and dimensions not in processor.dimensions:
        raise InvalidRequestError(f"must be one of {', '.join(map(str, processor.dimensions))}", param="dimensions")


def _cut(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    if dimensions > vectors.shape[1]:
        raise InvalidRequestError(f"is {dimensions}, and the model gives {vectors.shape[1]}", param="dimensions")
    cut = vectors[:, :dimensions]
    shorter: np.ndarray = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
    return shorter


def _sigmoid(values: np.ndarray) -> np.ndarray:
    scores: np.ndarray = 1.0 / (1.0 + np.exp(-values.astype(np.float64)))
    return scores


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values.astype(np.float64) - values.max(axis=-1, keepdims=True))
    scores: np.ndarray = powers / powers.sum(axis=-1, keepdims=True)
    return scores
