"""Frameworks that chat: their own way to texts, streams, tools and structured answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from .exchange import CITY, HELLO, KEY, PARAMETERS, SCHEMA, TOOL, exchange, need, openai_client


def langchain(url: str, model: str, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key=KEY, model=model, max_tokens=200, max_retries=0, **options)


@exchange("langchain-openai", "chat")
def langchain_chat(url: str, model: str) -> None:
    need(langchain(url, model).invoke(HELLO).content)


@exchange("langchain-openai", "stream")
def langchain_stream(url: str, model: str) -> None:
    need("".join(chunk.content for chunk in langchain(url, model, stream_usage=True).stream(HELLO)))


@exchange("langchain-openai", "tools")
def langchain_tools(url: str, model: str) -> None:
    need(langchain(url, model).bind_tools([TOOL], tool_choice="weather").invoke(CITY).tool_calls)


@exchange("langchain-openai", "structured")
def langchain_structured(url: str, model: str) -> None:
    schema = {"title": "City", "description": "A city.", **SCHEMA}
    need("city" in langchain(url, model).with_structured_output(schema, method="json_schema").invoke(CITY))


def llama_index(url: str, model: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=model, api_base=url, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_tokens=100
    )


@exchange("llama-index", "chat")
def llama_index_chat(url: str, model: str) -> None:
    from llama_index.core.llms import ChatMessage

    need(llama_index(url, model).chat([ChatMessage(role="user", content=HELLO)]).message.content)


@exchange("llama-index", "stream")
def llama_index_stream(url: str, model: str) -> None:
    need("".join(chunk.delta or "" for chunk in llama_index(url, model).stream_complete(HELLO)))


@exchange("llama-index", "tools")
def llama_index_tools(url: str, model: str) -> None:
    from llama_index.core.tools import FunctionTool

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"It rains in {city}."

    tool = FunctionTool.from_defaults(fn=weather)
    answer = llama_index(url, model).chat_with_tools([tool], user_msg=CITY, tool_choice="required")
    need(answer.message.additional_kwargs.get("tool_calls") or answer.message.blocks, answer)


@exchange("llama-index", "structured")
def llama_index_structured(url: str, model: str) -> None:
    from llama_index.core.llms import ChatMessage
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    answer = llama_index(url, model).as_structured_llm(City).chat([ChatMessage(role="user", content=CITY)])
    need(isinstance(answer.raw, City), answer)


def llm_command(url: str, model: str, *options: str) -> str:
    """The command, with the model in its own list of models."""
    with tempfile.TemporaryDirectory() as folder:
        entry = f"- model_id: ours\n  model_name: {model}\n  api_base: {url}\n"
        (Path(folder) / "extra-openai-models.yaml").write_text(
            f"{entry}  supports_schema: true\n  supports_tools: true\n"
        )
        command = [str(Path(sys.executable).parent / "llm"), "-m", "ours", *options]
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": KEY}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    need(done.returncode == 0, done.stderr[-250:])
    return done.stdout


@exchange("llm", "chat")
def llm_chat(url: str, model: str) -> None:
    need(llm_command(url, model, "--no-stream", "-o", "max_tokens", "20", HELLO).strip())


@exchange("llm", "stream")
def llm_stream(url: str, model: str) -> None:
    need(llm_command(url, model, "-o", "max_tokens", "20", HELLO).strip())


@exchange("llm", "tools")
def llm_tools(url: str, model: str) -> None:
    """The command offers tools and leaves the choice to the model."""
    need(llm_command(url, model, "-T", "llm_version", "--no-stream", "-o", "max_tokens", "20", HELLO).strip())


@exchange("llm", "structured")
def llm_structured(url: str, model: str) -> None:
    text = llm_command(url, model, "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "200", "--no-stream", CITY)
    need("city" in json.loads(text))


@exchange("instructor", "structured")
def instructor_structured(url: str, model: str) -> None:
    import instructor
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    client = instructor.from_openai(openai_client(url), mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": CITY}]
    options = {"model": model, "messages": messages, "response_model": City, "max_tokens": 200, "max_retries": 0}
    need(isinstance(client.chat.completions.create(**options), City))


@exchange("instructor", "stream")
def instructor_stream(url: str, model: str) -> None:
    import instructor
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    client = instructor.from_openai(openai_client(url), mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": CITY}]
    parts = client.chat.completions.create_partial(model=model, messages=messages, response_model=City, max_tokens=200)
    need(list(parts)[-1].city)


@exchange("instructor", "tools")
def instructor_tools(url: str, model: str) -> None:
    import instructor
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    client = instructor.from_openai(openai_client(url), mode=instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": CITY}]
    options = {"model": model, "messages": messages, "response_model": City, "max_tokens": 200, "max_retries": 0}
    need(isinstance(client.chat.completions.create(**options), City))


def pydantic_agent(url: str, model: str, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    chat = OpenAIChatModel(model, provider=pydantic_provider(url))
    return Agent(chat, model_settings={"max_tokens": 200}, retries=0, **options)


@exchange("pydantic-ai", "chat")
def pydantic_chat(url: str, model: str) -> None:
    need(pydantic_agent(url, model).run_sync(HELLO).output)


@exchange("pydantic-ai", "stream")
def pydantic_stream(url: str, model: str) -> None:
    async def run() -> str:
        async with pydantic_agent(url, model).run_stream(HELLO) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True)])

    need(asyncio.run(run()))


@exchange("pydantic-ai", "structured")
def pydantic_structured(url: str, model: str) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    need(isinstance(pydantic_agent(url, model, output_type=City).run_sync(CITY).output, City))


def pydantic_provider(url: str) -> Any:
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIProvider(base_url=url, api_key=KEY)


@exchange("pydantic-ai", "tools")
def pydantic_tools(url: str, model: str) -> None:
    """The tool's call is the answer: the model is made to call it, once."""
    agent = pydantic_agent(url, model, output_type=weather_of)
    need(agent.run_sync(CITY).output in ("Rome: rain", "Oslo: rain"))


def weather_of(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"{city}: rain"


@exchange("pydantic-ai", "picture")
def pydantic_picture(url: str, model: str) -> None:
    from pydantic_ai import ImageGenerator
    from pydantic_ai.images.openai import OpenAIImageGenerationModel

    painter = ImageGenerator(OpenAIImageGenerationModel(model, provider=pydantic_provider(url)))
    need(asyncio.run(painter.generate("a red fox")).images[0].content.data[:4] == b"\x89PNG")


@exchange("pydantic-ai", "realtime")
def pydantic_realtime(url: str, model: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.realtime import RealtimeTurnCompleteEvent
    from pydantic_ai.realtime.openai import OpenAIRealtimeModel

    async def run() -> list[str]:
        seen: list[str] = []
        voice = OpenAIRealtimeModel(model, provider=pydantic_provider(url))
        async with Agent(instructions="Be brief.").realtime(voice).session() as session:
            await session.send(HELLO)
            async with asyncio.timeout(90):
                async for event in session:
                    seen.append(type(event).__name__)
                    if isinstance(event, RealtimeTurnCompleteEvent):
                        break
        return seen

    seen = asyncio.run(run())
    need("RealtimeSessionErrorEvent" not in seen and "PartDeltaEvent" in seen, seen)


def agents(url: str, model: str, **options: Any) -> Any:
    import agents as library
    import openai

    library.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
    settings = library.ModelSettings(max_tokens=100, **options.pop("settings", {}))
    chat = library.OpenAIResponsesModel(model=model, openai_client=client)
    return library.Agent(name="a", instructions="Be brief.", model=chat, model_settings=settings, **options)


@exchange("openai-agents", "chat")
def agents_chat(url: str, model: str) -> None:
    from agents import Runner

    need(Runner.run_sync(agents(url, model), HELLO).final_output)


@exchange("openai-agents", "stream")
def agents_stream(url: str, model: str) -> None:
    from agents import Runner

    async def run() -> int:
        result = Runner.run_streamed(agents(url, model), HELLO)
        return len([event async for event in result.stream_events() if event.type == "raw_response_event"])

    need(asyncio.run(run()) > 3)


@exchange("openai-agents", "tools")
def agents_tools(url: str, model: str) -> None:
    from agents import Runner, function_tool

    called: list[str] = []

    @function_tool(strict_mode=False)
    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "It rains."

    Runner.run_sync(agents(url, model, tools=[weather], settings={"tool_choice": "required"}), CITY, max_turns=4)
    need(called)


@exchange("openai-agents", "structured")
def agents_structured(url: str, model: str) -> None:
    from agents import Runner
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    need(isinstance(Runner.run_sync(agents(url, model, output_type=City), CITY).final_output, City))


def haystack_chats(url: str, model: str, **options: Any) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.utils import Secret

    return OpenAIChatGenerator(api_key=Secret.from_token(KEY), model=model, api_base_url=url, **options)


@exchange("haystack", "chat")
def haystack_chat(url: str, model: str) -> None:
    from haystack.dataclasses import ChatMessage

    chat = haystack_chats(url, model, generation_kwargs={"max_tokens": 20})
    need(chat.run([ChatMessage.from_user(HELLO)])["replies"][0].text)


@exchange("haystack", "stream")
def haystack_stream(url: str, model: str) -> None:
    from haystack.dataclasses import ChatMessage

    pieces: list[str] = []
    options = {
        "generation_kwargs": {"max_tokens": 20},
        "streaming_callback": lambda chunk: pieces.append(chunk.content),
    }
    haystack_chats(url, model, **options).run([ChatMessage.from_user(HELLO)])
    need("".join(pieces))


@exchange("haystack", "tools")
def haystack_tools(url: str, model: str) -> None:
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool

    weather = Tool(name="weather", description="The weather.", parameters=PARAMETERS, function=weather_of)
    settings = {"max_tokens": 100, "tool_choice": "required"}
    chat = haystack_chats(url, model, tools=[weather], generation_kwargs=settings)
    need("city" in chat.run([ChatMessage.from_user(CITY)])["replies"][0].tool_calls[0].arguments)


@exchange("haystack", "structured")
def haystack_structured(url: str, model: str) -> None:
    from haystack.dataclasses import ChatMessage
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    chat = haystack_chats(url, model, generation_kwargs={"max_tokens": 200, "response_format": City})
    need(City.model_validate_json(chat.run([ChatMessage.from_user(CITY)])["replies"][0].text))


@exchange("haystack", "picture")
def haystack_picture(url: str, model: str) -> None:
    from haystack.components.generators import OpenAIImageGenerator
    from haystack.utils import Secret

    painter = OpenAIImageGenerator(model=model, api_key=Secret.from_token(KEY), api_base_url=url)
    need(painter.run("a red fox")["images"])


@exchange("smolagents", "chat")
def smolagents_chat(url: str, model: str) -> None:
    from smolagents import OpenAIModel

    chat = OpenAIModel(model_id=model, api_base=url, api_key=KEY, max_tokens=20)
    need(chat.generate([{"role": "user", "content": [{"type": "text", "text": HELLO}]}]).content)


@exchange("smolagents", "stream")
def smolagents_stream(url: str, model: str) -> None:
    from smolagents import OpenAIModel

    chat = OpenAIModel(model_id=model, api_base=url, api_key=KEY, max_tokens=20)
    messages = [{"role": "user", "content": [{"type": "text", "text": HELLO}]}]
    need("".join(piece.content or "" for piece in chat.generate_stream(messages)))


@exchange("smolagents", "tools")
def smolagents_tools(url: str, model: str) -> None:
    from smolagents import OpenAIModel, tool

    @tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return f"{city}: rain"

    chat = OpenAIModel(model_id=model, api_base=url, api_key=KEY, max_tokens=100)
    messages = [{"role": "user", "content": [{"type": "text", "text": CITY}]}]
    need(chat.generate(messages, tools_to_call_from=[weather]).tool_calls)


@exchange("smolagents", "structured")
def smolagents_structured(url: str, model: str) -> None:
    from smolagents import OpenAIModel

    chat = OpenAIModel(model_id=model, api_base=url, api_key=KEY, max_tokens=200)
    messages = [{"role": "user", "content": [{"type": "text", "text": CITY}]}]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    need("city" in json.loads(chat.generate(messages, response_format=form).content))
