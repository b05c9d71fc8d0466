"""Qwen2.5-Omni's token2wav as a streaming codec component, on transformers' own modules.

Codes become a mel spectrogram by flow matching (a transformer that attends in blocks, solved by Runge-Kutta 4), and
the spectrogram becomes samples by BigVGAN (convolutions). A window of an utterance is solved with what later blocks see
of those on its left kept from when they were solved, and with look-ahead blocks on its right, whose results are thrown
away. BigVGAN runs over the new frames with as much old context as its receptive field.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from omnistage.core.errors import CheckpointError
from omnistage.core.params import CodecParams
from omnistage.core.stage_memory import StageMemory
from omnistage.engines.codec.component import CodecComponent, CodecLayout, Window
from omnistage.engines.codec.flow import SOLVERS
from omnistage.engines.codec.kernels import Kernels, use_triton
from omnistage.engines.graphs import GraphCache, allow_tf32, bucket
from omnistage.engines.peak_memory import META, peak_bytes, weight_bytes
from omnistage.engines.shared_copy import shared_copy
from omnistage.engines.streams import CODEC_PRIORITY
from omnistage.models.qwen2_5_omni.blocks import BlockBatch, Context, Solution, WindowRows, padded_sizes
from omnistage.models.qwen2_5_omni.dit import SpeakerRows, check_velocity
from omnistage.models.qwen2_5_omni.flow_solver import FlowSolver
from omnistage.models.qwen2_5_omni.vocoder import bigvgan, fuse_activations, vocoder_context
from omnistage.models.qwen2_5_omni.voices import first_voice

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniToken2WavDiTModel,
        Qwen2_5OmniToken2WavModel,
    )

SAMPLE_RATE = 24_000  # not in the checkpoint's config
Precision = Literal["float32", "tf32", "float16"]

# Larger batches (whole utterances) run eagerly: launching is a small part there, and graphs would hold much memory.
MAX_GRAPH_BLOCKS = 192
_MAX_VOCODER_FRAMES = 1024
WARM_BATCHES = (1, 2, 4, 8)
"""Numbers of requests for which BigVGAN's graphs are captured before there are any."""
_GRAPH_BYTES = 4 << 20  # what the driver takes for one of BigVGAN, or for one evaluation of the DiT
_VOCODER_LENGTHS = 8  # of windows that BigVGAN's graphs are for: few, as chunks double until they grow no more
_RANDOM_GROUP = 16  # normal numbers that torch's CPU generator computes at once: whole groups depend on no size
_SILENT_FRAMES = 256  # any length that the speaker encoder's padding allows gives the same


@dataclass(frozen=True, slots=True)
class _Voice:
    cond: Tensor
    """`[1, enc_emb_dim]`, the pre-trained speaker embedding."""
    reference: Tensor
    """`[1, enc_dim + 1]`, a row for `SpeakerRows`."""


@dataclass(slots=True)
class _Stream:
    """One request's state between windows."""

    params: CodecParams
    voice: _Voice
    generator: torch.Generator
    noise: Tensor
    """`[frames, mel]`: initial noise of the frames that are not emitted yet, as far as it was sampled."""
    mel: Tensor
    """`[frames, mel]`: the last frames, as far as BigVGAN still needs them."""
    context: Context | None = None
    """What the next window sees of the block on its left; None before the first."""
    total: int = 0
    """Mel frames solved so far; `mel` ends there."""
    num_emitted: int = 0
    """Mel frames whose samples were given out."""


class _Vocoding(NamedTuple):
    num_emitted: int
    """Mel frames of the utterance whose samples will have been given out."""
    mel: Tensor
    """`[frames, mel]`, from the stream's oldest frame on."""


class Token2Wav(CodecComponent):
    """Token2wav behind the codec engine. The given model's modules stay as they are; their tensors are shared.

    `speakers` maps a voice to its `cond` (`[1, enc_emb_dim]`) and `ref_mel` (`[1, frames, mel_dim]`), as in the
    checkpoint's speaker file. `early_vocoder` lets BigVGAN take the look-ahead's mel as its right context instead of
    waiting for the next window: sound comes about 1.5 blocks earlier and is off by how far that mel is off.

    `precision`: `tf32` counts on CUDA only. `float16` runs the matrix products of the DiT's blocks in half precision,
    whose mantissa is as long as TF32's, and all else in float32; a window that overflows is solved again in float32.
    `kernels` of the DiT's layers: `auto` is `triton` on CUDA, `torch` elsewhere. `params` are those of most requests,
    for the warm-up and the memory plan. `target` is where a model on the meta device will run, for `memory`.
    """

    sample_rate = SAMPLE_RATE

    def __init__(
        self,
        model: Qwen2_5OmniToken2WavModel,
        speakers: Mapping[str, Mapping[str, Tensor | int]],
        device: torch.device | str | None = None,
        *,
        default_voice: str | None = None,
        cuda_graphs: bool = True,
        precision: Precision = "tf32",
        kernels: Kernels = "auto",
        early_vocoder: bool = False,
        params: CodecParams | None = None,
        target: torch.device | None = None,
    ) -> None:
        if not speakers:
            raise CheckpointError("token2wav has no speakers; the checkpoint's speaker file must name at least one")
        self.device = torch.device(device) if device is not None else model.device
        model.to(self.device).eval()
        dit, vocoder = model.code2wav_dit_model, model.code2wav_bigvgan_model
        config = dit.config
        self._mel_dim: int = config.mel_dim
        self._repeats: int = config.repeats
        self._block_frames: int = config.block_size
        self._dtype: torch.dtype = dit.proj_out.weight.dtype
        self._samples_per_frame: int = math.prod(vocoder.config.upsample_rates)
        self.vocoder_context = vocoder_context(vocoder)
        self._early = early_vocoder
        self._params = params or CodecParams()
        # TF32 is a way of CUDA's; half precision works anywhere, if seldom faster.
        self._precision: Precision = "float32" if precision == "tf32" and self.device.type != "cuda" else precision
        tf32 = self._precision == "tf32"
        enabled = cuda_graphs and self.device.type == "cuda"
        self._graphs = GraphCache(enabled=enabled, priority=CODEC_PRIORITY, tf32=tf32)
        self._default_voice = default_voice or first_voice(speakers)
        self._voices = self._encode_voices(dit, speakers)
        if self._default_voice not in self._voices:
            raise CheckpointError(f"default voice {self._default_voice!r} is not among {', '.join(self._voices)}")
        silence = torch.zeros(1, _SILENT_FRAMES, self._mel_dim, device=self.device, dtype=self._dtype)
        self._dit = shared_copy(dit, {dit.input_embed.spk_encoder: SpeakerRows(_encode(dit, silence))})
        planned = self.device.type == "meta"
        on = target if planned and target is not None else self.device
        self._vocoder = fuse_activations(vocoder, planned=planned and on.type == "cuda")
        self.layout = self._make_layout()
        default = self._voices[self._default_voice]
        self._plans_graphs = planned and cuda_graphs and on.type == "cuda"
        self._planned_graphs: dict[int, int] = {}
        """Bytes by frames of a window: a plan asks for several numbers of rows, which have the same graphs."""
        fused = use_triton(kernels, on, planned=planned)
        self._flow = FlowSolver(self._dit, half=self._precision == "float16", fused=fused)
        if not planned:
            check_velocity(self._dit, default.cond, default.reference, self._flow.fused)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":  # pragma: no cover  (needs CUDA)
            self._stream = torch.cuda.Stream(self.device, priority=CODEC_PRIORITY)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the voices were encoded there

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self._voices)

    @property
    def samples_per_code(self) -> int:
        return self._repeats * self._samples_per_frame

    def group(self, params: CodecParams) -> Hashable:
        return params.num_steps, params.guidance_scale, params.sway, params.quality

    def open(self, request_id: str, params: CodecParams, voice: str | None) -> _Stream:
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        with self._on_stream():
            return _Stream(
                params=params,
                voice=self._voices[voice if voice is not None else self._default_voice],
                generator=torch.Generator().manual_seed(seed),
                noise=torch.empty(0, self._mel_dim),
                mel=torch.empty(0, self._mel_dim, device=self.device, dtype=self._dtype),
            )

    def noise_for(self, seed: int, num_frames: int) -> Tensor:
        """The initial noise (`float32 [1, num_frames, mel_dim]`, CPU) of a request with this seed, however cut."""
        return self._sample_noise(torch.Generator().manual_seed(seed), num_frames)[None, :num_frames]

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        streams = [_stream(window) for window in windows]
        if len({self.group(stream.params) for stream in streams}) != 1:
            raise ValueError("the windows of one batch must have equal parameters")
        with self._computing():
            nothing = Solution(torch.empty(0, self._mel_dim, device=self.device, dtype=self._dtype), None)
            solutions = [nothing] * len(windows)  # of a flush, where all codes were solved before
            busy = [i for i, window in enumerate(windows) if window.emit]
            if busy:
                solved = self._solve_finite([streams[i] for i in busy], [windows[i] for i in busy])
                for i, solution in zip(busy, solved, strict=True):
                    solutions[i] = solution
            return self._vocode_and_commit(streams, windows, solutions)

    def warm_up(self, chunk_blocks: Sequence[int], lookahead: int, max_blocks: int) -> None:
        """Capture the graphs: of the solver for each number of blocks, of BigVGAN for each place in an utterance."""
        params = self._params.model_copy(update={"seed": 0, "num_steps": 2})  # one interval of the solver
        block = self.layout.block_codes
        with self._computing():
            self._flow.intervals(self._params)
            sizes = padded_sizes(min(max_blocks, MAX_GRAPH_BLOCKS)) if self._graphs.enabled else []
            for size in reversed(sizes):  # the largest first: the others use its memory
                codes = (0,) * (size.blocks * block)
                window = Window(self.open("warm-up", params, None), codes, 0, len(codes), True)
                self._solve([_stream(window)], [window], half=self._flow.has_half)
        for count in WARM_BATCHES:
            states = [self.open("warm-up", params, None) for _ in range(count)]
            for blocks in (*chunk_blocks, chunk_blocks[-1]):
                codes = (0,) * (blocks * block + lookahead)
                self.decode([Window(state, codes, 0, blocks * block, False) for state in states])

    def memory(self, rows: int, codes: int, least: int = 1) -> StageMemory:
        """The solver or BigVGAN, whichever takes more, and the graphs where the target has them."""
        frames, blocks = codes * self._repeats, -(-codes // self.layout.block_codes)
        solver = 2 * rows * self.request_bytes  # what all windows keep, and the copy of each
        if not self._plans_graphs:
            solver += self._flow.interval_bytes(self._params.quality, rows * blocks, rows)
        activations = max(solver, self._vocoder_bytes(min(rows, WARM_BATCHES[-1]), frames))
        weights = weight_bytes((*self._flow.networks, self._vocoder))
        return StageMemory(weights, activations=activations, graphs=self._graph_bytes(frames))

    def _graph_bytes(self, frames: int) -> int:
        """Graphs of all sizes share one pool and their buffers: those of the largest."""
        if not self._plans_graphs:
            return 0
        if frames in self._planned_graphs:
            return self._planned_graphs[frames]
        sizes = padded_sizes(MAX_GRAPH_BLOCKS)
        largest = self._params.quality, sizes[-1].blocks, sizes[-1].windows
        pool = max(self._flow.interval_bytes(*largest), self._vocoder_bytes(WARM_BATCHES[-1], frames))
        driver = len(sizes) * SOLVERS[self._params.quality].evaluations + len(WARM_BATCHES) * _VOCODER_LENGTHS
        # A call runs once before it is captured. That memory is there: at the start no request keeps anything.
        planned = self._planned_graphs[frames] = pool + self._flow.buffer_bytes(*largest) + driver * _GRAPH_BYTES
        return planned

    @property
    def request_bytes(self) -> int:
        """What is kept of a block with the usual parameters."""
        return self._flow.kept_bytes(self._params)

    def _vocoder_bytes(self, rows: int, frames: int) -> int:
        spectrogram = torch.empty(rows, self._mel_dim, frames, dtype=self._dtype, device=META)
        return peak_bytes(lambda: bigvgan(self._vocoder, spectrogram))

    def close(self) -> None:
        self._graphs.clear()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """The component's device and its own stream, before those of the language models."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):  # pragma: no cover  (needs CUDA)
            yield

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with self._on_stream(), torch.inference_mode():
            yield

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Without a graph. Not for float16, where what is left in float32 is small: see `GraphCache`."""
        with allow_tf32(self._precision == "tf32"):
            yield

    # ------------------------------------------------------------------------------------------------ solver

    def _solve_finite(self, streams: Sequence[_Stream], windows: Sequence[Window]) -> list[Solution]:
        """Solve in half precision where that is asked for, and again in full what overflows: that alone."""
        solutions = self._solve(streams, windows, half=self._flow.has_half)
        if not self._flow.has_half:
            return solutions
        sums = torch.cat([solution.mel for solution in solutions]).sum(dim=1).cpu().numpy()
        ends = np.cumsum([len(solution.mel) for solution in solutions])
        bad = [i for i, part in enumerate(np.split(sums, ends[:-1])) if not np.isfinite(part).all()]
        if bad:
            again = self._solve([streams[i] for i in bad], [windows[i] for i in bad], half=False)
            for i, solution in zip(bad, again, strict=True):
                solutions[i] = solution
        return solutions

    def _solve(self, streams: Sequence[_Stream], windows: Sequence[Window], *, half: bool) -> list[Solution]:
        """Flow matching over the windows' new and look-ahead blocks."""
        graphed = self._graphs.enabled and sum(map(self._blocks, windows)) <= MAX_GRAPH_BLOCKS
        rows = [self._rows(stream, window) for stream, window in zip(streams, windows, strict=True)]
        batch = BlockBatch(rows, self.layout.block_codes, self._repeats, self.device, padded=graphed)
        if graphed:
            return self._flow.solve(batch, streams[0].params, half=half, graphs=self._graphs)
        with self._plainly():
            return self._flow.solve(batch, streams[0].params, half=half, graphs=None)

    def _blocks(self, window: Window) -> int:
        return -(-(len(window.codes) - window.history) // self.layout.block_codes)

    def _rows(self, stream: _Stream, window: Window) -> WindowRows:
        return WindowRows(
            codes=cast("Sequence[int]", window.codes[window.history :]),  # it has one codebook
            noise=self._noise(stream, window),
            cond=stream.voice.cond,
            reference=stream.voice.reference,
            context=stream.context,
            emit_blocks=0 if window.last else window.emit // self.layout.block_codes,
        )

    def _sample_noise(self, generator: torch.Generator, frames: int) -> Tensor:
        """At least `frames` rows of noise, sampled a whole block at a time so that no cut changes what follows."""
        count, shape = -(-frames // self._block_frames), (self._block_frames, self._mel_dim)
        if not count or math.prod(shape) % _RANDOM_GROUP == 0:
            return torch.randn((count * shape[0], shape[1]), generator=generator)  # the same numbers by one call
        return torch.cat([torch.randn(shape, generator=generator) for _ in range(count)])

    def _noise(self, stream: _Stream, window: Window) -> Tensor:
        """Noise of the window's new and look-ahead frames; what is left of it is kept for the next window."""
        frames = (len(window.codes) - window.history) * self._repeats
        missing = frames - len(stream.noise)
        if missing > 0:
            stream.noise = torch.cat((stream.noise, self._sample_noise(stream.generator, missing)))
        return stream.noise[:frames]

    # ----------------------------------------------------------------------------------------------- vocoder

    def _vocode_and_commit(
        self, streams: Sequence[_Stream], windows: Sequence[Window], solutions: Sequence[Solution]
    ) -> list[np.ndarray]:
        """Run BigVGAN over what is new, then move every stream on. Nothing before the last loop changes a stream."""
        plans = [self._plan(*parts) for parts in zip(streams, windows, solutions, strict=True)]
        waves: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(plans)
        by_length: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for i, plan in enumerate(plans):
            if plan.num_emitted > streams[i].num_emitted:
                # The end of an utterance has any length: a graph for each would be captured to be used once.
                by_length[len(plan.mel), windows[i].last].append(i)
        # No more at once than graphs were captured for: capturing one takes longer than running two.
        most = WARM_BATCHES[-1]
        groups = [
            (last, equal[i : i + most]) for (_, last), equal in by_length.items() for i in range(0, len(equal), most)
        ]
        for last, members in groups:
            wave = self._vocode(torch.stack([plans[i].mel for i in members]), graphed=not last).float().cpu()
            for i, samples in zip(members, wave, strict=True):
                first = streams[i].total - len(streams[i].mel)  # the frame with which plan.mel begins
                borders = (
                    (n - first) * self._samples_per_frame for n in (streams[i].num_emitted, plans[i].num_emitted)
                )
                waves[i] = samples[slice(*borders)].numpy().copy()
        context = self.vocoder_context[0]
        for stream, window, solution, plan in zip(streams, windows, solutions, plans, strict=True):
            emit = window.emit * self._repeats
            stream.total += emit
            stream.num_emitted = plan.num_emitted
            frames = stream.total - max(0, stream.num_emitted - context)  # frames that BigVGAN will need again
            end = len(stream.mel) + emit  # of the frames that are solved for good
            stream.mel = plan.mel[end - frames : end].clone()
            stream.noise = stream.noise[emit:]
            stream.context = solution.context
        return waves

    def _plan(self, stream: _Stream, window: Window, solution: Solution) -> _Vocoding:
        """What BigVGAN gives out now: all samples whose right context is there."""
        right = self.vocoder_context[1]
        emit = window.emit * self._repeats
        emitted_mel = solution.mel if self._early else solution.mel[:emit]
        total = stream.total + emit
        missing = 0 if window.last else max(0, right - (len(emitted_mel) - emit))
        mel = torch.cat((stream.mel, emitted_mel[: emit + right]))  # frames further ahead change nothing
        return _Vocoding(max(stream.num_emitted, total - missing), mel)

    def _vocode(self, mel: Tensor, *, graphed: bool) -> Tensor:
        """BigVGAN over `[B, frames, mel]`, giving `[B, samples]` on the device."""
        count = len(mel)
        graphed = graphed and self._graphs.enabled and mel.shape[1] <= _MAX_VOCODER_FRAMES
        if graphed and bucket(count) > count:
            mel = torch.cat((mel, mel[:1].expand(bucket(count) - count, -1, -1)))
        # The scaling of the spectrogram makes a tensor from a number, which cannot be captured either.
        spectrogram = self._vocoder.process_mel_spectrogram(mel.transpose(1, 2))
        if not graphed:
            with self._plainly():
                return bigvgan(self._vocoder, spectrogram)[:count]
        key = ("bigvgan", *mel.shape[:2])
        return self._graphs(key, lambda s: (bigvgan(self._vocoder, s),), spectrogram)[0][:count]

    # ------------------------------------------------------------------------------------------------- set-up

    def _encode_voices(
        self, dit: Qwen2_5OmniToken2WavDiTModel, speakers: Mapping[str, Mapping[str, Tensor | int]]
    ) -> dict[str, _Voice]:
        voices: dict[str, _Voice] = {}
        for name, speaker in speakers.items():
            cond, clip = speaker.get("cond"), speaker.get("ref_mel")
            if not isinstance(cond, Tensor) or not isinstance(clip, Tensor):
                raise CheckpointError(f"speaker {name!r} needs tensors 'cond' and 'ref_mel', has {', '.join(speaker)}")
            cond = cond.to(self.device, self._dtype).reshape(1, -1)
            reference = _encode(dit, clip.to(self.device, self._dtype).reshape(1, -1, self._mel_dim))
            voices[name] = _Voice(cond, torch.cat((reference, torch.ones_like(reference[:, :1])), dim=1))
        return voices

    def _make_layout(self) -> CodecLayout:
        config = self._dit.config
        if self._block_frames % self._repeats:
            raise CheckpointError(
                f"dit_config.block_size ({self._block_frames}) is not a multiple of repeats ({self._repeats})"
            )
        right = self.vocoder_context[1]
        return CodecLayout(
            block_codes=self._block_frames // self._repeats,
            codebook_size=self._dit.text_embed.codec_embed.num_embeddings,
            max_codes=config.max_position_embeddings // self._repeats,
            mixed_windows=True,
            # The look-ahead spreads with every evaluation, so that there is no limit in practice.
            max_lookahead_blocks=len(config.look_ahead_layers) * 1024,
            first_blocks=1 if self._early else right // self._block_frames + 1,
            code_seconds=self.samples_per_code / self.sample_rate,
        )


def _encode(dit: Qwen2_5OmniToken2WavDiTModel, clip: Tensor) -> Tensor:
    """`[1, enc_dim]` of a reference clip `[1, frames, mel]`."""
    with torch.no_grad():
        return dit.input_embed.spk_encoder(clip)  # type: ignore[no-any-return]


def _stream(window: Window) -> _Stream:
    if not isinstance(window.state, _Stream):
        raise TypeError("the window's state does not come from Token2Wav.open")
    return window.state
