"""What each client does with the service: `python exchanges.py CLIENT URL MODEL`, with that client's packages.

Every function is one real exchange and raises where the answer is not what the client promises. One JSON line each.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.metadata
import inspect
import io
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import traceback
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

KEY = "none"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}
HELLO = "Say hello to Ann."
CITY = "Name a city."
EXCHANGES: dict[str, dict[str, Callable[[str, str], Any]]] = {}
PACKAGES = {
    "llama-index": "llama-index-llms-openai-like",
    "pydantic-ai": "pydantic-ai-slim",
    "pipecat": "pipecat-ai",
    "haystack": "haystack-ai",
    "vllm-bench": "vllm",
}


def exchange(client: str, way: str) -> Callable[[Callable[[str, str], Any]], Callable[[str, str], Any]]:
    def add(function: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
        EXCHANGES.setdefault(client, {})[way] = function
        return function

    return add


def need(condition: object, what: object = "") -> None:
    if not condition:
        raise AssertionError(f"not as promised: {what!r}"[:300])


def sound(seconds: float = 1.0, rate: int = 16_000) -> bytes:
    """A WAV file with a tone."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        count = int(seconds * rate)
        file.writeframes(struct.pack(f"<{count}h", *(int(8000 * math.sin(i / 9)) for i in range(count))))
    return buffer.getvalue()


def spoken(url: str, model: str) -> bytes:
    """A WAV file with words, by the service itself."""
    import urllib.request

    body = json.dumps({"model": model, "input": "The cat sat on the mat.", "response_format": "wav", "voice": "alloy"})
    request = urllib.request.Request(f"{url}/audio/speech", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        data: bytes = answer.read()
    return data


# ------------------------------------------------------------------------------------------------------- openai


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120)


@exchange("openai", "chat")
def openai_chat(url: str, model: str) -> None:
    client = openai_client(url)
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": HELLO}], max_tokens=20)
    need(answer.choices[0].message.content, answer)
    first = client.responses.create(model=model, input=HELLO, max_output_tokens=10)
    second = client.responses.create(
        model=model, input="And again.", previous_response_id=first.id, max_output_tokens=10
    )
    need(second.output_text and client.responses.retrieve(second.id).id == second.id, second)


@exchange("openai", "stream")
def openai_stream(url: str, model: str) -> None:
    stream = openai_client(url).chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": HELLO}],
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    need(chunks[-1].usage.completion_tokens, chunks[-1])


@exchange("openai", "tools")
def openai_tools(url: str, model: str) -> None:
    answer = openai_client(url).chat.completions.create(
        model=model, messages=[{"role": "user", "content": CITY}], tools=[TOOL], tool_choice="required", max_tokens=100
    )
    need("city" in json.loads(answer.choices[0].message.tool_calls[0].function.arguments), answer)


@exchange("openai", "structured")
def openai_structured(url: str, model: str) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    answer = openai_client(url).chat.completions.parse(
        model=model, messages=[{"role": "user", "content": CITY}], response_format=City, max_tokens=200
    )
    need(isinstance(answer.choices[0].message.parsed, City), answer)


@exchange("openai", "speech")
def openai_speech(url: str, model: str) -> None:
    data = openai_client(url).audio.speech.create(model=model, voice="alloy", input="Hello there.", speed=1.2).content
    need(len(data) > 2000)


@exchange("openai", "transcription")
def openai_transcription(url: str, model: str) -> None:
    answer = openai_client(url).audio.transcriptions.create(model=model, file=("a.wav", spoken(url, model)))
    need("cat" in answer.text.lower(), answer)


@exchange("openai", "picture")
def openai_picture(url: str, model: str) -> None:
    answer = openai_client(url).images.generate(model=model, prompt="a red fox", size="1024x1024")
    need(base64.b64decode(answer.data[0].b64_json)[:4] == b"\x89PNG", answer.size)


@exchange("openai", "realtime")
def openai_realtime(url: str, model: str) -> None:
    with openai_client(url).realtime.connect(model=model) as connection:
        connection.session.update(session={"type": "realtime", "audio": {"output": {"voice": "alloy"}}})
        connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO}]}
        )
        connection.response.create(response={"max_output_tokens": 20})
        seen = set()
        for event in connection:
            seen.add(event.type)
            need(event.type != "error", event)
            if event.type == "response.done":
                break
        need("response.output_audio.delta" in seen, seen)


# ------------------------------------------------------------------------------------------------------ litellm


def litellm_options(url: str, model: str) -> dict[str, Any]:
    return {"model": f"openai/{model}", "api_base": url, "api_key": KEY, "timeout": 120}


@exchange("litellm", "chat")
def litellm_chat(url: str, model: str) -> None:
    import litellm

    messages = [{"role": "user", "content": HELLO}]
    need(litellm.completion(**litellm_options(url, model), messages=messages, max_tokens=10).choices[0].message.content)


@exchange("litellm", "stream")
def litellm_stream(url: str, model: str) -> None:
    import litellm

    messages = [{"role": "user", "content": HELLO}]
    chunks = list(litellm.completion(**litellm_options(url, model), messages=messages, max_tokens=10, stream=True))
    need("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@exchange("litellm", "tools")
def litellm_tools(url: str, model: str) -> None:
    import litellm

    messages = [{"role": "user", "content": CITY}]
    answer = litellm.completion(
        **litellm_options(url, model), messages=messages, tools=[TOOL], tool_choice="required", max_tokens=100
    )
    need(answer.choices[0].message.tool_calls, answer)


@exchange("litellm", "structured")
def litellm_structured(url: str, model: str) -> None:
    import litellm

    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(
        **litellm_options(url, model),
        messages=[{"role": "user", "content": CITY}],
        response_format=form,
        max_tokens=200,
    )
    need("city" in json.loads(answer.choices[0].message.content))


@exchange("litellm", "speech")
def litellm_speech(url: str, model: str) -> None:
    import litellm

    need(len(litellm.speech(**litellm_options(url, model), voice="alloy", input="Hello there.").content) > 2000)


@exchange("litellm", "transcription")
def litellm_transcription(url: str, model: str) -> None:
    import litellm

    answer = litellm.transcription(**litellm_options(url, model), file=("a.wav", spoken(url, model)))
    need("cat" in answer.text.lower(), answer)


@exchange("litellm", "picture")
def litellm_picture(url: str, model: str) -> None:
    import litellm

    need(litellm.image_generation(**litellm_options(url, model), prompt="a red fox").data[0].b64_json)


# -------------------------------------------------------------------------------------------- frameworks of chats


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

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client(url), mode=mode)
        messages = [{"role": "user", "content": CITY}]
        answer = client.chat.completions.create(
            model=model, messages=messages, response_model=City, max_tokens=200, max_retries=0
        )
        need(isinstance(answer, City), answer)


def pydantic_agent(url: str, model: str, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key=KEY))
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


@exchange("openai-agents", "realtime")
def agents_realtime(url: str, model: str) -> None:
    from agents.realtime import RealtimeAgent, RealtimeRunner

    async def run() -> set[str]:
        where = f"{url.replace('http', 'ws', 1)}/realtime?model={model}"
        runner = RealtimeRunner(
            RealtimeAgent(name="a", instructions="Be brief."),
            config={"model_settings": {"model_name": model, "voice": "alloy"}},
        )
        seen: set[str] = set()
        async with await runner.run(model_config={"url": where, "api_key": KEY}) as session:
            await session.send_message(HELLO)
            async with asyncio.timeout(90):
                async for event in session:
                    seen.add(event.type)
                    need(event.type != "error", event)
                    if event.type == "agent_end":
                        return seen
        return seen

    need("audio" in asyncio.run(run()))


@exchange("haystack", "chat")
def haystack_chat(url: str, model: str) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    settings = {"max_tokens": 20}
    chat = OpenAIChatGenerator(
        api_key=Secret.from_token(KEY), model=model, api_base_url=url, generation_kwargs=settings
    )
    need(chat.run([ChatMessage.from_user(HELLO)])["replies"][0].text)


@exchange("haystack", "stream")
def haystack_stream(url: str, model: str) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    pieces: list[str] = []
    chat = OpenAIChatGenerator(
        api_key=Secret.from_token(KEY),
        model=model,
        api_base_url=url,
        generation_kwargs={"max_tokens": 20},
        streaming_callback=lambda chunk: pieces.append(chunk.content),
    )
    chat.run([ChatMessage.from_user(HELLO)])
    need("".join(pieces))


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


# -------------------------------------------------------------------------------------------- frameworks of voices


async def frames_of(service: Any, frame: Any) -> list[Any]:
    """What a service of pipecat's makes of a frame, in a pipeline."""
    from pipecat.frames.frames import EndFrame
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.runner import PipelineRunner
    from pipecat.pipeline.task import PipelineTask
    from pipecat.processors.frame_processor import FrameProcessor

    seen: list[Any] = []

    class Collector(FrameProcessor):
        async def process_frame(self, frame: Any, direction: Any) -> None:
            await super().process_frame(frame, direction)
            seen.append(frame)
            await self.push_frame(frame, direction)

    task = PipelineTask(Pipeline([service, Collector()]))
    await task.queue_frames([frame, EndFrame()])
    await asyncio.wait_for(PipelineRunner(handle_sigint=False).run(task), 90)
    return seen


@exchange("pipecat", "speech")
def pipecat_speech(url: str, model: str) -> None:
    from pipecat.frames.frames import TTSAudioRawFrame, TTSSpeakFrame
    from pipecat.services.openai.tts import OpenAITTSService

    async def run() -> list[Any]:
        speech = OpenAITTSService(api_key=KEY, base_url=url, model=model, voice="alloy")
        return await frames_of(speech, TTSSpeakFrame("Hello there."))

    need(any(isinstance(frame, TTSAudioRawFrame) for frame in asyncio.run(run())))


@exchange("pipecat", "transcription")
def pipecat_transcription(url: str, model: str) -> None:
    from pipecat.frames.frames import TranscriptionFrame
    from pipecat.services.openai.stt import OpenAISTTService

    async def run() -> list[Any]:
        service = OpenAISTTService(api_key=KEY, base_url=url, model=model)
        return [frame async for frame in service.run_stt(spoken(url, model))]

    need(any(isinstance(frame, TranscriptionFrame) and frame.text for frame in asyncio.run(run())))


@exchange("livekit-agents", "chat")
def livekit_chat(url: str, model: str) -> None:
    from livekit.agents.llm import ChatContext
    from livekit.plugins import openai

    async def run() -> str:
        context = ChatContext.empty()
        context.add_message(role="user", content=HELLO)
        chat = openai.LLM(model=model, base_url=url, api_key=KEY, max_completion_tokens=20)
        async with chat.chat(chat_ctx=context) as stream:
            return "".join([chunk.delta.content or "" async for chunk in stream if chunk.delta])

    need(asyncio.run(run()))


@exchange("livekit-agents", "speech")
def livekit_speech(url: str, model: str) -> None:
    import aiohttp
    from livekit.plugins import openai

    async def run() -> int:
        async with aiohttp.ClientSession():
            speech = openai.TTS(model=model, base_url=url, api_key=KEY)
            return len([frame async for frame in speech.synthesize("Hello there.")])

    need(asyncio.run(run()))


@exchange("livekit-agents", "transcription")
def livekit_transcription(url: str, model: str) -> None:
    from livekit import rtc
    from livekit.plugins import openai

    async def run() -> str:
        with wave.open(io.BytesIO(spoken(url, model))) as file:
            rate, data = file.getframerate(), file.readframes(10**7)
        frame = rtc.AudioFrame(data, rate, 1, len(data) // 2)
        event = await openai.STT(model=model, base_url=url, api_key=KEY).recognize(frame)
        return str(event.alternatives[0].text)

    need(asyncio.run(run()))


# -------------------------------------------------------------------------------------------------- load tools


def tool(*command: str, seconds: float = 200) -> str:
    program, *options = command
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *options],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    need(done.returncode == 0, (done.stdout + done.stderr)[-280:])
    return done.stdout + done.stderr


@exchange("guidellm", "load")
def guidellm_load(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{HELLO} {i}"}) + "\n" for i in range(8)))
        report = Path(folder) / "report.json"
        options = ["--target", url.removesuffix("/v1"), "--model", model, "--profile", "concurrent", "--rate", "2"]
        options += ["--max-requests", "6", "--data", str(prompts), "--output-path", str(report)]
        tool("guidellm", "benchmark", *options)
        (bench,) = json.loads(report.read_text())["benchmarks"]
        requests = bench["requests"]
        need(len(requests["successful"]) >= 6 and not requests["errored"], {k: len(v) for k, v in requests.items()})


@exchange("aiperf", "load")
def aiperf_load(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--model", model, "--url", url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming"]
        options += ["--request-count", "6", "--concurrency", "2", "--tokenizer", "builtin", "--ui", "none"]
        options += [
            "--output-artifact-dir",
            folder,
            "--synthetic-input-tokens-mean",
            "20",
            "--output-tokens-mean",
            "10",
        ]
        tool("aiperf", "profile", *options)
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        need(json.loads(report.read_text())["request_count"]["avg"] >= 6)


@exchange("vllm-bench", "load")
def vllm_load(url: str, model: str) -> None:
    options = ["bench", "serve", "--backend", "openai-chat", "--base-url", url.removesuffix("/v1"), "--model", model]
    options += ["--endpoint", "/v1/chat/completions", "--dataset-name", "random", "--num-prompts", "6"]
    options += ["--random-input-len", "20", "--random-output-len", "10", "--skip-tokenizer-init"]
    need("Successful requests" in tool("vllm", *options))


def main() -> None:
    name, url, model = sys.argv[1:4]
    version = importlib.metadata.version(PACKAGES.get(name, name))
    print(json.dumps({"version": version}), flush=True)
    for way, function in EXCHANGES[name].items():
        try:
            need(not inspect.isawaitable(function(url, model)))
            result = "ok"
        except Exception as error:  # the table says what became of each
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"[:400]
        print(json.dumps({"ways": {way: result}}), flush=True)


if __name__ == "__main__":
    main()
