"""What a remote server is sent: a request's prompt and parameters in OpenAI's terms, or why it cannot be sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omnistage.config.remote import RemoteStageConfig
from omnistage.core.errors import InvalidRequestError, StageError, UnsupportedModalityError
from omnistage.core.messages import ChatMessage, TextPart, ToolCall
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.core.types import ARInput, ChatInput

Body = dict[str, Any]
RemotePayload = ARInput | ChatInput

_OPENAI = ("presence_penalty", "frequency_penalty", "logit_bias", "seed")
"""Parameters that both kinds of server take under our name, sent where they are set."""
_VLLM = (
    "min_tokens",
    "allowed_token_ids",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
"""The same of vLLM alone."""
_VLLM_ALWAYS = ("top_k", "min_p", "repetition_penalty")
"""Always sent to vLLM, which takes what is left out from the model's generation_config.json."""
_MAX_BIAS = 100.0
"""Servers cut larger values down to this."""
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def check_params(params: SamplingParams, config: RemoteStageConfig) -> None:
    """Raise for what the server cannot honour exactly."""
    for name, reason in _unsupported(params, config):
        raise InvalidRequestError(f"is not supported by this stage's server ({reason}); leave it out", param=name)


def _unsupported(params: SamplingParams, config: RemoteStageConfig) -> Iterator[tuple[str, str]]:
    defaults = SamplingParams()
    unsupported = ["suppress_token_ids"] if config.server == "vllm" else ["suppress_token_ids", *_VLLM, *_VLLM_ALWAYS]
    for name in unsupported:
        if getattr(params, name) != getattr(defaults, name):
            yield name, f"it is no parameter of {'vLLM' if config.server == 'vllm' else 'OpenAI'}'s API"
    if params.lora:
        yield "lora", "its adapters are models of its own"
    if any(abs(bias) > _MAX_BIAS for bias in (params.logit_bias or {}).values()):
        yield "logit_bias", f"values must be within ±{_MAX_BIAS:g}"
    structured = params.structured
    is_json = structured is None or structured.json_schema is not None or structured.json_object
    if config.server == "openai" and not is_json:
        yield "structured", "OpenAI's API has JSON schemas and JSON objects alone"


def check_payload(payload: RemotePayload) -> None:
    """Raise for a prompt that is not text or tokens."""
    if isinstance(payload, ChatInput):
        kinds = {type(part).__name__ for message in payload.messages for part in message.parts}
        if kinds - {TextPart.__name__}:
            raise UnsupportedModalityError(
                "the language model of this pipeline is on a server that is sent text alone; send text",
                param="messages",
            )
        return
    if payload.streaming or payload.side_rows is not None or payload.positions is not None:
        raise StageError("a stage on a remote server starts from a whole prompt, and accepts no rows of other stages")
    if payload.embeds is not None:
        raise InvalidRequestError(
            "embeddings cannot be sent to the server of this stage; send text or token ids", param="prompt_embeds"
        )
    if payload.media:
        raise UnsupportedModalityError(
            "the language model of this pipeline is on a server that is sent text alone; send text", param="messages"
        )


def request_body(
    payload: RemotePayload, params: SamplingParams, config: RemoteStageConfig, max_length: int | None
) -> tuple[str, Body]:
    """The path and the body of a request. `max_length` is the server's longest sequence, where it is known."""
    chat = isinstance(payload, ChatInput) and bool(payload.messages)
    body: Body = {"model": config.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _sampling(params, config)
    body |= _logprobs(params, chat=chat)
    max_tokens = params.max_tokens
    if isinstance(payload, ARInput):
        if payload.seed is not None and params.seed is None:
            body["seed"] = payload.seed
        max_tokens = payload.num_tokens or max_tokens
        if max_length is not None:  # the rest of the context, as on the engine for local models
            max_tokens = max(1, min(max_tokens, max_length - len(payload.token_ids)))
    if chat and config.server == "openai":
        body["max_completion_tokens"] = max_tokens  # newer models refuse the other name
    else:
        body["max_tokens"] = max_tokens
    if isinstance(payload, ARInput):
        return _COMPLETIONS, body | {"prompt": list(payload.token_ids)}
    if payload.messages:
        return _CHAT, body | _conversation(payload, config)
    if payload.prompt is not None:
        return _COMPLETIONS, body | {"prompt": payload.prompt}
    if payload.tokens is None:
        raise StageError("a conversation without messages, prompt or tokens")
    return _COMPLETIONS, body | {"prompt": list(payload.tokens.prompt_token_ids)}


def _sampling(params: SamplingParams, config: RemoteStageConfig) -> Body:
    body: Body = {"temperature": params.temperature, "top_p": params.top_p, "n": params.n}
    names: tuple[str, ...] = _OPENAI
    if config.server == "vllm":
        body |= {name: getattr(params, name) for name in _VLLM_ALWAYS} | {"return_token_ids": True}
        names = (*_OPENAI, *_VLLM)
    defaults = SamplingParams()
    body |= {name: value for name in names if (value := getattr(params, name)) != getattr(defaults, name)}
    if params.stop:
        body["stop"] = list(params.stop)
    if params.structured is not None:
        body |= _structured(params.structured)
    return body


def _structured(structured: StructuredOutput) -> Body:
    if structured.json_object:
        return {"response_format": {"type": "json_object"}}
    if structured.json_schema is not None:
        schema = structured.json_schema
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    if structured.regex is not None:
        return {"structured_outputs": {"regex": structured.regex}}
    if structured.grammar is not None:
        return {"structured_outputs": {"grammar": structured.grammar}}
    tag = {"type": "structural_tag", "format": structured.structural_tag}
    return {"structured_outputs": {"structural_tag": json.dumps(tag)}}


def _logprobs(params: SamplingParams, *, chat: bool) -> Body:
    if params.logprobs is None:
        return {}
    return {"logprobs": True, "top_logprobs": params.logprobs} if chat else {"logprobs": params.logprobs}


# ----------------------------------------------------------------------------------------------- conversations


def _conversation(payload: ChatInput, config: RemoteStageConfig) -> Body:
    body: Body = {"messages": [_message(message) for message in payload.messages]}
    if config.chat_template_kwargs:
        body["chat_template_kwargs"] = dict(config.chat_template_kwargs)
    if payload.tools:
        body["tools"] = [dict(tool) for tool in payload.tools]
        # vLLM shows the model its tools all the same, and leaves calls in the text, where the service looks for them.
        body["tool_choice"] = "none" if config.server == "vllm" else "auto"
    return body


def _message(message: ChatMessage) -> Mapping[str, object]:
    wire: dict[str, object] = {"role": message.role, "content": _text(message)}
    if message.name is not None and message.role != "tool":
        wire["name"] = message.name
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        wire["tool_calls"] = [_tool_call(call, number) for number, call in enumerate(message.tool_calls)]
    return wire


def _text(message: ChatMessage) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, TextPart))


def _tool_call(call: ToolCall, number: int) -> Mapping[str, object]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id or f"call_{number}", "type": "function", "function": function}


def call_text(calls: Sequence[tuple[str, str]]) -> str:
    """Calls that the server has parsed, as (name, arguments), in the form in which the service reads them."""
    bodies = (f'{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}' for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
