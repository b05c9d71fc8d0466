"""Qwen2.5-Omni's token2wav as a streaming codec component, on transformers' own modules.

Codes become a mel spectrogram by flow matching (a transformer that attends in blocks, solved by Runge-Kutta 4), and
the spectrogram becomes samples by BigVGAN (convolutions). A window of an utterance is solved with the blocks on its
left pinned to their recorded trajectory (see `omnistage.engines.codec.flow`) and with look-ahead blocks on its right,
whose results are thrown away. BigVGAN runs over the new frames with as much old context as its receptive field.
"""

from __future__ import annotations

import copy
import functools
import math
import secrets
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from omnistage.core.errors import CheckpointError
from omnistage.core.params import CodecParams
from omnistage.core.stage_memory import StageMemory
from omnistage.engines.codec.component import CodecComponent, CodecLayout, Window
from omnistage.engines.codec.flow import evaluations, integrate, time_grid
from omnistage.engines.codec.graphs import GraphCache, allow_tf32, bucket
from omnistage.engines.peak_memory import META, peak_bytes, weight_bytes
from omnistage.models.qwen2_5_omni.vocoder import bigvgan, vocoder_context
from omnistage.models.qwen2_5_omni.voices import first_voice

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniToken2WavDiTModel,
        Qwen2_5OmniToken2WavModel,
    )

_M = TypeVar("_M", bound=nn.Module)

SAMPLE_RATE = 24_000  # not in the checkpoint's config
Precision = Literal["float32", "tf32", "float16"]

# Longer windows (whole utterances) run eagerly: launching is a small part there, and graphs would hold much memory.
_MAX_GRAPH_FRAMES = 1024
_GRAPH_BYTES = 4 << 20  # what the driver takes for one
_SILENT_FRAMES = 256  # any length that the speaker encoder's padding allows gives the same
_NO_GUIDANCE = 1e-5  # transformers' threshold


@dataclass(frozen=True, slots=True)
class _Voice:
    cond: Tensor
    """`[1, enc_emb_dim]`, the pre-trained speaker embedding."""
    reference: Tensor
    """`[1, enc_dim + 1]`, a row for `_SpeakerRows`."""


@dataclass(slots=True)
class _Stream:
    """One request's state between windows."""

    params: CodecParams
    voice: _Voice
    generator: torch.Generator
    noise: Tensor
    """`[frames, mel]`: initial noise of the frames that are not emitted yet, as far as it was sampled."""
    trajectory: Tensor
    """`[evaluations, frames, mel]`: the solver's states of the blocks left of the next window."""
    mel: Tensor
    """`[frames, mel]`: the last frames, as far as BigVGAN still needs them."""
    total: int = 0
    """Mel frames solved so far; `mel` ends there."""
    sent: int = 0
    """Mel frames whose samples were given out."""


class _SpeakerRows(nn.Module):
    """Stands in for the DiT's speaker encoder, which transformers runs on the reference clip at every evaluation.

    The clip never changes, so each voice is encoded once, and the DiT is given the result in the clip's place: rows
    `[N, 1, enc_dim + 1]` whose last column is 1. Guidance replaces a row by zeros; that stands for the silent clip,
    whose embedding is the same for every length (a constant stays one through reflect padding and pooling).
    """

    silence: Tensor

    def __init__(self, silence: Tensor) -> None:
        super().__init__()
        self.register_buffer("silence", silence, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.where(rows[:, 0, -1:] > 0, rows[:, 0, :-1], self.silence)


class Token2Wav(CodecComponent):
    """Token2wav behind the codec engine. The given model's modules stay as they are; their tensors are shared.

    `speakers` maps a voice to its `cond` (`[1, enc_emb_dim]`) and `ref_mel` (`[1, frames, mel_dim]`), as in the
    checkpoint's speaker file. `early_vocoder` lets BigVGAN take the look-ahead's mel as its right context instead of
    waiting for the next window: sound comes about 1.5 blocks earlier and is off by how far that mel is off.

    `precision`: `tf32` counts on CUDA only. `float16` runs the matrix products of the DiT's blocks in half precision,
    whose mantissa is as long as TF32's, and all else in float32; a window that overflows is solved again in float32.
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
        compile: bool = False,
        early_vocoder: bool = False,
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
        self._left_blocks = len(config.look_backward_layers)
        self._samples_per_frame: int = math.prod(vocoder.config.upsample_rates)
        self.vocoder_context = vocoder_context(vocoder)
        self._early = early_vocoder
        # TF32 is a way of CUDA's; half precision works anywhere, if seldom faster.
        self._precision: Precision = "float32" if precision == "tf32" and self.device.type != "cuda" else precision
        self._graphs = GraphCache(enabled=cuda_graphs and self.device.type == "cuda")
        self._default_voice = default_voice or first_voice(speakers)
        self._voices = self._encode_voices(dit, speakers)
        if self._default_voice not in self._voices:
            raise CheckpointError(f"default voice {self._default_voice!r} is not among {', '.join(self._voices)}")
        silence = torch.zeros(1, _SILENT_FRAMES, self._mel_dim, device=self.device, dtype=self._dtype)
        self._dit = _shared_copy(dit, {dit.input_embed.spk_encoder: _SpeakerRows(_encode(dit, silence))})
        self._vocoder = vocoder
        for block in self._dit.transformer_blocks:
            block.register_forward_pre_hook(_one_mask, with_kwargs=True)
        self._half = _half_copy(self._dit) if self._precision == "float16" else None
        self._velocity = torch.compile(self._guided, dynamic=True) if compile else self._guided
        self.layout = self._make_layout()
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":  # pragma: no cover  (needs CUDA)
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the voices were encoded there

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self._voices)

    @property
    def samples_per_code(self) -> int:
        return self._repeats * self._samples_per_frame

    def group(self, params: CodecParams) -> Hashable:
        return params.num_steps, params.guidance_scale, params.sway

    def open(self, request_id: str, params: CodecParams, voice: str | None) -> _Stream:
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        shape = (evaluations(params.num_steps), 0, self._mel_dim)
        with self._on_stream():
            return _Stream(
                params=params,
                voice=self._voices[voice if voice is not None else self._default_voice],
                generator=torch.Generator().manual_seed(seed),
                noise=torch.empty(0, self._mel_dim),
                trajectory=torch.empty(shape, device=self.device, dtype=self._dtype),
                mel=torch.empty(0, self._mel_dim, device=self.device, dtype=self._dtype),
            )

    def noise_for(self, seed: int, num_frames: int) -> Tensor:
        """The initial noise (`float32 [1, num_frames, mel_dim]`, CPU) of a request with this seed, however cut."""
        return self._sample_noise(torch.Generator().manual_seed(seed), num_frames)[None, :num_frames]

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        streams = [_stream(window) for window in windows]
        if len({window.shape for window in windows}) != 1:
            raise ValueError("the windows of one batch must have one shape")
        with self._on_stream(), torch.inference_mode(), allow_tf32(self._precision != "float32"):
            if windows[0].emit:
                solved, trajectories = self._solve(streams, windows, half=self._half is not None)
                if self._half is not None and not bool(solved.isfinite().all()):
                    solved, trajectories = self._solve(streams, windows, half=False)
            else:  # a flush: all codes were solved before
                trajectories = None
                solved = torch.empty(len(streams), 0, self._mel_dim, device=self.device, dtype=self._dtype)
            return self._vocode_and_commit(streams, windows[0], solved, trajectories)

    def memory(self, rows: int, codes: int) -> StageMemory:
        """The flow's evaluations and BigVGAN, whichever is larger; a graph of each window's shape shares one pool."""
        # A short window on the left, as `_solve` has it; BigVGAN sees as many frames, its own context included.
        frames = codes * self._repeats
        empty = functools.partial(torch.empty, dtype=self._dtype, device=META)
        voice = next(iter(self._voices.values()))
        inputs = (
            empty(rows, frames, self._mel_dim),
            empty(rows),
            torch.empty(rows, codes, dtype=torch.int64, device=META),
            empty(rows, *voice.cond.shape),
            empty(rows, *voice.reference.shape),
            empty(rows, 1, 1),
        )
        solver = peak_bytes(lambda: _velocity(self._dit, *inputs))
        spectrogram = empty(rows, self._mel_dim, frames)
        vocoder = peak_bytes(lambda: bigvgan(self._vocoder, spectrogram))
        modules = (self._dit, self._vocoder, *([] if self._half is None else [self._half]))
        peak = max(solver, vocoder)
        return StageMemory(weight_bytes(modules), activations=peak, graphs=peak + self._graphs.capacity * _GRAPH_BYTES)

    def close(self) -> None:
        self._graphs.clear()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """The component's device and its own stream; the language models' have a higher priority."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):  # pragma: no cover  (needs CUDA)
            yield

    # ------------------------------------------------------------------------------------------------ solver

    def _solve(
        self, streams: Sequence[_Stream], windows: Sequence[Window], *, half: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Mel of the windows' new and look-ahead frames `[B, n, mel]`; trajectories to keep `[E, B, r, mel]`."""
        window, params = windows[0], streams[0].params
        left = min(window.history // self.layout.block_codes, self._left_blocks)
        old = left * self.layout.block_codes  # codes of pinned blocks
        frames = (len(window.codes) - window.history + old) * self._repeats
        graphed = self._graphs.enabled and frames <= _MAX_GRAPH_FRAMES
        # Padding rows repeat the first request; rows never meet, so their results are simply dropped.
        rows = list(range(len(streams))) + [0] * ((bucket(len(streams)) - len(streams)) if graphed else 0)
        codes = torch.tensor([windows[i].codes[window.history - old :] for i in rows], device=self.device)
        x = torch.stack([self._noise(streams[i], windows[i]) for i in rows]).to(self.device, self._dtype)
        pinned = torch.stack([streams[i].trajectory for i in rows], dim=1)
        cond = torch.stack([streams[i].voice.cond for i in rows])
        reference = torch.stack([streams[i].voice.reference for i in rows])
        scale = torch.full((len(rows), 1, 1), params.guidance_scale, device=self.device, dtype=self._dtype)
        if params.guidance_scale < _NO_GUIDANCE:
            scale = scale[:0]  # an empty tensor asks for no guidance, which is another graph
        key = ("dit", len(rows), frames, len(scale), half)
        velocity = self._guided_half if half else self._velocity

        def field(state: Tensor, t: Tensor) -> Tensor:
            at = torch.full((len(rows),), t.item(), device=self.device, dtype=self._dtype)
            inputs = (state, at, codes, cond, reference, scale)
            return self._graphs(key, velocity, *inputs) if graphed else velocity(*inputs)

        end = (old + window.emit) * self._repeats
        keep = slice(end if window.last else max(0, end - self._left_blocks * self._block_frames), end)
        solved, trajectories = integrate(field, x, pinned, time_grid(params.num_steps, params.sway), keep)
        return solved[: len(streams)], trajectories[:, : len(streams)]

    def _guided(self, *inputs: Tensor) -> Tensor:
        return _velocity(self._dit, *inputs)

    def _guided_half(self, *inputs: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.float16, cache_enabled=False):
            return _velocity(self._half, *inputs).float()

    def _sample_noise(self, generator: torch.Generator, frames: int) -> Tensor:
        """At least `frames` rows of noise, sampled a whole block at a time so that no cut changes what follows."""
        shape = (self._block_frames, self._mel_dim)
        blocks = [torch.randn(shape, generator=generator) for _ in range(-(-frames // self._block_frames))]
        return torch.cat(blocks) if blocks else torch.empty(0, self._mel_dim)

    def _noise(self, stream: _Stream, window: Window) -> Tensor:
        """Noise of the window's new and look-ahead frames; what is left of it is kept for the next window."""
        frames = (len(window.codes) - window.history) * self._repeats
        missing = frames - len(stream.noise)
        if missing > 0:
            stream.noise = torch.cat((stream.noise, self._sample_noise(stream.generator, missing)))
        return stream.noise[:frames]

    # ----------------------------------------------------------------------------------------------- vocoder

    def _vocode_and_commit(
        self, streams: Sequence[_Stream], window: Window, solved: Tensor, kept: Tensor | None
    ) -> list[np.ndarray]:
        """Run BigVGAN over what is new, then move every stream on. Nothing before the last loop changes a stream."""
        left, right = self.vocoder_context
        emit = window.emit * self._repeats
        first = streams[0]  # equal window shapes make these counters equal, up to a shift
        shown = solved if self._early else solved[:, :emit]
        total = first.total + emit
        ahead = 0 if window.last else max(0, right - (shown.shape[1] - emit))
        upto = max(first.sent, total - ahead)
        begin = first.total - len(first.mel)
        samples = torch.empty(len(streams), 0)
        if upto > first.sent:
            wave = self._vocode(torch.stack([torch.cat((s.mel, shown[i])) for i, s in enumerate(streams)]))
            borders = ((first.sent - begin) * self._samples_per_frame, (upto - begin) * self._samples_per_frame)
            samples = wave[:, slice(*borders)].float().cpu()
        result = [part.numpy().copy() for part in samples]
        advance = upto - first.sent
        for i, stream in enumerate(streams):
            stream.total += emit
            stream.sent += advance
            needed = stream.total - max(0, stream.sent - left)  # frames that BigVGAN will need again
            joined = torch.cat((stream.mel, solved[i, :emit]))
            stream.mel = joined[len(joined) - needed :].clone()
            stream.noise = stream.noise[emit:]
            if kept is not None:
                stream.trajectory = kept[:, i].clone()
        return result

    def _vocode(self, mel: Tensor) -> Tensor:
        """BigVGAN over `[B, frames, mel]`, giving `[B, samples]` on the device."""
        count = len(mel)
        graphed = self._graphs.enabled and mel.shape[1] <= _MAX_GRAPH_FRAMES
        if graphed and bucket(count) > count:
            mel = torch.cat((mel, mel[:1].expand(bucket(count) - count, -1, -1)))
        # The scaling of the spectrogram makes a tensor from a number, which cannot be captured either.
        spectrogram = self._vocoder.process_mel_spectrogram(mel.transpose(1, 2))
        if not graphed:
            return bigvgan(self._vocoder, spectrogram)[:count]
        key = ("bigvgan", *mel.shape[:2])
        return self._graphs(key, lambda s: bigvgan(self._vocoder, s), spectrogram)[:count]

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
        left, right = self.vocoder_context
        return CodecLayout(
            block_codes=self._block_frames // self._repeats,
            codebook_size=self._dit.text_embed.codec_embed.num_embeddings,
            max_codes=config.max_position_embeddings // self._repeats,
            history_blocks=max(self._left_blocks, -(-(left + right) // self._block_frames)),
            # The look-ahead spreads with every evaluation, so that there is no limit in practice.
            max_lookahead_blocks=len(config.look_ahead_layers) * 1024,
            first_blocks=1 if self._early else right // self._block_frames + 1,
            code_seconds=self.samples_per_code / self.sample_rate,
        )


def _velocity(dit: Qwen2_5OmniToken2WavDiTModel, *tensors: Tensor) -> Tensor:
    """One evaluation of the field, as in transformers' `sample`; shapes as in `Token2Wav._solve`."""
    x, t, codes, cond, reference, scale = tensors
    inputs = {
        "hidden_states": x,
        "speaker_embedding": cond.expand(-1, x.shape[1], -1),
        "condition_vector": reference,
        "quantized_code": codes,
        "time_step": t,
    }
    if not len(scale):
        return dit(**inputs, apply_cfg=False)  # type: ignore[no-any-return]
    guided, null = torch.chunk(dit(**inputs, apply_cfg=True), 2, dim=0)
    return guided + (guided - null) * scale


def _encode(dit: Qwen2_5OmniToken2WavDiTModel, clip: Tensor) -> Tensor:
    """`[1, enc_dim]` of a reference clip `[1, frames, mel]`."""
    with torch.no_grad():
        return dit.input_embed.spk_encoder(clip)  # type: ignore[no-any-return]


def _shared_copy(module: _M, swaps: Mapping[nn.Module, nn.Module]) -> _M:
    """A copy of the module tree with other submodules in some places; it shares every parameter and buffer.

    `deepcopy` takes what its memo already holds, so the original stays untouched and nothing private is used.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    memo.update({id(old): new for old, new in swaps.items()})
    return copy.deepcopy(module, memo)


def _one_mask(
    _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let a block make its attention mask once instead of for every row and head, which are all alike."""
    difference = kwargs.get("block_diff")
    if difference is not None:
        kwargs["block_diff"] = difference[:1, :1]
    return args, kwargs


class _Exact(nn.Module):
    """Runs a module outside autocast, so that what follows adds up in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.module(x.float())  # type: ignore[no-any-return]


def _half_copy(dit: Qwen2_5OmniToken2WavDiTModel) -> Qwen2_5OmniToken2WavDiTModel:
    """A copy whose blocks hold their matrices in float16; the stream between them stays float32."""
    half = _shared_copy(dit, {dit.input_embed.proj: _Exact(dit.input_embed.proj)})
    for module in half.transformer_blocks.modules():
        if isinstance(module, nn.Linear):
            for name, tensor in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(tensor.detach().half(), requires_grad=False))
    return half


def _stream(window: Window) -> _Stream:
    if not isinstance(window.state, _Stream):
        raise TypeError("the window's state does not come from Token2Wav.open")
    return window.state
