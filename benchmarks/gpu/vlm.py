"""Qwen2.5-VL at 7B shapes and Whisper large-v3 on a GPU, 16 requests at once beside `transformers`: random weights.

    python benchmarks/gpu/vlm.py [--sequential 6] [--only vlm whisper] [--small]

Prints a JSON line for each. One process, the same weights on both sides, bfloat16, greedy. A VLM request is a picture
of 448 x 448 with a short text, 64 tokens out; its processor's work is done before on both sides. A Whisper request is a
clip of 30 seconds, 64 tokens out, with the feature extractor's work on both sides; `transformers` gets `--sequential`
requests, one by one, from which the seconds for 16 are extrapolated, and the VLM's also as one batch of 16. `--small`
tries the script out on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from omnistage.compat import prepare_torchvision
from omnistage.config.schema import ARBudget, CodecBudget
from omnistage.core.messages import ChatMessage, ImagePart, TextPart
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.stage import Stage
from omnistage.core.transcripts import Transcript, TranscriptionOptions
from omnistage.core.types import ARInput, RequestInfo, SpeechInput, StageInput, TokenChunk
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.codec.module import ModuleStage
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models.multimodal_lm import tiny as tiny_vl
from omnistage.models.multimodal_lm.component import MultimodalLM
from omnistage.models.multimodal_lm.processor import MultimodalProcessor
from omnistage.models.speech_to_text import tiny as tiny_speech
from omnistage.models.speech_to_text.recognizer import WhisperRecognizer

COUNT, TOKENS, SIDE = 16, 64, 448
VL_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
WHISPER = {
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "vocab_size": 51866,
}


def clock(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def report(name: str, ours: float, one_by_one: float, measured: int, **more: object) -> None:
    whole = one_by_one / measured * COUNT
    line = {
        "model": name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "transformers": transformers.__version__,
        "requests": COUNT,
        "tokens_each": TOKENS,
        "ours_seconds": round(ours, 3),
        "transformers_one_by_one_16": round(whole, 3),
        "transformers_requests_measured": measured,
        "times_faster": round(whole / ours, 2),
    }
    print(json.dumps(line | more), flush=True)


def drain(stage: Stage) -> list[Any]:
    chunks = []
    while stage.has_work():
        chunks += stage.step()
    for chunk in chunks:
        if chunk.error is not None:
            raise chunk.error
    return chunks


# --------------------------------------------------------------------------------------------- Qwen2.5-VL


def vl_model(device: torch.device, dtype: torch.dtype, small: bool) -> Any:
    ids = tiny_vl.special_ids("qwen2_5_vl")
    tokens = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    tokens |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    text: dict[str, Any] = {**tiny_vl._text(ids), "max_position_embeddings": 32768}
    text |= {"rope_parameters": common.mrope(16)} if small else {**VL_TEXT, "rope_parameters": common.mrope(128)}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=common.qwen_vision_config(0.0 if small else 1.0, text["hidden_size"], heads=2, width=32),
        tie_word_embeddings=False,
        **{name: ids[token] for name, token in tokens.items()},
    )
    with torch.device(device):
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"]
    )
    return model


def vl_processor(model: Any) -> MultimodalProcessor:
    """With the tokenizer of the small checkpoints: its ids are among the large vocabulary's."""
    with tempfile.TemporaryDirectory() as name:
        tiny_vl.write(Path(name) / "tiny", variant="qwen2_5_vl")
        processor = transformers.AutoProcessor.from_pretrained(Path(name) / "tiny")
    processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": SIDE * SIDE}
    text = model.config.get_text_config()
    return MultimodalProcessor(processor, text.vocab_size, text.hidden_size, text.max_position_embeddings)


def vlm(device: torch.device, options: argparse.Namespace) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = vl_model(device, dtype, options.small)
    processor = vl_processor(model)
    side = 56 if options.small else SIDE
    payloads: list[ARInput] = []
    rng = np.random.default_rng(0)
    for _ in range(2 * COUNT):  # the first half to warm up: a picture's features are kept
        picture = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        message = ChatMessage("user", (ImagePart(picture), TextPart("What is in this picture? Tell me all of it.")))
        payloads.append(processor.chat([message]))
    # transformers first: afterwards the model's layers are ours.
    inputs = [model_inputs(payload, device, dtype) for payload in payloads]
    generate(model, inputs[:1])
    alone, _ = clock(lambda: [generate(model, [one]) for one in inputs[COUNT : COUNT + options.sequential]])
    batched, _ = clock(lambda: generate(model, inputs[COUNT:]))
    component = MultimodalLM(model)
    budget = ARBudget(
        max_model_len=2048,
        max_running=COUNT,
        max_batch_tokens=8192,
        graph_batch_sizes=(1, 2, 4, 8, 16),
        kv_memory="8GiB" if device.type == "cuda" else "256MiB",
        encoder_cache="1GiB",
        compile=False,
    )
    stage = ARStage("thinker", component, budget)
    ready, _ = clock(stage.warm_up)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def run(some: list[ARInput], name: str) -> int:
        for index, payload in enumerate(some):
            info = RequestInfo(f"{name}{index}")
            stage.submit(StageInput(info, params, component.prepare(info, payload)))
        return sum(len(c.payload.token_ids) for c in drain(stage) if isinstance(c.payload, TokenChunk))

    run(payloads[:COUNT], "warm")
    ours, count = clock(lambda: run(payloads[COUNT:], "r"))
    if count != COUNT * TOKENS:
        raise SystemExit(f"{count} tokens instead of {COUNT * TOKENS}")
    report(
        "Qwen2.5-VL-7B shapes" if not options.small else "tiny Qwen2.5-VL",
        ours,
        alone,
        options.sequential,
        prompt_tokens=len(payloads[0].token_ids),
        transformers_batch_of_16=round(batched, 3),
        times_faster_than_batch=round(batched / ours, 2),
        ready_seconds=round(ready, 1),
    )


def model_inputs(payload: ARInput, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As transformers' processor gives them: of one picture in its chat."""
    tensors = {**payload.context, **payload.media[0].inputs, "input_ids": torch.tensor([payload.token_ids])}
    tensors |= {name: value for name, value in payload.context.items() if name == "mm_token_type_ids"}
    return {n: t.to(device, dtype if t.is_floating_point() else None) for n, t in tensors.items()}


def generate(model: Any, inputs: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    joined = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
    ids = model.generate(
        **joined,
        attention_mask=torch.ones_like(joined["input_ids"]),
        do_sample=False,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
    )
    if ids.shape[1] != joined["input_ids"].shape[1] + TOKENS:
        raise SystemExit(f"transformers gave {ids.shape[1]} tokens")
    return ids  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ Whisper


def whisper(device: torch.device, options: argparse.Namespace) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tiny_speech.WINDOW_SECONDS = 30
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        tiny_speech.write(folder)
        processor = transformers.AutoProcessor.from_pretrained(folder)
        model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
        if not options.small:
            shapes = {**WHISPER, "max_source_positions": 1500, "max_target_positions": 448}
            config = transformers.WhisperConfig(**{**model.config.to_dict(), **shapes})
            settings = model.generation_config
            with torch.device(device):
                model = transformers.WhisperForConditionalGeneration._from_config(config, dtype=dtype)
            model.generation_config = settings
            processor.feature_extractor = transformers.WhisperFeatureExtractor(feature_size=WHISPER["num_mel_bins"])
    model.to(device, dtype).eval()
    tokens = min(TOKENS, model.config.max_target_positions - 8)
    settings = model.generation_config
    settings.max_length, settings.max_new_tokens = None, tokens
    # No end and no times, by which `generate` would begin another window: all answers are as long.
    times = range(settings.no_timestamps_token_id, len(processor.tokenizer))
    settings.suppress_tokens = [*settings.suppress_tokens, settings.eos_token_id, *times]
    rng = np.random.default_rng(0)
    clips = [(0.1 * rng.standard_normal(30 * 16_000)).astype(np.float32) for _ in range(2 * COUNT)]

    def reference(clip: np.ndarray) -> int:
        features = processor.feature_extractor(clip, sampling_rate=16_000, return_tensors="pt").input_features
        ids = model.generate(features.to(device, dtype), language="en", task="transcribe", return_segments=True)
        return sum(len(segment["tokens"]) for segment in ids["segments"][0])

    with torch.inference_mode():
        reference(clips[0])
        alone, counts = clock(lambda: [reference(clip) for clip in clips[COUNT : COUNT + options.sequential]])
    stage = ModuleStage("recognize", WhisperRecognizer(model, processor, device), CodecBudget(max_batch=COUNT))

    def run(some: list[np.ndarray], name: str) -> list[int]:
        for index, clip in enumerate(some):
            payload = SpeechInput(clip, TranscriptionOptions(language="en"))
            stage.submit(StageInput(RequestInfo(f"{name}{index}"), CodecParams(), payload))
        return [len(c.payload.token_ids) for c in drain(stage) if isinstance(c.payload, Transcript)]

    run(clips[:COUNT], "warm")
    ours, found = clock(lambda: run(clips[COUNT:], "r"))
    if found[: len(counts)] != counts or len(found) != COUNT:
        raise SystemExit(f"ours gave {found} tokens, transformers {counts}")
    name = "Whisper large-v3 shapes" if not options.small else "tiny Whisper"
    report(name, ours, alone, options.sequential, clip_seconds=30, tokens_each=found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequential", type=int, default=6, help="requests that transformers answers one by one")
    parser.add_argument("--only", nargs="*", default=["vlm", "whisper"], choices=["vlm", "whisper"])
    parser.add_argument("--small", action="store_true", help="small models, to try the script out")
    options = parser.parse_args()
    prepare_torchvision()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, run in (("vlm", vlm), ("whisper", whisper)):
        if name in options.only:
            run(device, options)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
