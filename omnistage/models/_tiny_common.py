"""What the families' random checkpoints share: shapes between two sizes, a tokenizer, seeded weights, shards.

Weights are initialised tensor by tensor from the seed and the tensor's name, and written shard by shard: the same seed
gives the same bytes whatever the order, and a checkpoint larger than memory can be written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from omnistage.core.errors import CheckpointError, ConfigError
from omnistage.core.verification import Progress

BASE_VOCAB = 875
USER_TOKEN_ID = 872  # what Qwen's vocabulary gives "user"; pinned, so that every size agrees
MAX_SHARD_BYTES = 4_900_000_000
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TRAINING_TEXT = """
A model that listens, looks, reads and speaks is not one network but several, each good at one thing. The first one
thinks: it takes the words of the question, the colours of the picture and the sound of the voice, and writes an answer
one token after another. The second one talks: it follows the answer while it is being written and chooses the small
pieces of sound that say it. The third one paints those pieces as a spectrogram, and the last one turns the drawing into
a wave that a loudspeaker can play. What is in this image? Describe the video in a few sentences, please. Who is
speaking, and what did they say? The quick brown fox jumps over the lazy dog while five wizards box with strange
numbers: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 100 and 2048. Hello, world! How are you today? I am fine, thank you;
the weather is bright, the river is quiet, and the children are playing under the old trees near the school. Once upon
a time there was a little robot who wanted to learn the names of all the birds. Every morning it walked through the
garden, listened carefully, and wrote down whatever it heard. Some songs were short and some were long, some were high
and some were low, but none of them was ever quite the same. Yes. No. Maybe. Certainly, here is an example of a function
in Python: def add(first, second): return first + second. Please explain how it works, step by step, and keep the answer
simple. Because the train was late, we missed the beginning of the concert, although the music could be heard outside.
Bitte antworten Sie auf Deutsch. Ich verstehe die Frage nicht ganz. Pourriez-vous parler plus lentement?
El gato duerme en la ventana. Questa mattina il mare era calmo. Information, question, answer, system, message, request,
response, memory, machine, language, picture, number, letter, water, house, light, night, right, might, would, should,
there, their, where, which, these, those, other, another, before, after, because, between, through, without, against.
"""


@dataclass(frozen=True, slots=True)
class Init:
    """How one tensor is initialised: normal with this mean and deviation, all rows outside `keep_rows` zero."""

    std: float
    mean: float = 0.0
    keep_rows: tuple[tuple[int, int], ...] | None = None  # half-open ranges


Rule = Callable[[str, Sequence[int]], Init]
"""The initialisation of a tensor, by its name and shape."""


def stored_dtype(scale: float) -> torch.dtype:
    """Small checkpoints are for comparisons and kept exact, large ones are stored as published ones are."""
    return torch.float32 if scale <= 0.5 else torch.bfloat16


def check_scale(scale: float) -> None:
    if not 0.0 <= scale <= 1.0:
        raise ConfigError(f"scale goes from 0 (tiny) to 1 (the full shapes); got {scale}", param="scale")


def between(scale: float, anchors: Sequence[int], multiple: int = 1) -> int:
    """The size at `scale`: geometric between equally spaced anchors, rounded up to a multiple, exact at an anchor.

    Rounding up keeps the sizes monotonic in `scale` even where the multiple itself grows with it.
    """
    position = scale * (len(anchors) - 1)
    lower = min(int(position), len(anchors) - 2)
    low, high = anchors[lower], anchors[lower + 1]
    exact = low * math.pow(high / low, position - lower)
    # The small allowance keeps floating point from pushing an exact anchor up to the next multiple.
    return math.ceil(exact / multiple - 1e-6) * multiple


def normal(shape: Sequence[int], fan_in: int | None = None, gain: float = 1.0) -> Init:
    """A weight whose output has `gain` times the deviation of its input."""
    return Init(gain / math.sqrt(fan_in or math.prod(shape[1:])))


def decoder_init(name: str, shape: Sequence[int]) -> Init:
    """A decoder layer, an encoder layer or an embedding: activations keep their size from layer to layer."""
    if len(shape) == 1:
        return vector_init(name)
    if "embed_tokens" in name or "bos_eos_token" in name:
        return Init(0.5)
    leaf = name.split(".")[-2]
    # Attention that looks at single tokens rather than at their mean is what makes an answer depend on its history.
    return normal(shape, gain=2.0 if leaf in ("q_proj", "k_proj", "o_proj") else 1.0)


def vector_init(name: str) -> Init:
    """A bias, or the scale of a normalisation."""
    return Init(0.1, mean=1.0) if name.endswith("weight") else Init(0.05)


def head_init(shape: Sequence[int], *rows: tuple[int, int]) -> Init:
    """An output layer: logits spread well apart, and no id outside these ranges of rows is ever the best one."""
    return Init(normal(shape, gain=4.0).std, keep_rows=rows)


def special_ids(tokens: Sequence[str], vocab_size: int, real_vocab: int, first: int) -> dict[str, int]:
    """Special tokens whose ids begin at `first` in the real vocabulary: in this one as far from its end."""
    start = first - real_vocab + vocab_size
    return {token: start + offset for offset, token in enumerate(tokens)}


def following_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Special tokens whose ids follow the base vocabulary, the same at every size."""
    return {token: BASE_VOCAB + offset for offset, token in enumerate(tokens)}


def mrope(head_dim: int) -> dict[str, object]:
    """Qwen's rotary embedding: time, height and width share the head's half in the ratio 16 : 24 : 24."""
    section = [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16]
    return {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": section}


def qwen_vision_config(scale: float, out_hidden_size: int, *, heads: int, width: int) -> dict[str, object]:
    """The vision tower of Qwen2.5; `heads` and `width` (of the feed-forward) are those of scale 0."""
    num_heads, depth = between(scale, (heads, 16), heads), between(scale, (2, 32))
    # One block in eight attends to the whole image, the others to their windows; the last block always to all.
    full = max(1, depth // 8)
    return {
        "depth": depth,
        "hidden_size": num_heads * between(scale, (16, 80), 8),
        "intermediate_size": between(scale, (width, 3420), 4),
        "num_heads": num_heads,
        "out_hidden_size": out_hidden_size,
        "fullatt_block_indexes": [(number + 1) * depth // full - 1 for number in range(full)],
        "window_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def qwen_image_processor(processor: str, max_pixels: int, patch_size: int = 14) -> dict[str, object]:
    """preprocessor_config.json of Qwen's vision towers."""
    return {
        "processor_class": processor,
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": max_pixels,
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }


def base_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level BPE of `BASE_VOCAB` tokens trained on the text above; "user" has the id `USER_TOKEN_ID`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = BpeTrainer(
        vocab_size=BASE_VOCAB,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = "user\nassistant\nsystem\n" * 40  # often enough that each role is one token
    tokenizer.train_from_iterator([TRAINING_TEXT, roles], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    if len(vocab) != BASE_VOCAB or "user" not in vocab:
        raise CheckpointError(f"the tokenizer's training gave {len(vocab)} tokens instead of {BASE_VOCAB}")
    displaced = next(token for token, index in vocab.items() if index == USER_TOKEN_ID)
    vocab[displaced], vocab["user"] = vocab["user"], USER_TOKEN_ID
    return vocab, [(left, right) for left, right in model["merges"]]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def write_tokenizer(
    folder: Path, special: Mapping[str, int], settings: Mapping[str, object], visible: Collection[str] = ()
) -> None:
    """Write tokenizer.json, its configuration and the older vocab.json, merges.txt and added_tokens.json.

    Special tokens also stand in the model's vocabulary: it is what lets their ids leave a gap after the base tokens,
    as a larger embedding has them. Those in `visible` are part of a decoded text all the same.
    """
    vocab, merges = base_vocabulary()
    tokenizer = Tokenizer(BPE(vocab={**vocab, **special}, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special if token not in visible]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in visible])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {
        str(index): {"content": token, **flags, "special": token not in visible} for token, index in special.items()
    }
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder, **settings})
    write_json(folder / "vocab.json", vocab)
    write_json(folder / "added_tokens.json", dict(special))
    write_merges(folder, merges)


def tokenizer_settings(
    cls: str,
    max_length: int,
    more: Mapping[str, object] | None = None,
    *,
    qwen: bool = True,
    processor: str | None = None,
) -> dict[str, object]:
    """tokenizer_config.json of a ChatML tokenizer, and `more`; `qwen` adds what Qwen's has beyond others."""
    return {
        "tokenizer_class": cls,
        **({} if processor is None else {"processor_class": processor}),
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        **({"add_bos_token": False} if qwen else {}),
        "clean_up_tokenization_spaces": False,
        **({"errors": "replace"} if qwen else {}),
        "model_max_length": max_length,
        **(more or {}),
    }


def write_generation_config(folder: Path, ids: Mapping[str, int]) -> None:
    """generation_config.json of a ChatML model."""
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    settings = {"bos_token_id": ids["<|im_start|>"], "eos_token_id": ends, "pad_token_id": ids["<|endoftext|>"]}
    write_json(folder / "generation_config.json", settings)


def write_merges(folder: Path, merges: Iterable[tuple[str, str]]) -> None:
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def start(folder: Path, scale: float, variant: str | None = None, variants: Iterable[str] = ()) -> None:
    """Check the arguments of `tiny`, and create `folder`."""
    check_scale(scale)
    if variant is not None and variant not in variants:
        raise ConfigError(f"there is no {variant!r}; known: {', '.join(variants)}", param="variant")
    new_folder(folder)


def new_folder(folder: Path) -> None:
    """Create `folder`, which must be empty: stale shards beside new ones would make a wrong checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty; give a new folder for the checkpoint")


def initial(name: str, shape: Sequence[int], rule: Rule, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """One weight in float32. The same seed, name and shape give the same values on the same kind of device."""
    init = rule(name, shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big") >> 1)
    tensor = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    tensor.normal_(init.mean, init.std, generator=generator)
    if init.keep_rows is not None:
        dropped = torch.ones(shape[0], dtype=torch.bool, device=device)
        for start, stop in init.keep_rows:
            dropped[start:stop] = False
        tensor[dropped] = 0.0
    return tensor


def write_weights(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    rule: Rule,
    dtype_of: Callable[[str], torch.dtype],
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Write `tensors` (only their names and shapes are read) as safetensors shards, at least four, with their index."""
    sizes = {name: math.prod(tensor.shape) * dtype_of(name).itemsize for name, tensor in tensors.items()}
    write_shards(
        folder,
        "model",
        sizes,
        min(MAX_SHARD_BYTES, sum(sizes.values()) // 4),
        lambda name: (name, initial(name, tensors[name].shape, rule, seed).to(dtype_of(name))),
        progress,
    )
    if progress is not None:
        progress("weights written", 1.0)


def write_shards(
    folder: Path,
    stem: str,
    sizes: Mapping[str, int],
    limit: int,
    make: Callable[[str], tuple[str, torch.Tensor]],
    progress: Progress | None = None,
) -> None:
    """Write tensors of these sizes in files of at most `limit` bytes; an index where they are several.

    `make` gives a tensor and its name in the file.
    """
    shards, total, written_bytes = plan_shards(sizes.items(), limit), sum(sizes.values()), 0
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"{stem}{'' if len(shards) == 1 else f'-{number:05d}-of-{len(shards):05d}'}.safetensors"
        if progress is not None:
            progress(f"writing {file}", written_bytes / total)
        shard = dict(make(name) for name in names)
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        written_bytes += sum(sizes[name] for name in names)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / f"{stem}.safetensors.index.json", index)


def plan_shards(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
