"""Fields that vLLM's and other servers' clients send beside OpenAI's: those with an effect, and those without one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from omnistage.core.messages import PLAIN_TEMPLATE, TemplateOptions
from omnistage.core.params import StructuredOutput
from omnistage.core.validation import field_error
from omnistage.server.observe.audit import note_ignored
from omnistage.server.openai.base import IgnoredOptions, WireModel, max_items, only
from omnistage.server.service import ServedModel

MAX_CHOICES = 1024
MAX_ALLOWED_IDS = 2**18
_MAX_VARIABLES = 64
_MAX_VARIABLE_CHARS = 4096
_GUIDED = "is the older form of structured_outputs; send that"
_LEAVE_OUT = "is not supported; leave it out"
_PROMPT_LOGPROBS = "log probabilities of the prompt are not computed; leave it out"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateVariables = Annotated[dict[str, str | int | float | bool | None], max_items(_MAX_VARIABLES)]


STRUCTURED_PATHS = {
    "structured": "structured_outputs",
    "structured.json_schema": "structured_outputs.json",
    "structured.structural_tag": "structured_outputs.structural_tag",
    "structured.regex": "structured_outputs.regex",
    "structured.grammar": "structured_outputs.grammar",
}


SGLANG_PATHS = {
    "structured": "regex",
    "structured.json_schema": "json_schema",
    "structured.regex": "regex",
    "structured.grammar": "ebnf",
}
"""Where the constraint came in SGLang's fields."""


class StructuredOutputs(WireModel):
    """vLLM's `structured_outputs`: exactly one constraint."""

    choice: Annotated[tuple[str, ...], max_items(MAX_CHOICES)] | None = Field(default=None, min_length=1)
    regex: str | None = None
    json_: dict[str, JsonValue] | str | None = Field(default=None, alias="json")
    grammar: str | None = Field(default=None, description="In xgrammar's EBNF.")
    json_object: bool | None = None
    structural_tag: str | None = Field(default=None, description="JSON of a format of xgrammar's structural tags.")
    disable_any_whitespace: Annotated[Literal[False] | None, only(False, why=_LEAVE_OUT)] = None
    disable_additional_properties: Annotated[Literal[False] | None, only(False, why=_LEAVE_OUT)] = None
    whitespace_pattern: Annotated[None, only(why=_LEAVE_OUT)] = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        kinds = (self.choice, self.regex, self.json_, self.grammar, self.json_object or None, self.structural_tag)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("needs exactly one of choice, regex, json, grammar, json_object, structural_tag")
        self.structured()
        return self

    def structured(self) -> StructuredOutput:
        if self.choice is not None:
            return StructuredOutput(grammar="root ::= " + " | ".join(map(json.dumps, self.choice)))
        if self.json_ is not None:
            return StructuredOutput(json_schema=self.json_)  # type: ignore[arg-type]  # of JSON's values
        if self.structural_tag is not None:
            try:
                tag = json.loads(self.structural_tag)
            except (ValueError, RecursionError):
                tag = None
            if not isinstance(tag, dict):
                raise field_error("structural_tag", "must be JSON of an object")
            return StructuredOutput(structural_tag=tag.get("format", tag))
        return StructuredOutput(regex=self.regex, grammar=self.grammar, json_object=bool(self.json_object))


class ExtensionFields(WireModel):
    """Of chats and completions."""

    ignored: ClassVar[Mapping[str, object]] = {
        "spaces_between_special_tokens": True,
        "request_id": None,
        "session_id": None,
        "stream_interval": 1,
    }
    """Fields without effect, with the value that asks for nothing."""

    structured_outputs: StructuredOutputs | None = None
    # SGLang's names of its kinds
    regex: str | None = Field(default=None, description="SGLang's form of structured_outputs.regex.")
    ebnf: str | None = Field(default=None, description="SGLang's form of structured_outputs.grammar.")
    json_schema: str | dict[str, JsonValue] | None = Field(
        default=None, description="SGLang's form of structured_outputs.json."
    )
    allowed_token_ids: Annotated[tuple[int, ...], max_items(MAX_ALLOWED_IDS)] | None = None
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Name the tokens of log probabilities by their ids, as `token_id:ID`."
    )
    spaces_between_special_tokens: bool | None = Field(default=None, description="Without effect.")
    request_id: str | None = Field(
        default=None, max_length=256, description="Without effect; send the header X-Request-Id."
    )
    session_id: str | None = Field(default=None, max_length=256, description="Without effect.")
    stream_interval: int | None = Field(
        default=None, ge=1, description="Without effect: events come with their tokens."
    )
    # Of which only the value that changes nothing is accepted
    add_special_tokens: Annotated[bool | None, only(False, why="is the model's own choice; leave it out")] = None
    use_beam_search: Annotated[Literal[False] | None, only(False, why="beam search is not supported")] = None
    length_penalty: Annotated[float | None, only(1, why="is for beam search, which is not supported")] = None
    early_stopping: Annotated[bool | None, only(False, why="is for beam search, which is not supported")] = None
    prompt_logprobs: Annotated[None, only(why=_PROMPT_LOGPROBS)] = None
    bad_words: Annotated[tuple[str, ...] | None, only([], why=f"{_LEAVE_OUT}, or send logit_bias")] = None
    logits_processors: Annotated[tuple[str, ...] | None, only([], why=_LEAVE_OUT)] = None
    mm_processor_kwargs: Annotated[IgnoredOptions | None, only({}, why=_LEAVE_OUT)] = None
    media_io_kwargs: Annotated[IgnoredOptions | None, only({}, why=_LEAVE_OUT)] = None
    cache_salt: Annotated[None, only(why="prefixes are shared by all requests; leave it out")] = None
    kv_transfer_params: Annotated[IgnoredOptions | None, only({}, why=_LEAVE_OUT)] = None
    vllm_xargs: Annotated[IgnoredOptions | None, only({}, why=_LEAVE_OUT)] = None
    ec_transfer_params: Annotated[IgnoredOptions | None, only({}, why=_LEAVE_OUT)] = None
    logprob_token_ids: Annotated[None, only(why="is not supported; send logprobs for the likeliest tokens")] = None
    repetition_detection: Annotated[None, only(why="is not supported; send frequency_penalty")] = None
    truncation_side: Annotated[None, only(why="a prompt is never cut; leave it out")] = None
    thinking_token_budget: Annotated[int | None, only(-1, why=_LEAVE_OUT)] = None
    watermarking: Annotated[Literal[False] | None, only(False, why=_LEAVE_OUT)] = None
    routed_experts_prompt_start: Annotated[int | None, only(0, why=_LEAVE_OUT)] = None
    return_token_offsets: Annotated[Literal[False] | None, only(False, why=_LEAVE_OUT)] = None
    return_prompt_text: Annotated[Literal[False] | None, only(False, why=_LEAVE_OUT)] = None
    return_mm_kwargs: Annotated[Literal[False] | None, only(False, why=_LEAVE_OUT)] = None
    mm_payload: Annotated[str | None, only("tensors", "none", why=_LEAVE_OUT)] = None
    guided_json: Annotated[None, only(why=_GUIDED)] = None
    guided_regex: Annotated[None, only(why=_GUIDED)] = None
    guided_choice: Annotated[None, only(why=_GUIDED)] = None
    guided_grammar: Annotated[None, only(why=_GUIDED)] = None

    @field_validator("regex", "ebnf", "json_schema")
    @classmethod
    def _alone(cls, value: object, info: ValidationInfo) -> object:
        others = ("structured_outputs", "regex", "ebnf")
        if value is not None and any(info.data.get(name) is not None for name in others):
            raise ValueError("cannot be combined; send one of structured_outputs, regex, ebnf, json_schema")
        return value

    @property
    def constraint_field(self) -> str | None:
        """The field that constrains the text, of those above."""
        for name in ("structured_outputs", "regex", "ebnf", "json_schema"):
            if getattr(self, name) is not None:
                return name
        return None

    def constraint(self) -> StructuredOutput | None:
        """What the text is constrained to, in vLLM's or SGLang's fields."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structured()
        if self.json_schema is not None:
            return StructuredOutput(json_schema=self.json_schema)  # type: ignore[arg-type]  # of JSON's values
        if self.regex is not None or self.ebnf is not None:
            return StructuredOutput(regex=self.regex, grammar=self.ebnf)
        return None

    def constraint_paths(self) -> Mapping[str, str]:
        """The parts of that constraint as the engines name them, and where the client sent them."""
        if self.structured_outputs is not None:
            return STRUCTURED_PATHS
        return {} if self.constraint_field is None else {**SGLANG_PATHS, "structured": self.constraint_field}

    def note_ignored(self) -> None:
        """Name the fields that were sent and have no effect in a header of the response."""
        for name in self.model_fields_set & self.ignored.keys():
            if getattr(self, name) not in (None, self.ignored[name]):
                note_ignored(name)


class TemplateFields(WireModel):
    """What a chat says about its template."""

    reasoning_effort: Effort | None = Field(
        default=None, description="none turns thinking off; others are for templates that know them."
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        default=None, description="Variables of the model's chat template, like enable_thinking."
    )
    continue_final_message: bool = Field(default=False, description="Continue the last message, an assistant's.")
    add_generation_prompt: bool = Field(default=True, description="Open the assistant's turn.")

    # Validators of fields: they cost nothing where a field is not sent, which is nearly always.
    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, variables: TemplateVariables | None) -> TemplateVariables | None:
        for name, value in (variables or {}).items():
            if isinstance(value, str) and len(value) > _MAX_VARIABLE_CHARS:
                raise field_error(name[:40], f"is over {_MAX_VARIABLE_CHARS} characters")
        if not isinstance((variables or {}).get("enable_thinking"), bool | None):
            raise field_error("enable_thinking", "must be true or false")
        return variables

    @field_validator("add_generation_prompt")
    @classmethod
    def _check_generation_prompt(cls, opens: bool, info: ValidationInfo) -> bool:
        if opens and info.data.get("continue_final_message"):
            raise ValueError("must be false where continue_final_message is true")
        return opens

    def template(self, model: ServedModel) -> TemplateOptions:
        """What else the template is told."""
        plain = not self.continue_final_message and self.add_generation_prompt
        if plain and self.reasoning_effort is None and not self.chat_template_kwargs:
            return PLAIN_TEMPLATE
        values = template_variables(model, self.reasoning_effort, self.chat_template_kwargs)
        if plain and not values:
            return PLAIN_TEMPLATE
        return TemplateOptions(values, self.continue_final_message, self.add_generation_prompt)


def thinking_of(effort: Effort | None, variables: TemplateVariables | None = None) -> bool | None:
    """Whether a request asks for thinking; None: the model's default."""
    enabled = (variables or {}).get("enable_thinking")
    if isinstance(enabled, bool):
        return enabled
    return False if effort == "none" else None


def template_variables(
    model: ServedModel,
    effort: Effort | None,
    variables: TemplateVariables | None = None,
    param: str = "reasoning_effort",
) -> dict[str, str | int | float | bool]:
    """What the model's template is told beside `enable_thinking`; the effort where it knows it, else it is noted."""
    values = {
        name: value for name, value in (variables or {}).items() if value is not None and name != "enable_thinking"
    }
    if effort is None or effort == "none" or "reasoning_effort" in values:
        return values
    if model.thinking is not None and model.thinking.has_variable("reasoning_effort"):
        return {**values, "reasoning_effort": effort}
    if effort != "medium":
        note_ignored(param)
    return values
