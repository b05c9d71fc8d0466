"""`/tokenize` and `/detokenize`, as vLLM has them: texts and chats as the model's tokens, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Self, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError
from omnistage.core.family import AnyProcessor, TokenText, TokenVocabulary
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.core.validation import field_error
from omnistage.media.context import decode_for
from omnistage.pipeline.intake import Prompt, RequestOptions
from omnistage.pipeline.preparation import lane_of, prepare
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import Rename, rename_param
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.routing import api_router
from omnistage.server.openai.base import WireModel, max_items, only
from omnistage.server.openai.chat.messages import UncheckedMessages
from omnistage.server.openai.extensions import TemplateFields, thinking_of
from omnistage.server.openai.tools import ToolFields
from omnistage.server.service import ServedModel, Service

router = api_router()
_MAX_IDS = 2**20
_Result = TypeVar("_Result")


class TokenizeRequest(TemplateFields, ToolFields):
    """`POST /tokenize`: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: UncheckedMessages | None = None
    add_special_tokens: Annotated[bool | None, only(True, why="is the model's own choice; leave it out")] = None
    return_token_strs: bool | None = Field(default=None, description="Also each token as the vocabulary spells it.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "cannot be combined with messages; send one of them")
        return self


class DetokenizeRequest(WireModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[tuple[int, ...], max_items(_MAX_IDS)] = Field(min_length=1)


class Tokens(TypedDict):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    prompt: str


@router.post("/tokenize", response_model=None, responses=response_docs(Tokens))
async def tokenize(body: TokenizeRequest, request: Request) -> JSONResponse:
    """The tokens of a text or a chat."""
    service, holder = service_of(request), caller(request)
    model = service.model(body.model)
    prompt: Prompt = list(body.messages) if body.messages is not None else body.prompt or ""
    options = RequestOptions(
        tools=() if body.toolbox is None else body.toolbox.specs(),
        thinking=thinking_of(body.reasoning_effort, body.chat_template_kwargs),
        template=body.template(model),
    )
    ids = await prompt_tokens(service, holder, model, prompt, options)
    if isinstance(ids, int):
        raise InvalidRequestError("has media or embeddings, which are no tokens; send text", param="messages")
    strings = None
    if body.return_token_strs:
        work = partial(_spellings, model, ids)
        strings = await _prepared(service, holder, model, OmniTokensPrompt(ids), RequestOptions(), work)
    stage = model.stage_for_params(SamplingParams)
    tokens: Tokens = {
        "count": len(ids),
        "max_model_len": None if stage is None else model.omni.orchestrator.stages[stage].max_model_len,
        "tokens": list(ids),
        "token_strs": strings,
    }
    return JSONResponse(tokens)


@router.post("/detokenize", response_model=None, responses=response_docs(Text))
async def detokenize(body: DetokenizeRequest, request: Request) -> JSONResponse:
    """The text of tokens."""
    service, holder = service_of(request), caller(request)
    model = service.model(body.model)
    prompt = OmniTokensPrompt(body.tokens)
    work = partial(decoded, model.omni.processor, prompt)
    text = await _prepared(service, holder, model, prompt, RequestOptions(), work)
    return JSONResponse({"prompt": text})


async def prompt_tokens(
    service: Service,
    holder: Holder,
    model: ServedModel,
    prompt: Prompt,
    options: RequestOptions,
    rename: Rename | None = None,
) -> tuple[int, ...] | int:
    """The tokens of a prompt; their number alone where some stand for media or embeddings."""
    if not isinstance(model.omni.processor, TokenText):
        raise UnsupportedModalityError("this model does not tokenise text; use a text model", param="model")
    work = partial(model.omni.tokens, prompt, options)
    return await _prepared(service, holder, model, prompt, options, work, rename)


async def text_tokens(service: Service, holder: Holder, model: ServedModel, text: str, rename: Rename) -> Sequence[int]:
    """The tokens of a text, also where the model does not hold so many."""
    processor = model.omni.processor
    if not isinstance(processor, TokenVocabulary):
        raise UnsupportedModalityError("this model does not tokenise text; use a text model", param="model")
    work = partial(processor.text_tokens, text)
    return await _prepared(service, holder, model, text, RequestOptions(["text"]), work, rename)


async def _prepared(
    service: Service,
    holder: Holder,
    model: ServedModel,
    prompt: Prompt,
    options: RequestOptions,
    work: Callable[[], _Result],
    rename: Rename | None = None,
) -> _Result:
    """What `work` gives, in a thread, as a request of the holder's."""
    preparation = Cancellation()
    try:
        with (
            service.run_without_stages(holder, model, preparation),
            decode_for(service.owner_of(holder)),
            cancellation_scope(preparation),
        ):
            return await prepare(work, preparation, lane_of(prompt, options.tools))
    except InvalidRequestError as error:
        raise rename_param(error, rename or {"prompt_token_ids": "tokens"}) from None


def _spellings(model: ServedModel, ids: Sequence[int]) -> list[str]:
    if not isinstance(model.omni.processor, TokenVocabulary):
        raise InvalidRequestError("is not supported by this model; leave it out", param="return_token_strs")
    return model.omni.processor.spellings(ids)


def decoded(processor: AnyProcessor, prompt: Any) -> str:
    """The text of a prompt of tokens. Raises `InvalidRequestError` for ids that there are not."""
    if not isinstance(processor, TokenText):
        raise UnsupportedModalityError("this model has no tokens of text; use one that has", param="model")
    ids: Sequence[int] = prompt.prompt_token_ids
    processor.tokens(prompt)
    return processor.decode(ids)
