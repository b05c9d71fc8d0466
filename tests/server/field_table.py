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
    unseen: str = ""
    """Why the response is the same without it; empty: it is another one."""


def yes(value: Any, **beside: Any) -> Row:
    return Row(value, beside=beside)


def unseen(value: Any, reason: str, **beside: Any) -> Row:
    """Served, with an effect that this response does not show."""
    return Row(value, beside=beside, unseen=reason)


def ignored(value: Any, why: str, **beside: Any) -> Row:
    return Row(value, "ignored", why, beside)


def refused(value: Any, why: str, **beside: Any) -> Row:
    return Row(value, "refused", why, beside)


_WHO = "says who asks"
_WHEN = "when it runs"
_CLIP_ONLY = "by voices that are fixed; CSM speaks as in the clip"
_AB: dict[str, Any] = {"temperature": 0, "structured_outputs": {"regex": "( a| b| c| the| of){10}"}}
"""Greedily, with letters that come again."""
_TO_B: dict[str, Any] = {"structured_outputs": {"regex": "ab"}}
"""A short answer also without a limit of tokens, which would be a thousand of them."""
_SAMPLED: dict[str, Row] = {
    "temperature": yes(0.0),
    "top_p": yes(0.001),
    "top_k": yes(1),
    "min_p": yes(1.0),
    "presence_penalty": yes(2.0, **_AB),
    "frequency_penalty": yes(2.0, **_AB),
    "repetition_penalty": yes(2.0, **_AB),
    "seed": yes(-3),
    "stop": yes(["b"], **_TO_B),
    "stream": yes(True),
    "model": yes("lm"),
    "user": unseen("u", _WHO),
    "ignore_eos": yes(True, **_TO_B),
    "include_stop_str_in_output": yes(True, stop=["b"], **_TO_B),
    "structured_outputs": yes({"choice": ["on", "off"]}),
    "lora": yes([{"name": "french", "weight": 0.5}]),
    "priority": unseen(1, _WHEN),
    "timeout": unseen(30, _WHEN),
}
_EOS: dict[str, Any] = {"logit_bias": {"877": 100}}
_TEXT: dict[str, Row] = {
    **_SAMPLED,
    "n": yes(2),
    "logit_bias": yes({"5": 100}),
    "min_tokens": yes(3, **_EOS),
    "stop_token_ids": yes([5], logit_bias={"5": 100}),
    "allowed_token_ids": yes([5, 6, 7]),
    "skip_special_tokens": yes(False, **_EOS, ignore_eos=True),
    "return_token_ids": yes(True),
    "stream_options": yes({"include_usage": True, "continuous_usage_stats": True}, stream=True),
    "spaces_between_special_tokens": ignored(False, "the tokenizer decides"),
    "request_id": ignored("mine", "the header X-Request-Id names a request"),
    "add_special_tokens": refused(True, "the tokenizer decides"),
    "use_beam_search": refused(True, "no beam search"),
    "length_penalty": refused(2.0, "no beam search"),
    "early_stopping": refused(True, "no beam search"),
    "prompt_logprobs": refused(1, "the prompt's are not computed"),
    "bad_words": refused(["x"], "use logit_bias"),
    "logits_processors": refused(["x"], "no code of clients is run"),
    "mm_processor_kwargs": refused({"a": 1}, "the checkpoint's processor decides"),
    "media_io_kwargs": refused({"a": {}}, "the service's limits decide"),
    "cache_salt": refused("x", "prefixes are shared"),
    "session_id": ignored("s", "prefixes are always reused"),
    "stream_interval": ignored(4, "events come with their tokens"),
    "ec_transfer_params": refused({"a": 1}, "no such transfer"),
    "logprob_token_ids": refused([5], "use logprobs"),
    "repetition_detection": refused({"max_pattern_size": 3}, "use frequency_penalty"),
    "truncation_side": refused("left", "a prompt is never cut"),
    "thinking_token_budget": refused(5, "no budget of its own"),
    "watermarking": refused(True, "no watermark"),
    "routed_experts_prompt_start": refused(3, "the experts of a token are not returned"),
    "return_token_offsets": refused(True, "texts are not returned as tokens' offsets"),
    "return_prompt_text": refused(True, "use /tokenize and /detokenize"),
    "return_mm_kwargs": refused(True, "media are not returned"),
    "mm_payload": refused("files", "media are not returned"),
    "kv_transfer_params": refused({"a": 1}, "no such transfer"),
    "vllm_xargs": refused({"a": 1}, "no such extensions"),
    "regex": yes("on|off"),
    "ebnf": yes('root ::= "on" | "off"'),
    "json_schema": yes('{"type": "boolean"}'),
    "guided_json": refused({}, "the older form of structured_outputs"),
    "guided_regex": refused("a", "the older form of structured_outputs"),
    "guided_choice": refused(["a"], "the older form of structured_outputs"),
    "guided_grammar": refused("a", "the older form of structured_outputs"),
}
_OPEN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_CACHED = "prefixes are always reused"
_OF_OPENAI: dict[str, Row] = {
    "metadata": unseen({"a": "b"}, _WHO),
    "safety_identifier": unseen("s", _WHO),
    "prompt_cache_key": unseen("k", _WHO),
    "prompt_cache_retention": unseen("24h", _CACHED),
    "prompt_cache_options": unseen({"mode": "implicit"}, _CACHED),
    "service_tier": yes("auto"),
    "parallel_tool_calls": unseen(False, "of one call"),
    "moderation": refused({"model": "m"}, "no such filter; see --content-filter"),
}
_NOT_OF_RESPONSES: dict[str, Row] = {
    "logit_bias": refused({"5": 100}, "of chats and completions"),
    "stop_token_ids": refused([5], "of chats and completions; use stop"),
    "skip_special_tokens": refused(False, "of chats and completions"),
    "chat_template_kwargs": refused({"enable_thinking": False}, "use reasoning.effort"),
    "include_reasoning": refused(False, "reasoning is always returned"),
    "enable_response_messages": refused(True, "use GET /v1/responses/{id}/input_items"),
    "previous_input_messages": refused([], "send them in input"),
    "request_id": refused("mine", "the header X-Request-Id names a request"),
    "session_id": refused("s", "prefixes are always reused"),
    "cache_salt": refused("x", "prefixes are shared"),
    "kv_transfer_params": refused({"a": 1}, "no such transfer"),
    "ec_transfer_params": refused({"a": 1}, "no such transfer"),
    "mm_processor_kwargs": refused({"a": 1}, "the checkpoint's processor decides"),
    "media_io_kwargs": refused({"a": {}}, "the service's limits decide"),
    "return_mm_kwargs": refused(True, "media are not returned"),
    "mm_payload": refused("files", "media are not returned"),
    "vllm_xargs": refused({"a": 1}, "no such extensions"),
    "watermarking": refused(True, "no watermark"),
}
_SOUND_ONLY = "speech has none; for diffusion models that generate sound"
_ENGLISH = "the starter hears English alone"
_SECONDS = "by the starter, which counts seconds; others count tokens"
_NO_SAMPLING = "only temperature and seed can be set"
FIELDS: dict[str, dict[str, Row]] = {
    "chat/completions": {
        **_TEXT,
        **_OF_OPENAI,
        "messages": yes([{"role": "user", "content": "Hi"}]),
        "truncate_prompt_tokens": refused(5, "a chat is never cut"),
        "max_tokens": yes(1, **_TO_B),
        "max_completion_tokens": yes(3),
        "modalities": yes(["text", "audio"], model="starter"),
        "audio": yes({"voice": "alloy", "format": "flac"}, model="starter", modalities=["text", "audio"]),
        "logprobs": yes(True),
        "top_logprobs": yes(2, logprobs=True),
        "return_tokens_as_token_ids": yes(True, logprobs=True),
        "response_format": yes({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        "tools": yes([{"type": "function", "function": FUNCTION}]),
        "tool_choice": yes("required", tools=[{"type": "function", "function": FUNCTION}], max_tokens=80),
        "prediction": ignored({"type": "content", "content": "x"}, "could only change the speed"),
        "verbosity": ignored("low", "the model decides"),
        "reasoning_effort": ignored("high", "where the chat template does not know it; `none` turns thinking off"),
        "chat_template_kwargs": unseen({"enable_thinking": False}, "this model never thinks"),
        "continue_final_message": yes(True, messages=_OPEN),
        "add_generation_prompt": yes(False),
        "use_audio_in_video": unseen(False, "the default"),
        "drawing": yes({"steps": 1}, model="starter", modalities=["image"]),
        "store": refused(True, "chats are not stored; /v1/responses are"),
        "functions": refused([FUNCTION], "the older form of tools"),
        "function_call": refused("auto", "the older form of tool_choice"),
        "web_search_options": refused({}, "no web search"),
        "documents": refused([{"a": "b"}], "send them as messages"),
        "chat_template": refused("x", "the model's own is used"),
        "echo": refused(True, "send continue_final_message"),
        "include_reasoning": refused(False, "reasoning is always returned"),
    },
    "completions": {
        **_TEXT,
        "prompt": yes("Once"),
        "max_tokens": yes(1, **_TO_B),
        "logprobs": yes(2),
        "return_tokens_as_token_ids": yes(True, logprobs=2),
        "truncate_prompt_tokens": yes(1),
        "echo": yes(True),
        "response_format": yes({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        "best_of": refused(3, "must be n: all answers are returned"),
        "suffix": refused("x", "text is not filled in"),
        "prompt_embeds": refused("x", "for the Python API"),
        "add_special_tokens": refused(False, "the tokenizer decides"),
    },
    "responses": {
        **_SAMPLED,
        **_OF_OPENAI,
        "input": yes("Hi"),
        "instructions": yes("Be brief."),
        "max_output_tokens": yes(1, **_TO_B),
        "stream_options": yes({"include_obfuscation": True}, stream=True),
        "text": yes({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
        "text.verbosity": ignored({"verbosity": "low"}, "the model decides"),
        "tools": yes([{"type": "function", **FUNCTION}]),
        "tool_choice": yes("required", tools=[{"type": "function", **FUNCTION}], max_output_tokens=80),
        "store": yes(False),
        "previous_response_id": refused("resp_x", "a response that is no longer stored"),
        "include": yes(["message.output_text.logprobs"]),
        "top_logprobs": yes(2),
        "metadata": yes({"a": "b"}),
        "safety_identifier": yes("s"),
        "prompt_cache_key": yes("k"),
        "user": yes("u"),
        "parallel_tool_calls": yes(False),
        "max_tool_calls": yes(2),
        "reasoning": yes({"effort": "none"}),
        "reasoning.effort": ignored({"effort": "high"}, "where the chat template does not know it"),
        "reasoning.summary": ignored({"summary": "detailed"}, "the reasoning itself is returned"),
        "image": unseen({"context_compression": "auto"}, "there is no picture"),
        "modalities": yes(["text", "audio"], model="starter"),
        "audio": yes({"voice": "alloy", "format": "flac"}, model="starter", modalities=["text", "audio"]),
        "truncation": refused("auto", "a conversation is never cut"),
        "background": refused(True, "no background work"),
        "conversation": refused("conv_1", "conversations are not stored; send previous_response_id"),
        "prompt": refused({"id": "p"}, "prompts are not stored"),
        "access_programs": refused({"a": "b"}, "no such programs"),
        "context_management": refused([{"type": "compaction"}], "a conversation is never cut"),
        **_NOT_OF_RESPONSES,
    },
    "audio/speech": {
        "model": yes("starter"),
        "input": yes("Hello there."),
        "voice": unseen("alloy", "the starter has one voice"),
        "response_format": yes("wav"),
        "stream_format": yes("sse"),
        "speed": yes(1.5),
        "seed": yes(3),
        "stream": unseen(True, "speech is always streamed"),
        "timeout": unseen(30, _WHEN),
        "instructions": ignored("cheerfully", "by voices that read; chat models follow them"),
        "seconds": refused(1.5, _SOUND_ONLY),
        "steps": refused(4, _SOUND_ONLY),
        "guidance": refused(3.0, _SOUND_ONLY),
        "negative_prompt": refused("noise", _SOUND_ONLY),
        "task_type": refused("Base", "the model decides"),
        "language": refused("English", "the model decides"),
        "ref_audio": refused("data:,", _CLIP_ONLY),
        "ref_text": refused("x", _CLIP_ONLY),
        "max_new_tokens": refused(5, "speech is as long as its text"),
        "sample_rate": refused(8000, "the model's own rate; resample it"),
        "speaker_embedding": refused([0.5], "no voice is cloned"),
        "ref_audio_2": refused("data:,", "no voice is cloned"),
        "x_vector_only_mode": refused(True, "no voice is cloned"),
        "ambient_sound": refused("rain", "use /v1/audio/speech of a model that generates sound"),
        "duration_seconds": refused(2.0, "speech is as long as its text; seconds for models that generate sound"),
        "word_timestamps": refused(True, "the times of words are not known"),
        "initial_codec_chunk_frames": refused(4, "the deployment decides"),
        "non_streaming_mode": refused(True, "speech is always streamed"),
        "extra_params": refused({"a": 1}, "no such extensions"),
    },
    "audio/transcriptions": {
        "file": yes(None),
        "model": yes("starter"),
        "language": unseen("en", _ENGLISH),
        "languages[]": unseen("en", _ENGLISH),
        "response_format": yes("verbose_json"),
        "stream": yes("true"),
        "stream_include_usage": ignored("true", _SECONDS, stream="true"),
        "stream_continuous_usage_stats": ignored("true", _SECONDS, stream="true"),
        "max_completion_tokens": ignored("5", "a transcription is as long as the speech"),
        "timeout": unseen("30", _WHEN),
        "prompt": ignored("Ann", "by the starter; others follow it"),
        "keywords[]": ignored("Ann", "by the starter; chat models follow it"),
        "temperature": ignored("0.5", "by the starter; chat models follow it"),
        "timestamp_granularities[]": refused("word", "by models without times"),
        "chunking_strategy": refused("auto", "audio is not split"),
        "include[]": refused("logprobs", "no log probabilities"),
        "known_speaker_names[]": refused("Ann", "speakers are not told apart"),
        "known_speaker_references[]": refused("data:,", "speakers are not told apart"),
        "seed": unseen("3", "by models that sample; others choose nothing at random"),
        "n": refused("2", "there is one transcription"),
        "top_p": refused("0.5", _NO_SAMPLING),
        "top_k": refused("5", _NO_SAMPLING),
        "min_p": refused("0.5", _NO_SAMPLING),
        "frequency_penalty": refused("1", _NO_SAMPLING),
        "presence_penalty": refused("1", _NO_SAMPLING),
        "repetition_penalty": refused("2", _NO_SAMPLING),
        "vllm_xargs": refused("{}", "no such extensions"),
        "to_language": refused("fr", "use /v1/audio/translations"),
        "hotwords": refused("Ann", "use keywords"),
        "include_stop_str_in_output": refused("true", "a transcription has no stop strings"),
        "length_penalty": refused("2", "no beam search"),
        "use_beam_search": refused("true", "no beam search"),
        "watermarking": refused("true", "no watermark"),
    },
    "images/generations": {
        "model": yes("starter"),
        "prompt": yes("a red fox"),
        "n": yes(2),
        "size": unseen("1024x1024", "the starter draws one size"),
        "strict_size": unseen(True, "it draws that size"),
        "response_format": yes("url"),
        "output_format": yes("jpeg"),
        "output_compression": yes(80, output_format="jpeg"),
        "stream": yes(True),
        "partial_images": yes(1, stream=True, steps=4),
        "progress": yes(True, stream=True),
        "user": unseen("u", _WHO),
        "safety_identifier": unseen("u", _WHO),
        "quality": ignored("high", "the steps decide"),
        "moderation": ignored("low", "see --content-filter"),
        "input_fidelity": ignored("high", "the model decides"),
        "background": unseen("opaque", "pictures are opaque"),
        "style": refused("vivid", "put it into the prompt"),
        "complexity": refused("low", "put it into the prompt"),
        "svg": refused({}, "pictures are pixels"),
        "frame_count": refused(2, "videos are jobs of /v1/videos"),
        "frame_duration_ms": refused(40, "videos are jobs of /v1/videos"),
        "steps": yes(2),
        "num_inference_steps": yes(1, steps=None),
        "guidance": yes(2.0),
        "guidance_scale": yes(2.0),
        "seed": yes(3),
        "scheduler": yes("FlowMatchEulerDiscreteScheduler"),
        "priority": unseen(1, _WHEN),
        "timeout": unseen(60, _WHEN),
        "true_cfg": refused(2.0, "by models without it"),
        "true_cfg_scale": refused(2.0, "by models without it"),
        "negative_prompt": refused("dark", "by models without it"),
        "strength": refused(0.5, "without an input picture"),
        "lora": refused({"name": "x"}, "names an adapter of the model's"),
        "control_scale": refused(0.5, "by models without a ControlNet"),
        "vae_use_slicing": refused(True, "the deployment decides"),
        "vae_use_tiling": refused(True, "the deployment decides"),
        "generator_device": refused("cpu", "a seed's noise is the same on every device"),
        "flow_shift": refused(3.0, "the checkpoint's scheduler decides"),
        "layers": refused(2, "pictures have one layer"),
        "system_prompt": refused("x", "put it into the prompt"),
        "use_system_prompt": refused("custom", "put it into the prompt"),
        "bot_task": refused("cot", "put it into the prompt"),
        "return_stage_metrics": refused(True, "use GET /v1/requests/{id}"),
        "extra_params": refused({"a": 1}, "no such extensions"),
    },
}
_SEEDED = {"model": "lm", "temperature": 1.0, "seed": 7}
BASE: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **_SEEDED},
    "completions": {"prompt": "Once", "max_tokens": 8, **_SEEDED},
    "responses": {"input": "Hello", "max_output_tokens": 8, **_SEEDED},
    "audio/speech": {"model": "starter", "input": "Hello.", "response_format": "pcm"},
    "audio/transcriptions": {"model": "starter"},
    "images/generations": {"model": "starter", "prompt": "a fox", "steps": 1, "seed": 5},
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
