"""Qwen2.5-Omni at the true 7B shapes with random weights built straight on the GPU: `transformers` against ours.

    python benchmarks/gpu/qwen2_5_omni.py --out results.json

One process, the same weights: first `transformers`' generate, then our pipeline, alone and with 8 requests at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.config.graph import graph_of
from omnistage.config.schema import ARBudget, CodecBudget, PipelineConfig
from omnistage.config.yamlio import load_file
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.codec.component import Window
from omnistage.engines.codec.stage import CodecStage
from omnistage.hf import transformers
from omnistage.models._qwen_omni.bridges import talker2codec, thinker2talker
from omnistage.models.qwen2_5_omni import FAMILY, tiny
from omnistage.models.qwen2_5_omni.components import Talker, Thinker
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav
from omnistage.omni import Omni

PROMPT, TEXT, CODES = 128, 128, 384


def build(scale: float, device: torch.device) -> Any:
    """The whole model on the device, bfloat16 but for token2wav."""
    config = tiny.config_for(scale)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.Qwen2_5OmniForConditionalGeneration._from_config(config, dtype=dtype)
    tiny.initialise(model, seed=0)
    model.token2wav.float()
    model.speaker_map = tiny.speakers(config.thinker_config.text_config.vocab_size)
    return model.eval()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(function: Any) -> tuple[float, Any]:
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - start, result


def run_reference(model: Any, batch: int, device: torch.device, prompts: torch.Tensor, *, short: bool = False) -> float:
    """Seconds of `generate` for `batch` prompts, text and speech; `short` for a few tokens only."""
    ids = prompts[:batch].to(device)
    text, codes = (4, 24) if short else (TEXT, CODES)

    def once() -> Any:
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            thinker_max_new_tokens=text,
            thinker_min_new_tokens=text,
            thinker_do_sample=False,
            talker_max_new_tokens=codes,
            talker_min_new_tokens=codes,
        )

    return clock(once)[0]


class NoProcessor:
    """Prompts are tokens: nothing else is needed here."""

    input_modalities = frozenset()

    def tokens(self, prompt: OmniTokensPrompt) -> Any:
        from omnistage.core.types import ARInput

        return ARInput(prompt.prompt_token_ids)

    def voices(self) -> tuple[str, ...]:
        return ("Chelsie", "Ethan")


def open_ours(model: Any, options: argparse.Namespace) -> Omni:
    """Our pipeline around the very same modules."""
    data = load_file(FAMILY.pipeline).data
    pipeline = PipelineConfig.model_validate(data["pipeline"])
    config = model.config.talker_config
    table = model.thinker.get_input_embeddings().weight
    wanted = {int(s["bos_token"]) for s in model.speaker_map.values()}
    wanted |= {config.tts_text_end_token_id, config.tts_text_pad_token_id}
    rows = {i: table[i].detach().clone() for i in wanted}
    ar = ARBudget(max_model_len=4096, compile=options.compile or "auto", kv_memory="8GiB")
    codec = CodecBudget(
        lookahead_blocks=options.lookahead, max_chunk_blocks=options.max_chunk, precision=options.precision
    )
    thinker = ARStage("thinker", Thinker(model.thinker), ar)
    num_codes = model.config.token2wav_config.dit_config.num_embeds
    talker = ARStage("talker", Talker(model.talker, model.speaker_map, rows, num_codes), ar)
    component = Token2Wav(model.token2wav, model.speaker_map, precision=options.precision, early_vocoder=True)
    token2wav = CodecStage("token2wav", component, codec)
    token2wav.warm_up()
    stages = {"thinker": thinker, "talker": talker, "token2wav": token2wav}
    return Omni.from_parts(
        graph_of(pipeline),
        stages,
        {"talker": thinker2talker, "token2wav": talker2codec},
        {name: stage.params for name, stage in pipeline.stages.items()},
        NoProcessor(),
    )


def params(speech: bool) -> dict[str, Any]:
    text = SamplingParams(max_tokens=TEXT, temperature=0.0, ignore_eos=True)
    if not speech:
        return {"thinker": text}
    return {
        "thinker": text,
        "talker": SamplingParams(
            max_tokens=CODES, min_tokens=CODES, temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, seed=1
        ),
        "token2wav": CodecParams(seed=1),
    }


def run_ours(omni: Omni, prompts: torch.Tensor, batch: int, speech: bool) -> tuple[float, list[Any]]:
    given = [OmniTokensPrompt(tuple(p)) for p in prompts[:batch].tolist()]
    modalities = ["text", "audio"] if speech else ["text"]
    return clock(lambda: omni.generate(given, params(speech), modalities=modalities, progress=False))


def describe(output: Any) -> dict[str, Any]:
    stages = output.trace.stages
    made: dict[str, Any] = {"tokens": len(output.token_ids)}
    for name, stage in stages.items():
        made[name] = {"first": stage.first_chunk, "last": stage.last_chunk, "chunks": stage.chunks}
    if output.audio is not None:
        made["audio_seconds"] = output.audio.seconds
        made["audio_rms"] = float(np.sqrt(np.mean(np.square(output.audio.samples))))
    return made


def step_ms(output: Any) -> float:
    trace = output.trace.stages["thinker"]
    return 1e3 * (trace.last_chunk - trace.first_chunk) / (len(output.token_ids) - 1)


def quality(model: Any) -> dict[str, float]:
    """Decibels between speech in float32 and in the faster precisions, whole utterances, same noise."""
    codes = tuple((7919 * i) % 8000 for i in range(CODES))
    waves: dict[str, np.ndarray] = {}
    for precision in ("float32", "tf32", "float16"):
        component = Token2Wav(model.token2wav, model.speaker_map, precision=precision, cuda_graphs=False)
        state = component.open("", CodecParams(seed=3, streaming=False), None)
        waves[precision] = component.decode([Window(state, codes, 0, len(codes), True)])[0]
    exact = waves.pop("float32")
    noise = {name: float(np.square(wave - exact).sum()) for name, wave in waves.items()}
    return {name: 10 * float(np.log10(np.square(exact).sum() / max(n, 1e-30))) for name, n in noise.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    parser.add_argument("--scale", type=float, default=1.0, help="1 is the true 7B")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoder layers")
    parser.add_argument("--no-reference", action="store_true", help="leave transformers out")
    parser.add_argument("--precision", choices=("float32", "tf32", "float16"), default="tf32", help="of token2wav")
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument("--max-chunk", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU only to try the script out
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    figures: dict[str, Any] = {"device": name, **versions, "options": vars(options) | {"out": ""}}
    start = time.perf_counter()
    model = build(options.scale, device)
    print(f"built in {time.perf_counter() - start:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB", flush=True)
    vocab = min(model.config.thinker_config.text_config.vocab_size, 100_000)
    prompts = torch.randint(0, vocab, (max(options.batches), PROMPT), generator=torch.Generator().manual_seed(0))
    if not options.no_reference:
        with torch.inference_mode():
            for batch in options.batches:
                run_reference(model, batch, device, prompts, short=True)  # warm, like ours
                figures[f"reference_{batch}"] = seconds = run_reference(model, batch, device, prompts)
                print(f"transformers, {batch} at once: {seconds:.2f} s", flush=True)
        model.thinker.generation_config, model.talker.generation_config = None, None
        gc.collect()
        torch.cuda.empty_cache()
    seconds, omni = clock(lambda: open_ours(model, options))
    print(f"our stages ready in {seconds:.1f} s", flush=True)
    with omni:
        for batch in options.batches:
            for attempt in range(2):  # the first pass captures the token2wav graphs of this batch size
                seconds, outputs = run_ours(omni, prompts, batch, speech=True)
                print(f"ours, {batch} at once, pass {attempt}: {seconds:.2f} s", flush=True)
            figures[f"ours_{batch}"] = seconds
            figures[f"ours_{batch}_requests"] = [describe(o) for o in outputs]
            firsts = sorted(o.trace.stages["token2wav"].first_chunk for o in outputs)
            ends = max(o.trace.stages["thinker"].last_chunk for o in outputs)
            print(f"  first audio {firsts[0] * 1e3:.0f} to {firsts[-1] * 1e3:.0f} ms, thinkers end {ends * 1e3:.0f} ms")
            print(outputs[0].trace, flush=True)
        run_ours(omni, prompts, 1, speech=False)
        seconds, outputs = run_ours(omni, prompts, 1, speech=False)
        figures["text_step_ms_1"] = step_ms(outputs[0])
        print(f"text only, 1 request: {seconds:.3f} s, {figures['text_step_ms_1']:.2f} ms a decode step", flush=True)
    figures["snr_db"] = quality(model)
    print("speech against float32: " + ", ".join(f"{k} {v:.1f} dB" for k, v in figures["snr_db"].items()), flush=True)
    figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for batch in options.batches:
        if f"reference_{batch}" in figures:
            print(f"{batch}: {figures[f'reference_{batch}'] / figures[f'ours_{batch}']:.2f} times transformers")
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
