"""Every field of OpenAI's, vLLM's and vLLM-Omni's clients, by endpoint: what becomes of it, with a value to try.

`tools/make_field_table.py` writes the table of docs/api.md from this; `test_field_table.py` sends one request a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["yes", "ignored", "refused"]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": SCHEMA}


@dataclass(frozen=True)
class Row:
    """One field of one endpoint; `beside` are fields that it goes with, `why` says what is ignored or refused."""

    value: Any
    outcome: Outcome = "yes"
    why: str = ""
    beside: dict[str, Any] = field(default_factory=dict)


def yes(value: Any, **beside: Any) -> Row:
    return Row(value, beside=beside)


def ignored(value: Any, why: str) -> Row:
    return Row(value, "ignored", why)


def refused(value: Any, why: str, **beside: Any) -> Row:
    return Row(value, "refused", why, beside)


_SAMPLED: dict[str, Row] = {
    "temperature": yes(0.5),
    "top_p": yes(0.9),
    "top_k": yes(5),
    "min_p": yes(0.1),
    "presence_penalty": yes(0.5),
    "frequency_penalty": yes(0.5),
    "repetition_penalty": yes(1.1),
    "seed": yes(-3),
    "stop": yes(["end"]),
    "stream": yes(True),
    "model": yes("lm"),
    "user": yes("u"),
    "ignore_eos": yes(True),
    "include_stop_str_in_output": yes(True, stop=["a"]),
    "structured_outputs": yes({"choice": ["on", "off"]}),
    "lora": yes([{"name": "french", "weight": 0.5}]),
    "priority": yes(1),
    "timeout": yes(30),
}
_TEXT: dict[str, Row] = {
    **_SAMPLED,
    "n": yes(2),
    "logit_bias": yes({"5": 1}),
    "min_tokens": yes(1),
    "stop_token_ids": yes([5]),
    "allowed_token_ids": yes([5, 6, 7]),
    "skip_special_tokens": yes(False),
    "return_token_ids": yes(True),
    "stream_options": yes({"include_usage": True, "continuous_usage_stats": True}, stream=True),
    "spaces_between_special_tokens": ignored(False, "the tokenizer decides"),
    "request_id": ignored("mine", "the header X-Request-Id names a request"),
    "add_special_tokens": refused(True, "the tokenizer decides"),
    "use_beam_search": refused(True, "no beam search"),
    "length_penalty": refused(2.0, "no beam search"),
    "early_stopping": refused(True, "no beam search"),
    "prompt_logprobs": refused(1, "the prompt's are not computed"),
    "truncate_prompt_tokens": refused(5, "a prompt is never cut"),
    "bad_words": refused(["x"], "use logit_bias"),
    "logits_processors": refused(["x"], "no code of clients is run"),
    "mm_processor_kwargs": refused({"a": 1}, "the checkpoint's processor decides"),
    "media_io_kwargs": refused({"a": {}}, "the service's limits decide"),
    "return_tokens_as_token_ids": refused(True, "use return_token_ids"),
    "cache_salt": refused("x", "prefixes are shared"),
    "kv_transfer_params": refused({"a": 1}, "no such transfer"),
    "vllm_xargs": refused({"a": 1}, "no such extensions"),
    "guided_json": refused({}, "the older form of structured_outputs"),
    "guided_regex": refused("a", "the older form of structured_outputs"),
    "guided_choice": refused(["a"], "the older form of structured_outputs"),
    "guided_grammar": refused("a", "the older form of structured_outputs"),
}
_OPEN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_OF_OPENAI: dict[str, Row] = {
    "metadata": yes({"a": "b"}),
    "safety_identifier": yes("s"),
    "prompt_cache_key": yes("k"),
    "prompt_cache_retention": yes("24h"),
    "prompt_cache_options": yes({"mode": "implicit"}),
    "service_tier": yes("auto"),
    "parallel_tool_calls": yes(False),
    "moderation": refused({"model": "m"}, "no such filter; see --content-filter"),
}
_SOUND_ONLY = "speech has none; for diffusion models that generate sound"
FIELDS: dict[str, dict[str, Row]] = {
    "chat/completions": {
        **_TEXT,
        **_OF_OPENAI,
        "messages": yes([{"role": "user", "content": "Hi"}]),
        "max_tokens": yes(3),
        "max_completion_tokens": yes(3),
        "modalities": yes(["text"]),
        "audio": yes({"voice": "alloy"}, model="starter", modalities=["text", "audio"]),
        "logprobs": yes(True),
        "top_logprobs": yes(2, logprobs=True),
        "response_format": yes({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        "tools": yes([{"type": "function", "function": FUNCTION}]),
        "tool_choice": yes("none", tools=[{"type": "function", "function": FUNCTION}]),
        "prediction": yes({"type": "content", "content": "x"}),
        "verbosity": ignored("low", "the model decides"),
        "reasoning_effort": ignored("high", "where the chat template does not know it; `none` turns thinking off"),
        "chat_template_kwargs": yes({"enable_thinking": False}),
        "continue_final_message": yes(
            True,
            add_generation_prompt=False,
            messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        "add_generation_prompt": yes(True),
        "use_audio_in_video": yes(False),
        "drawing": yes({"steps": 1}, model="starter", modalities=["image"]),
        "store": refused(True, "chats are not stored; /v1/responses are"),
        "functions": refused([FUNCTION], "the older form of tools"),
        "function_call": refused("auto", "the older form of tool_choice"),
        "web_search_options": refused({}, "no web search"),
        "documents": refused([{"a": "b"}], "send them as messages"),
        "chat_template": refused("x", "the model's own is used"),
        "echo": refused(True, "send continue_final_message"),
        "include_reasoning": refused(False, "reasoning is always returned"),
        "thinking_token_budget": refused(5, "no budget of its own"),
    },
    "completions": {
        **_TEXT,
        "prompt": yes("Once"),
        "max_tokens": yes(3),
        "logprobs": yes(2),
        "echo": yes(True),
        "best_of": refused(3, "must be n: all answers are returned"),
        "suffix": refused("x", "text is not filled in"),
        "prompt_embeds": refused("x", "for the Python API"),
    },
    "responses": {
        **_SAMPLED,
        **_OF_OPENAI,
        "input": yes("Hi"),
        "instructions": yes("Be brief."),
        "max_output_tokens": yes(3),
        "stream_options": yes({"include_obfuscation": True}, stream=True),
        "text": yes({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
        "text.verbosity": ignored({"verbosity": "low"}, "the model decides"),
        "tools": yes([{"type": "function", **FUNCTION}]),
        "tool_choice": yes("none", tools=[{"type": "function", **FUNCTION}]),
        "store": yes(False),
        "previous_response_id": refused("resp_x", "a response that is no longer stored"),
        "include": yes(["message.output_text.logprobs"]),
        "top_logprobs": yes(2),
        "max_tool_calls": yes(2),
        "reasoning": yes({"effort": "none"}),
        "reasoning.effort": ignored({"effort": "high"}, "where the chat template does not know it"),
        "reasoning.summary": ignored({"summary": "detailed"}, "the reasoning itself is returned"),
        "image": yes({"context_compression": "auto"}),
        "modalities": yes(["text"]),
        "audio": yes({"voice": "alloy"}, model="starter", modalities=["text", "audio"]),
        "truncation": refused("auto", "a conversation is never cut"),
        "background": refused(True, "no background work"),
        "conversation": refused("conv_1", "conversations are not stored; send previous_response_id"),
        "prompt": refused({"id": "p"}, "prompts are not stored"),
        "access_programs": refused({"a": "b"}, "no such programs"),
        "context_management": refused([{"type": "compaction"}], "a conversation is never cut"),
    },
    "audio/speech": {
        "model": yes("starter"),
        "input": yes("Hello there."),
        "voice": yes("alloy"),
        "response_format": yes("wav"),
        "stream_format": yes("sse"),
        "speed": yes(1.5),
        "seed": yes(3),
        "stream": yes(True),
        "timeout": yes(30),
        "instructions": ignored("cheerfully", "by voices that read; chat models follow them"),
        "seconds": refused(1.5, _SOUND_ONLY),
        "steps": refused(4, _SOUND_ONLY),
        "guidance": refused(3.0, _SOUND_ONLY),
        "negative_prompt": refused("noise", _SOUND_ONLY),
        "task_type": refused("Base", "the model decides"),
        "language": refused("English", "the model decides"),
        "ref_audio": refused("data:,", "no voice is cloned"),
        "ref_text": refused("x", "no voice is cloned"),
        "max_new_tokens": refused(5, "speech is as long as its text"),
    },
    "audio/transcriptions": {
        "file": yes(None),
        "model": yes("starter"),
        "language": yes("en"),
        "languages[]": yes("en"),
        "response_format": yes("verbose_json"),
        "stream": yes("true"),
        "stream_include_usage": yes("true", stream="true"),
        "stream_continuous_usage_stats": yes("true", stream="true"),
        "timeout": yes("30"),
        "prompt": ignored("Ann", "by the starter; others follow it"),
        "keywords[]": ignored("Ann", "by the starter; chat models follow it"),
        "temperature": ignored("0.5", "by the starter; chat models follow it"),
        "timestamp_granularities[]": refused("word", "by models without times"),
        "chunking_strategy": refused("auto", "audio is not split"),
        "include[]": refused("logprobs", "no log probabilities"),
        "known_speaker_names[]": refused("Ann", "speakers are not told apart"),
        "known_speaker_references[]": refused("data:,", "speakers are not told apart"),
        "seed": refused("3", "nothing is sampled"),
        "to_language": refused("fr", "use /v1/audio/translations"),
    },
    "images/generations": {
        "model": yes("starter"),
        "prompt": yes("a red fox"),
        "n": yes(2),
        "size": yes("1024x1024"),
        "strict_size": yes(True),
        "response_format": yes("url"),
        "output_format": yes("jpeg"),
        "output_compression": yes(80, output_format="jpeg"),
        "stream": yes(True),
        "partial_images": yes(1, stream=True),
        "progress": yes(True, stream=True),
        "user": yes("u"),
        "safety_identifier": yes("u"),
        "quality": yes("high"),
        "moderation": yes("low"),
        "input_fidelity": yes("high"),
        "background": yes("opaque"),
        "style": refused("vivid", "put it into the prompt"),
        "complexity": refused("low", "put it into the prompt"),
        "svg": refused({}, "pictures are pixels"),
        "frame_count": refused(2, "videos are jobs of /v1/videos"),
        "frame_duration_ms": refused(40, "videos are jobs of /v1/videos"),
        "steps": yes(1),
        "num_inference_steps": yes(1, steps=None),
        "guidance": yes(2.0),
        "guidance_scale": yes(2.0),
        "seed": yes(3),
        "scheduler": yes("FlowMatchEulerDiscreteScheduler"),
        "priority": yes(1),
        "timeout": yes(60),
        "true_cfg": refused(2.0, "by models without it"),
        "true_cfg_scale": refused(2.0, "by models without it"),
        "negative_prompt": refused("dark", "by models without it"),
        "strength": refused(0.5, "without an input picture"),
        "lora": refused({"name": "x"}, "names an adapter of the model's"),
        "control_scale": refused(0.5, "by models without a ControlNet"),
        "vae_use_slicing": refused(True, "the deployment decides"),
        "vae_use_tiling": refused(True, "the deployment decides"),
    },
}
BASE: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "lm", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    "completions": {"model": "lm", "prompt": "Once", "max_tokens": 4},
    "responses": {"model": "lm", "input": "Hello", "max_output_tokens": 4},
    "audio/speech": {"model": "starter", "input": "Hello.", "response_format": "pcm"},
    "audio/transcriptions": {"model": "starter"},
    "images/generations": {"model": "starter", "prompt": "a fox", "steps": 1},
}


def table() -> str:
    """The table of docs/api.md."""
    names = sorted({name for rows in FIELDS.values() for name in rows})
    lines = [f"| field | {' | '.join(FIELDS)} | why |", "| --- " * (len(FIELDS) + 2) + "|"]
    for name in names:
        rows = [rows.get(name) for rows in FIELDS.values()]
        why = "; ".join(dict.fromkeys(row.why for row in rows if row is not None and row.why))
        lines.append(f"| `{name}` | {' | '.join('' if row is None else row.outcome for row in rows)} | {why} |")
    return "\n".join(lines)
