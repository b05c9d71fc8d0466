"""The configuration of a stage whose language model is on another server."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from omnistage.config.scalars import ConfigModel, Count, Seconds, ServerUrl, VariableName
from omnistage.core.family import StageSettings
from omnistage.core.params import SamplingParams
from omnistage.core.types import Modality


class RemoteBudget(ConfigModel):
    """Limits of a stage on a remote server."""

    max_running: Count = Field(default=64, description="Requests sent to the server at once; others wait here.")
    connect_seconds: Seconds = Field(default=5.0, description="Until a connection is there.")
    first_token_seconds: Seconds = Field(
        default=120.0, description="Until the first token, the server's queue and the prompt included."
    )
    idle_seconds: Seconds = Field(default=60.0, description="Between two tokens.")
    check_seconds: Seconds = Field(default=5.0, description="Between two checks of the server while it is there.")
    start_seconds: Seconds = Field(default=900.0, description="Until a server that `command` starts is ready.")


class RemoteStageConfig(StageSettings):
    """A stage whose language model is on a server that speaks OpenAI's API."""

    engine: Literal["remote"]
    component: str = Field(default="remote", description="Not used: the server has the network.")
    device: None = Field(default=None, description="Not used: the server decides.")
    dtype: None = Field(default=None, description="Not used: the server decides.")
    url: ServerUrl = Field(max_length=1000, description="Address of the server, like http://127.0.0.1:8001/v1.")
    model: str = Field(min_length=1, max_length=500, description="Name of the model on that server.")
    server: Literal["vllm", "openai"] = Field(
        default="vllm", description="What it understands: vLLM's parameters, or OpenAI's alone."
    )
    api_key_env: VariableName | None = Field(
        default=None, description="Environment variable that holds the server's API key; null: it needs none."
    )
    chat_template_kwargs: dict[str, bool | int | str] = Field(
        default_factory=dict,
        description="Variables of the chat template, like `enable_thinking: false`; for vLLM.",
    )
    command: Annotated[tuple[str, ...], Field(min_length=1, max_length=200)] | None = Field(
        default=None, description="Program and arguments that start the server; null: it is started separately."
    )
    env: dict[VariableName, str] = Field(default_factory=dict, description="Environment variables of `command`.")
    log_file: str | None = Field(
        default=None, max_length=1000, description="Output of `command`; null: a new file in the temporary folder."
    )
    params: SamplingParams = Field(default_factory=SamplingParams)
    budget: RemoteBudget = Field(default_factory=RemoteBudget)

    @field_validator("output")
    @classmethod
    def _is_text(cls, output: Modality | None) -> Modality | None:
        if output not in (None, Modality.TEXT):
            raise ValueError(f"a remote stage outputs text, not {output}; use text, or null for no output")
        return output

    @model_validator(mode="after")
    def _has_a_template(self) -> Self:
        if self.chat_template_kwargs and self.server != "vllm":
            raise ValueError("chat_template_kwargs is not part of OpenAI's API; remove it, or use server: vllm")
        return self
