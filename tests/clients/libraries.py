"""OpenAI's own client and litellm."""

from __future__ import annotations

import base64
import json
from typing import Any, Literal

from .exchange import CITY, HELLO, KEY, SCHEMA, TOOL, exchange, need, openai_client, spoken


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
