"""Frameworks of voice agents: speech, transcription, conversations."""

from __future__ import annotations

import asyncio
import io
import wave
from typing import Any

from .exchange import CITY, HELLO, KEY, exchange, need, spoken


async def frames_of(service: Any, frame: Any, until: type | None = None) -> list[Any]:
    """What a service of pipecat's makes of a frame, in a pipeline; `until` ends it, else it ends by itself."""
    from pipecat.frames.frames import EndFrame, ErrorFrame
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
            if until is not None and isinstance(frame, (until, ErrorFrame)):
                await task.queue_frame(EndFrame())

    task = PipelineTask(Pipeline([service, Collector()]))
    await task.queue_frames([frame] if until else [frame, EndFrame()])
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


@exchange("livekit-agents", "tools")
def livekit_tools(url: str, model: str) -> None:
    from livekit.agents.llm import ChatContext, function_tool
    from livekit.plugins import openai

    @function_tool
    async def weather(city: str) -> str:
        """The weather of a city."""
        return f"{city}: rain"

    async def run() -> list[str]:
        context = ChatContext.empty()
        context.add_message(role="user", content=CITY)
        chat = openai.LLM(model=model, base_url=url, api_key=KEY, max_completion_tokens=100)
        async with chat.chat(chat_ctx=context, tools=[weather], tool_choice="required") as stream:
            return [call.name async for chunk in stream if chunk.delta for call in chunk.delta.tool_calls]

    need("weather" in asyncio.run(run()))


@exchange("livekit-agents", "realtime")
def livekit_realtime(url: str, model: str) -> None:
    import aiohttp
    from livekit.plugins import openai

    async def run() -> int:
        async with aiohttp.ClientSession() as http:
            voice = openai.realtime.RealtimeModel(model=model, base_url=url, api_key=KEY, http_session=http)
            session = voice.session()
            errors: list[Any] = []
            session.on("error", errors.append)
            await session.update_instructions("Be brief.")
            frames = 0
            async with asyncio.timeout(120):
                answer = await session.generate_reply(instructions=HELLO)
                async for message in answer.message_stream:
                    frames += len([frame async for frame in message.audio_stream])
            await session.aclose()
        need(not errors, errors)
        return frames

    need(asyncio.run(run()))


@exchange("pipecat", "chat")
def pipecat_chat(url: str, model: str) -> None:
    from pipecat.frames.frames import LLMContextFrame, LLMTextFrame
    from pipecat.processors.aggregators.llm_context import LLMContext
    from pipecat.services.openai.llm import OpenAILLMService

    async def run() -> list[Any]:
        chat = OpenAILLMService(api_key=KEY, base_url=url, model=model)
        return await frames_of(chat, LLMContextFrame(LLMContext([{"role": "user", "content": HELLO}])))

    need(any(isinstance(frame, LLMTextFrame) and frame.text for frame in asyncio.run(run())))


@exchange("pipecat", "picture")
def pipecat_picture(url: str, model: str) -> None:
    import aiohttp
    from pipecat.frames.frames import URLImageRawFrame
    from pipecat.services.openai.image import OpenAIImageGenService

    async def run() -> list[Any]:
        async with aiohttp.ClientSession() as http:
            painter = OpenAIImageGenService(api_key=KEY, base_url=url, model=model, aiohttp_session=http)
            return [frame async for frame in painter.run_image_gen("a red fox")]

    frames = asyncio.run(run())
    need(any(isinstance(frame, URLImageRawFrame) and frame.image for frame in frames), frames)


@exchange("pipecat", "realtime")
def pipecat_realtime(url: str, model: str) -> None:
    from pipecat.frames.frames import ErrorFrame, LLMContextFrame, TTSAudioRawFrame
    from pipecat.processors.aggregators.llm_context import LLMContext
    from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService

    async def run() -> list[Any]:
        where = f"{url.replace('http', 'ws', 1)}/realtime"
        voice = OpenAIRealtimeLLMService(api_key=KEY, base_url=where, model=model)
        start = LLMContextFrame(LLMContext([{"role": "user", "content": HELLO}]))
        return await frames_of(voice, start, until=TTSAudioRawFrame)

    frames = asyncio.run(run())
    need(not any(isinstance(frame, ErrorFrame) for frame in frames), frames)
    need(any(isinstance(frame, TTSAudioRawFrame) for frame in frames), frames)


@exchange("openai-agents", "speech")
def agents_speech(url: str, model: str) -> None:
    import openai
    from agents.voice import OpenAITTSModel, TTSModelSettings

    async def run() -> bytes:
        client = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
        pieces = OpenAITTSModel(model, client).run("Hello there.", TTSModelSettings())
        return b"".join([piece async for piece in pieces])

    need(len(asyncio.run(run())) > 2000)


@exchange("openai-agents", "transcription")
def agents_transcription(url: str, model: str) -> None:
    import numpy as np
    import openai
    from agents.voice import AudioInput, OpenAISTTModel, STTModelSettings

    async def run() -> str:
        with wave.open(io.BytesIO(spoken(url, model))) as file:
            sound = AudioInput(np.frombuffer(file.readframes(10**7), np.int16), file.getframerate())
        client = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
        return await OpenAISTTModel(model, client).transcribe(sound, STTModelSettings(), False, False)

    need("cat" in asyncio.run(run()).lower())


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
