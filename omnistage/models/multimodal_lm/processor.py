"""Chats with text, pictures, sounds and videos into a multimodal LM's input, by its own template and processor."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.cancellation import locked
from omnistage.core.errors import (
    CheckpointError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    OmniError,
    UnsupportedModelError,
)
from omnistage.core.messages import PLAIN_TEMPLATE, AudioPart, ChatMessage, ImagePart, Part, TemplateOptions, TextPart
from omnistage.core.types import ARInput, MediaSpan, Modality, OmniTokensPrompt
from omnistage.hf import transformers
from omnistage.media.budget import current_hold
from omnistage.models.chat_template import ChatProcessor, ChatTemplate, ToolSpec, Turn, joined_texts, turn_of
from omnistage.models.loading import max_sequence_length, positive, read_auto_config
from omnistage.models.multimodal_lm.items import KINDS, ItemProcessor, Media, MediaItem, find, sample_media
from omnistage.models.prompts import GuardedText, PromptTokenizer, tokens_input

if TYPE_CHECKING:
    from transformers import ProcessorMixin

_MIN_SECONDS = 0.03
_COPIES = 8
"""Bytes reserved for each byte of decoded media: the processor's float32 copy, and another while it is made."""
_PLAIN_TEMPLATE = (
    "{%- for message in messages -%}{%- if not loop.first -%}{{- '\n' -}}{%- endif -%}"
    "{%- for part in message.content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}"
    "{%- endfor -%}"
)
"""The texts of a chat, for models that come without a template of their own."""
_NO_MEDIA = (
    "its chat template has no place for media that its processor takes; check that the folder has the template and the "
    "processor that the model came with, else it is of a kind that is not served"
)
_SENTINEL = re.compile("[\ue0f0\ue0f1]")


class MultimodalProcessor(ChatProcessor):
    """Thread-safe: `transformers`' processor is used by one thread at a time."""

    item_processor: ClassVar[type[ItemProcessor]] = ItemProcessor

    def __init__(self, processor: ProcessorMixin, vocab_size: int, embed_size: int, max_tokens: int) -> None:
        self._vocab_size, self._embed_size = vocab_size, embed_size
        self._processor = processor
        tokenizer = processor.tokenizer
        self._prompts = PromptTokenizer(tokenizer, max_tokens)
        self._lock = threading.Lock()
        self._chat_template = processor.chat_template or tokenizer.chat_template
        self._bos = tokenizer.bos_token or ""
        self._prefix, self._suffix = _added_around(tokenizer)
        self.items = self.item_processor(processor, self._prompts)
        self._template = ChatTemplate(self._render, tokenizer, parts=True, source=self._chat_template)
        self._message_tokens = self._template.message_tokens(self._prompts.count)
        self._whole = self._with_rows = False
        self._refusals: dict[Modality, str] = {}
        """Why a sample of a kind could not be given, by the last attempt."""
        self._placeholders: dict[Modality, str] = {}
        self._joint: set[Modality] = set()
        self._single: set[Modality] = set()
        self._learn_media()
        self.input_modalities = frozenset({Modality.TEXT, *self._placeholders})

    def _learn_media(self) -> None:
        """What stands for each kind of media in a chat, and whether items of it are apart, by trying some."""
        self._placeholders = self._find_placeholders()
        for kind in self._placeholders:
            self._try_two(kind)

    @classmethod
    def load(cls, folder: Path) -> MultimodalProcessor:
        config = read_auto_config(folder).get_text_config()
        if getattr(config, "vocab_size", None) is None:
            raise UnsupportedModelError(
                f"config.json names no vocab_size: a {config.model_type} does not generate text, and is not served"
            )
        vocab_size, embed_size = positive(config, "vocab_size"), positive(config, "hidden_size")
        return cls(load_processor(folder), vocab_size, embed_size, max_sequence_length(config))

    def use_whole_prompts(self, *, rows: bool = False) -> None:
        """Give a chat with media as transformers' processor makes it, for models whose items depend on each other.

        `rows`: all tokens are one item of media, whose rows go to the decoder.
        """
        self._whole, self._with_rows = True, rows
        self._chat_template = self._chat_template or _PLAIN_TEMPLATE
        for kind in KINDS:
            if kind not in self._placeholders:
                # Where the text has no place for media, as BLIP's, the processor puts one beside it.
                self._placeholders[kind] = next(iter(self._candidates(kind, times=1)), "")
        fitting = {kind: [n for n in (1, 2) if self._fits(kind, n)] for kind in self._placeholders}
        self._single = {kind for kind, counts in fitting.items() if counts == [1]}
        self._placeholders = {kind: token for kind, token in self._placeholders.items() if fitting[kind]}
        self.input_modalities = frozenset({Modality.TEXT, *self._placeholders})

    @property
    def whole(self) -> bool:
        """It gives chats with media as a whole."""
        return self._whole

    # --------------------------------------------------------------------------------------------- inputs

    def check_media(self) -> None:
        """Raise where no kind of media can be given, with what the processor said."""
        if len(self.input_modalities) < 2:
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in self._refusals.items())
            raise UnsupportedModelError(_NO_MEDIA + (f" ({reasons})" if reasons else ""))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool | None = None,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> ARInput:
        rendered, media, guarded = self.rendered(messages, tools, thinking, template)
        if not media:
            return ARInput(self._encode(rendered, guarded))
        kinds = [kind for kind, _ in media]
        for kind in sorted(self._single):
            if kinds.count(kind) > 1:
                raise InvalidRequestError(f"this model takes one {kind} in a chat; send one", param="messages")
        self._check_size(rendered, media)
        with locked(self._lock):
            if self._whole:
                return self._whole_input(rendered, media)
            items, pieces = self._items(rendered, media)
        return self._spliced(items, pieces, guarded)

    def rendered(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        thinking: bool | None = None,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> tuple[str, list[Media], GuardedText]:
        """The chat by the processor's own template, and its media in order."""
        self._check_messages(messages, self._chat_template)
        media: list[Media] = []
        guarded = self._prompts.guarded()
        turns = [turn_of(m, [self._template_part(p, media, guarded) for p in joined_texts(m.parts)]) for m in messages]
        return self._template.text(turns, tools, guarded, thinking, template), media, guarded

    def tokens(self, prompt: OmniTokensPrompt) -> ARInput:
        ids = {token for text in self._placeholders.values() if text for token in self._prompts.encode(text)}
        return tokens_input(prompt, self._vocab_size, self._embed_size, placeholders=ids)

    def clip_seconds(self) -> tuple[float, float]:
        extractor = self.items.audio_processor
        samples = getattr(extractor, "n_samples", None)
        return _MIN_SECONDS, samples / self.items.audio_rate if samples else float("inf")

    @property
    def clip_rate(self) -> int:
        return self.items.audio_rate

    def takes_several(self, kind: Modality) -> bool:
        """Whether a chat may have more than one item of this kind."""
        return kind in self._placeholders and kind not in self._single

    # ------------------------------------------------------------------------------------------- template

    def _render(self, turns: list[Turn], tools: list[ToolSpec] | None, **options: Any) -> str:
        fixed = {"tokenize": False, "add_generation_prompt": True, "chat_template": self._chat_template}
        text = self._processor.apply_chat_template(turns, tools=tools, **{**fixed, **options})
        return str(text[0] if isinstance(text, list) else text)

    def _template_part(self, part: Part, media: list[Media], guarded: GuardedText) -> dict[str, str]:
        """What the chat template sees of a part; media are collected on the way."""
        if isinstance(part, TextPart):
            return {"type": "text", "text": guarded.guard(part.text)}
        if isinstance(part, ImagePart):
            media.append((Modality.IMAGE, part.image))
        elif isinstance(part, AudioPart):
            if part.clip.sample_rate != self.items.audio_rate:
                raise InvalidRequestError(
                    f"audio must be at {self.items.audio_rate} Hz, got {part.clip.sample_rate}", param="messages"
                )
            media.append((Modality.AUDIO, part.clip.samples))
        elif part.use_audio:
            raise InvalidRequestError("this model does not take the audio of videos; set use_audio_in_video: false")
        else:
            media.append((Modality.VIDEO, part.clip))
        kind = str(media[-1][0])
        return {"type": kind, kind: ""}

    def _find_placeholders(self) -> dict[Modality, str]:
        """What a chat template writes for an item of each kind that the processor takes: special tokens."""
        placeholders = {}
        for kind in KINDS:
            candidates = self._candidates(kind)
            names = (f"{kind}_token", "boi_token" if kind is Modality.IMAGE else "")
            preferred = [getattr(self._processor, name, None) for name in names]
            texts = (self._placeholder(kind, t, candidates) for t in [*preferred, *candidates] if t in candidates)
            if text := next(filter(None, texts), ""):
                placeholders[kind] = text
        return placeholders

    def _placeholder(self, kind: Modality, token: str, candidates: Sequence[str]) -> str:
        """A token for an item, with those around it where the processor reads them too, as GLM-4V's; or ""."""
        of_any = "|".join(re.escape(text) for text in sorted(candidates, key=len, reverse=True))
        filled = self._sample_chats(kind)[1]
        marked = next((m.group() for m in re.finditer(f"(?:{of_any})+", filled) if token in m.group()), token)
        alone, among = self._sample_item(kind, token), self._sample_item(kind, marked)
        if alone is None:
            return "" if among is None else marked
        return token if among is None or alone.is_within(among) else marked

    def _sample_item(self, kind: Modality, placeholder: str) -> MediaItem | None:
        try:
            item = self.items.item(placeholder, [sample_media(kind, 0, self.items.audio_rate)])
        except OmniError as error:
            self._refusals[kind] = error.message
            return None
        return item if len(item.inputs) > 1 else None

    def _sample_chats(self, kind: Modality) -> tuple[str, str]:
        """A text in a chat, and the same behind an item."""
        parts = [{"type": "text", "text": "a"}], [{"type": str(kind), str(kind): ""}, {"type": "text", "text": "a"}]
        plain, filled = (self._render([{"role": "user", "content": content}], None) for content in parts)
        return plain, filled

    def _candidates(self, kind: Modality, times: int = 0) -> list[str]:
        """Special tokens that are in a chat for an item of this kind alone, as often as `times` says."""
        try:
            plain, filled = self._sample_chats(kind)
        except Exception:  # the template is a program of the checkpoint's: it may raise anything
            return []
        added = self._processor.tokenizer.get_added_vocab()
        more = {token: filled.count(token) - plain.count(token) for token in added}
        return [token for token, count in more.items() if (count == times if times else count > 0)]

    def _fits(self, kind: Modality, count: int) -> bool:
        """Whether the processor takes a chat with so many items of this kind as a whole."""
        if count > 1 and not self._placeholders[kind]:
            return False
        media = [sample_media(kind, number, self.items.audio_rate) for number in range(count)]
        content = [*({"type": str(kind), str(kind): ""} for _ in media), {"type": "text", "text": "a"}]
        try:
            self._whole_input(self._render([{"role": "user", "content": content}], None), media)
        except OmniError as error:
            if count == 1:
                self._refusals[kind] = error.message
            return False
        return True

    def _try_two(self, kind: Modality) -> None:
        """Note whether two items become in one prompt what each becomes alone, and whether there may be two."""
        placeholder, media = self._placeholders[kind], [sample_media(kind, i, self.items.audio_rate) for i in (0, 1)]
        alone = [self.items.call(placeholder, [one])[0] for one in media]
        try:
            if self.items.call(placeholder * 2, media)[0] != "".join(alone):
                self._joint.add(kind)
        except MediaError:
            self._single.add(kind)

    # ---------------------------------------------------------------------------------------------- media

    def _check_size(self, rendered: str, media: Sequence[Media]) -> None:
        """Refuse what cannot fit, by sizes alone, and reserve memory for the processor's work."""
        self._prompts.check_length(rendered)
        limits = self._prompts.limits
        if (count := self.items.count_tokens(media)) is not None and count > limits.max_tokens:
            raise limits.too_long(f"{count} tokens of media")
        shortest, longest = self.clip_seconds()
        size = 0
        for kind, value in media:
            if kind is Modality.IMAGE:
                size += 3 * value.width * value.height
            else:
                size += value.nbytes if kind is Modality.AUDIO else value.frames.nbytes
            if kind is Modality.AUDIO and len(value) < shortest * self.items.audio_rate:
                raise MediaError(f"a clip must last at least {shortest} s with this model; send more", param="messages")
            if kind is Modality.AUDIO and len(value) > longest * self.items.audio_rate:
                raise LimitExceededError(
                    f"a clip may last at most {longest:.0f} s with this model; split it into several", param="messages"
                )
        try:
            current_hold().reserve(_COPIES * size)
        except LimitExceededError as error:
            error.param = "messages"
            raise

    def _items(self, rendered: str, media: Sequence[Media]) -> tuple[list[MediaItem], list[str]]:
        """The items and the text around them, one piece more."""
        pattern = re.compile("|".join(re.escape(self._placeholders[kind]) for kind in sorted({k for k, _ in media})))
        places = list(pattern.finditer(rendered))
        if [match.group() for match in places] != [self._placeholders[kind] for kind, _ in media]:
            raise InvalidRequestError(
                f"the chat template has {len(places)} places for {len(media)} media, or another order; send media in "
                "user messages",
                param="messages",
            )
        kinds = {kind for kind, _ in media}
        if len(media) > 1 and kinds & self._joint:
            start, end = places[0].start(), places[-1].end()
            if _SENTINEL.search(rendered, start, end):
                raise InvalidRequestError(
                    "this model cannot take the spelling of a special token between media; remove it", param="messages"
                )
            return [self.items.item(rendered[start:end], media)], [rendered[:start], rendered[end:]]
        cuts = [0, *(place for match in places for place in match.span()), len(rendered)]
        pieces = [rendered[cuts[i] : cuts[i + 1]] for i in range(0, len(cuts), 2)]
        return self._items_apart(media), pieces

    def _items_apart(self, media: Sequence[Media]) -> list[MediaItem]:
        return [self.items.item(self._placeholders[one[0]], [one]) for one in media]

    def _whole_input(self, rendered: str, media: Sequence[Media]) -> ARInput:
        """The chat through transformers' processor as a whole. Its inputs are the first span's."""
        if _SENTINEL.search(rendered):
            raise InvalidRequestError(
                "this model cannot take the spelling of a special token beside media; remove it", param="messages"
            )
        kinds = [kind for kind, _ in media]
        for kind in sorted(set(kinds)):
            places = rendered.count(self._placeholders[kind]) if self._placeholders[kind] else 1
            if places != kinds.count(kind):
                raise InvalidRequestError(
                    f"the chat template has {places} places for {kinds.count(kind)} {kind} items; send media in user "
                    "messages",
                    param="messages",
                )
        ids, inputs, key = self.items.prompt(rendered, media)
        nowhere = torch.empty(0, dtype=torch.int64)
        spans = [MediaSpan(kind, key, nowhere, {}) for kind in sorted(set(kinds))]
        if not self._with_rows:
            return ARInput(ids, media=(replace(spans[0], inputs=inputs), *spans[1:]))
        first = replace(spans[0], inputs={"input_ids": torch.tensor([ids]), **inputs}, positions=torch.arange(len(ids)))
        # What positions are computed from, not the pictures themselves: they go to the stage once.
        context = {name: value for name, value in inputs.items() if value.numel() <= 4 * len(ids)}
        return ARInput(ids, media=(first, *spans[1:]), context=context)

    def _spliced(self, items: Sequence[MediaItem], pieces: Sequence[str], guarded: GuardedText) -> ARInput:
        text = pieces[0] + "".join(item.text + piece for item, piece in zip(items, pieces[1:], strict=True))
        ids = self._encode(text, guarded)
        array, start = np.asarray(ids), 0
        spans: list[MediaSpan] = []
        sizes: dict[str, list[torch.Tensor]] = {}
        by_token: dict[str, torch.Tensor] = {}
        for item in items:
            place = find(array, item.token_ids, start)
            if place is None:
                raise InvalidRequestError("the placeholders of a media item are not in the prompt", param="messages")
            start = place + len(item.token_ids)
            spans += self._item_spans(item, place, items)
            for name, value in item.by_token().items():
                by_token.setdefault(name, value.new_zeros(1, len(ids)))[:, place:start] = value
            for name, value in item.sizes().items():
                sizes.setdefault(name, []).append(value)
        # One row an item, or it is no grid that positions are computed from.
        grids = {name: values for name, values in sizes.items() if len({v.shape[1:] for v in values}) == 1}
        context = {name: torch.cat(values) for name, values in grids.items()} | by_token
        return ARInput(ids, media=tuple(spans), context=context)

    def _item_spans(self, item: MediaItem, start: int, items: Sequence[MediaItem]) -> Sequence[MediaSpan]:
        """An item of a chat with `items`, whose tokens begin at `start`."""
        del items
        return (MediaSpan(item.kind, item.key, torch.arange(start, start + len(item.token_ids)), item.inputs),)

    def _encode(self, text: str, guarded: GuardedText) -> tuple[int, ...]:
        """As the processor's own call does: with the tokenizer's first token, where the template has not written it."""
        ids = self._prompts.encode(text, guarded)
        if self._bos and text.startswith(self._bos):
            return ids
        prefix = self._prefix
        if not prefix and self.items.adds_bos:
            prefix = (int(self._processor.tokenizer.bos_token_id),)
        return (*prefix, *ids, *self._suffix)


def load_processor(folder: Path) -> ProcessorMixin:
    """The processor of a folder, with all its parts."""
    prepare_torchvision()
    try:
        processor = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises bare ones for a file that it cannot read
        raise CheckpointError(
            f"no usable processor in {folder}; it needs tokenizer.json, tokenizer_config.json and "
            f"preprocessor_config.json as the model came with them: {error}"
        ) from error
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None:
        raise UnsupportedModelError(f"{type(processor).__name__} in {folder} has no tokenizer beside a media processor")
    if not tokenizer.is_fast:
        raise CheckpointError(f"the tokenizer in {folder} has no fast (tokenizer.json) form; convert it first")
    return processor


def auto_model(model_type: str) -> Any:
    """The auto class that loads models of this type."""
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return transformers.AutoModelForMultimodalLM if model_type in mapping else transformers.AutoModelForSeq2SeqLM


def _added_around(tokenizer: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the tokenizer adds before and after a text."""
    with_special = list(tokenizer("a")["input_ids"])  # type: ignore[operator]
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])  # type: ignore[operator]
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return tuple(with_special[:start]), tuple(with_special[start + len(plain) :])
    return (), ()
