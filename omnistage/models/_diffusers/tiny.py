"""What random checkpoints of diffusers' layout consist of: text encoders, their tokenizers, a VAE, the index.

Each part goes to its own folder, with the class, configuration and weight names that published checkpoints have.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn

from omnistage.core.verification import Progress
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers.loading import INDEX, diffusers
from omnistage.models._tiny_common import Init, Rule, between, stored_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLIP_BOS, CLIP_EOS = "<|startoftext|>", "<|endoftext|>"
CLIP_TEXT, T5_TEXT = 77, 512
_CLIP_MERGES = 300
QWEN3_CHAT = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- endif -%}"
    "{%- endif -%}"
)
_WEIGHTS = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}

# ------------------------------------------------------------------------------------------- weights and files


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A module of which only names and shapes are wanted."""
    with torch.device("meta"):
        return make()


def diffusers_model(cls: str, **settings: object) -> nn.Module:
    """A network of diffusers, on no device."""
    return on_meta(lambda: getattr(diffusers(), cls)(**settings))


@dataclass(frozen=True, slots=True, eq=False)
class TinyModel:
    """A network of a checkpoint: a module on no device, and how its weights are initialised and named.

    Those in `fixed` have these values.
    """

    module: nn.Module
    rule: Rule
    hub_name: Callable[[str], str] = str
    fixed: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TinyPart:
    """A part without weights: what model_index.json says of it, and what writes its folder."""

    library: str
    cls: str
    write: Callable[[Path], None]


def write_model(folder: Path, tiny: TinyModel, *, seed: int, dtype: torch.dtype) -> None:
    """Write a network's configuration and weights. Tied weights are written once.

    The folder's name is part of the seed: two encoders of one shape in one checkpoint must not be equal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = tiny.module
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is other for other in tensors.values()):
            tensors[name] = tensor
    library = library_of(model)
    sizes = {name: math.prod(tensor.shape) * dtype.itemsize for name, tensor in tensors.items()}

    def make(name: str) -> tuple[str, Tensor]:
        value = tiny.fixed.get(name)
        if value is None:
            value = common.initial(f"{folder.name}.{name}", tensors[name].shape, tiny.rule, seed)
        return tiny.hub_name(name), value.to(dtype) if value.is_floating_point() else value

    common.write_shards(folder, _WEIGHTS[library], sizes, common.MAX_SHARD_BYTES, make)
    if library == "transformers":
        model.config.architectures = [type(model).__name__]
        model.config.dtype = dtype
        model.config.save_pretrained(folder)
    else:
        model.save_config(folder)


@dataclass(frozen=True, slots=True, eq=False)
class TinyPipeline:
    """A checkpoint: the class of diffusers that it is for, and its parts."""

    cls: str
    models: Mapping[str, TinyModel]
    others: Mapping[str, TinyPart | None]
    """Tokenizers, processors and the scheduler; None for a part that the pipeline knows and this checkpoint lacks."""
    order: Sequence[str] | None = None
    """Of the parts in model_index.json: by name, unless said."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of model_index.json, beside the parts."""


def writer(describe: Callable[[float, str], TinyPipeline], variants: Iterable[str] = ("",)) -> Callable[..., None]:
    """A family's `tiny`. `describe` gives the checkpoint of a scale and of one of the variants; the first is usual."""
    usual = next(iter(variants))

    def write(
        folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Progress | None = None, variant: str = usual
    ) -> None:
        """Write the checkpoint into `folder`, which must be new or empty."""
        common.start(folder, scale, variant, variants)
        write_checkpoint(folder, describe(scale, variant), seed, scale, progress)

    return write


def write_checkpoint(
    folder: Path, pipeline: TinyPipeline, seed: int, scale: float, progress: Progress | None = None
) -> None:
    """Write all parts and model_index.json."""
    report = progress or (lambda _what, _done: None)
    index: dict[str, tuple[str, str] | None] = {}
    for number, (name, model) in enumerate(pipeline.models.items()):
        report(f"writing {name}", number / len(pipeline.models))
        write_model(folder / name, model, seed=seed, dtype=stored_dtype(scale))
        index[name] = library_of(model.module), type(model.module).__name__
    for name, part in pipeline.others.items():
        index[name] = None if part is None else (part.library, part.cls)
        if part is not None:
            part.write(folder / name)
    order = pipeline.order or sorted(index)
    write_index(folder, pipeline.cls, {name: index[name] for name in order}, **pipeline.settings)
    report("checkpoint written", 1.0)


def library_of(module: nn.Module) -> str:
    """The package that defines a module: diffusers or transformers."""
    return type(module).__module__.partition(".")[0]


def write_index(folder: Path, pipeline: str, parts: Mapping[str, tuple[str, str] | None], **settings: object) -> None:
    """Write model_index.json; last, for a folder without it is no checkpoint."""
    index = {name: list(part) if part is not None else [None, None] for name, part in parts.items()}
    version = {"_class_name": pipeline, "_diffusers_version": diffusers().__version__}
    common.write_json(folder / INDEX, {**version, **settings, **index})


def flow_scheduler(**settings: object) -> TinyPart:
    """The scheduler that flow-matching models share."""
    scheduler = diffusers().FlowMatchEulerDiscreteScheduler(**settings)
    return TinyPart("diffusers", "FlowMatchEulerDiscreteScheduler", scheduler.save_pretrained)


def clip_tokenizer(*, pad_token: str = CLIP_EOS) -> TinyPart:
    return TinyPart("transformers", "CLIPTokenizer", lambda folder: write_clip_tokenizer(folder, pad_token=pad_token))


def t5_tokenizer() -> TinyPart:
    return TinyPart("transformers", "T5TokenizerFast", write_t5_tokenizer)


def qwen_tokenizer(
    ids: Mapping[str, int], cls: str = "Qwen2Tokenizer", *, qwen: bool = True, **more: object
) -> TinyPart:
    """Settings as in `common.tokenizer_settings`; `cls` is what model_index.json calls the class."""
    settings = common.tokenizer_settings("Qwen2Tokenizer", 131072, more, qwen=qwen)
    return TinyPart("transformers", cls, lambda folder: common.write_tokenizer(folder, ids, settings))


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """A smooth random picture, `uint8 [h, w, 3]`."""
    coarse = np.random.default_rng(seed).uniform(0, 255, (1, 3, 5, 4)).astype(np.float32)
    fine = nn.functional.interpolate(torch.from_numpy(coarse), size=(height, width), mode="bilinear")
    return fine[0].permute(1, 2, 0).round().to(torch.uint8).numpy()


# ------------------------------------------------------------------------------------------- initialisation of weights


def transformer_init(name: str, shape: Sequence[int]) -> Init:
    """A diffusion transformer: activations keep their size; modulation (AdaLN) has an effect without dominating."""
    if len(shape) == 1:
        return common.vector_init(name)
    return common.normal(shape, gain=0.5 if "norm" in name or "modulation" in name else 1.0)


def vae_init(name: str, shape: Sequence[int]) -> Init:
    """A convolutional VAE, its pictures spread over the range of pixels."""
    if len(shape) == 1:
        return common.vector_init(name)
    return common.normal(shape, gain=0.6 if name.endswith("decoder.conv_out.weight") else 1.0)


def clip_init(name: str, shape: Sequence[int]) -> Init:
    return Init(0.5) if "embedding" in name else common.decoder_init(name, shape)


def t5_init(name: str, shape: Sequence[int]) -> Init:
    """T5 does not scale its attention scores, so the queries are small from the start."""
    if len(shape) == 1:
        return Init(0.1, mean=1.0)
    if "shared" in name or "relative_attention_bias" in name:
        return Init(0.5)
    return common.normal(shape, gain=0.4 if name.endswith("SelfAttention.q.weight") else 1.0)


# ------------------------------------------------------------------------------------------- tokenizers


def clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """CLIP's kind of byte pairs: every byte alone and at a word's end, then merges, then the two special tokens."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = Tokenizer(BPE(end_of_word_suffix="</w>"))
    trained.normalizer = normalizers.Lowercase()
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    size = len(bytes_) * 2 + _CLIP_MERGES
    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        # Named, so that their ids and with them the order of equally frequent pairs are the same in every process.
        special_tokens=[f"{byte}</w>" for byte in bytes_],
        initial_alphabet=bytes_,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    # Word by word, so that no merge reaches over a space: CLIP drops them.
    trained.train_from_iterator(common.TRAINING_TEXT.split(), trainer)
    merges = [(left, right) for left, right in json.loads(trained.to_str())["model"]["merges"]][:_CLIP_MERGES]
    tokens = [*bytes_, *(f"{byte}</w>" for byte in bytes_), *(left + right for left, right in merges)]
    tokens = [*dict.fromkeys(tokens), CLIP_BOS, CLIP_EOS]
    return {token: index for index, token in enumerate(tokens)}, merges


def write_clip_tokenizer(folder: Path, *, pad_token: str = CLIP_EOS) -> None:
    """`pad_token` is "!" in the second of Stable Diffusion's CLIPs."""
    vocab, merges = clip_vocabulary()
    tokenizer = transformers.CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad_token, model_max_length=CLIP_TEXT)
    tokenizer.save_pretrained(folder)
    common.write_json(folder / "vocab.json", vocab)
    common.write_merges(folder, merges)


def t5_pieces() -> list[tuple[str, float]]:
    """Unigram pieces with their log-probabilities: the special tokens, characters, then words."""
    text = common.TRAINING_TEXT
    counts = Counter(f"\u2581{word}" for word in text.split())
    characters = sorted({chr(code) for code in range(33, 127)} | {c for c in text if not c.isspace()})
    total = sum(counts.values())
    words = sorted((word, math.log(count / total)) for word, count in counts.items())
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -8.0)]
    return [*special, *((c, -10.0) for c in characters), *words]


def write_t5_tokenizer(folder: Path) -> None:
    transformers.T5TokenizerFast(vocab=t5_pieces(), model_max_length=T5_TEXT).save_pretrained(folder)


# ------------------------------------------------------------------------------------------- text encoders, VAE


def clip(scale: float, *, hidden: Sequence[int], layers: Sequence[int], projected: bool) -> PreTrainedModel:
    """A CLIP text encoder, on no device; `projected` is the class with a projection of the pooled output."""
    vocab, _ = clip_vocabulary()
    head = 16 if scale < 0.5 else 64
    width = between(scale, hidden, head)
    config = transformers.CLIPTextConfig(
        vocab_size=between(scale, (1024, 49408), 64),
        hidden_size=width,
        intermediate_size=width * 4,
        num_hidden_layers=between(scale, layers),
        num_attention_heads=width // head,
        max_position_embeddings=CLIP_TEXT,
        projection_dim=width,
        hidden_act="quick_gelu",
        bos_token_id=vocab[CLIP_BOS],
        eos_token_id=vocab[CLIP_EOS],
        pad_token_id=vocab[CLIP_EOS],
    )
    cls = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return on_meta(lambda: cls(config))


def clip_hub_name(name: str) -> str:
    """Published checkpoints have every weight but the projection under `text_model`."""
    return name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}"


def t5(scale: float, kind: str = "T5", vocab: tuple[int, int] = (1280, 32128)) -> nn.Module:
    """T5's encoder (or UMT5's), at scale 1 that of t5-v1_1-xxl (or umt5-xxl), on no device."""
    width = t5_width(scale)
    head = 16 if scale < 0.5 else 64
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=between(scale, vocab, 64),
        d_model=width,
        d_kv=head,
        d_ff=between(scale, (96, 10240), 32),
        num_layers=between(scale, (2, 24)),
        num_heads=width // head,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return on_meta(lambda: getattr(transformers, f"{kind}EncoderModel")(config))


def t5_width(scale: float) -> int:
    return between(scale, (64, 4096), 64)


def decoder_sizes(
    scale: float, ids: Mapping[str, int], *, vocab: int, hidden: int, feed_forward: int, layers: tuple[int, int]
) -> dict[str, Any]:
    """Settings of a Llama or its relatives; the sizes are those of scale 1, `layers` also that of scale 0."""
    heads = between(scale, (2, 32), 2)
    return {
        "vocab_size": between(scale, (1024, vocab), 64),
        "hidden_size": between(scale, (32, hidden), 32),
        "intermediate_size": between(scale, (64, feed_forward), 32),
        "num_hidden_layers": between(scale, layers),
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 1),
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }


def autoencoder(scale: float, *, scaling_factor: float, **settings: object) -> nn.Module:
    """The VAE of Stable Diffusion and FLUX.1, eight pixels a latent at every scale, on no device.

    It is that with 16 channels, where `settings` say nothing else.
    """
    narrow = between(scale, (16, 128), 32 if scale else 16)
    wide = between(scale, (32, 512), 32)
    blocks = 4
    return diffusers_model(
        "AutoencoderKL",
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(narrow, min(2 * narrow, wide), wide, wide),
        layers_per_block=2 if scale else 1,
        norm_num_groups=32 if scale else 8,
        scaling_factor=scaling_factor,
        force_upcast=True,
        **{
            "latent_channels": 16,
            "sample_size": 1024,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            **settings,
        },
    )
