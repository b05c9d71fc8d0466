"""Text prompts and chats for a plain causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.core.errors import CheckpointError, UnsupportedModalityError
from omnistage.core.messages import PLAIN_TEMPLATE, ChatMessage, TemplateOptions, TextPart
from omnistage.core.types import ARInput, Modality, OmniTokensPrompt
from omnistage.hf import transformers
from omnistage.models.chat_template import ChatProcessor, ChatTemplate, ToolSpec, Turn, turn_of
from omnistage.models.loading import max_sequence_length, positive, read_auto_config
from omnistage.models.prompts import PromptTokenizer, tokens_input

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class CausalLMProcessor(ChatProcessor):
    """Applies the tokenizer's chat template."""

    input_modalities = frozenset({Modality.TEXT})

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, embed_size: int, max_tokens: int | None = None
    ) -> None:
        self._prompts = PromptTokenizer(tokenizer, max_tokens)
        self._vocab_size = vocab_size
        self._embed_size = embed_size
        self._template = ChatTemplate(self._render, tokenizer)
        self._message_tokens = self._template.message_tokens(self._prompts.count)

    @classmethod
    def load(cls, folder: Path) -> CausalLMProcessor:
        config = read_auto_config(folder).get_text_config()
        vocab_size, embed_size = positive(config, "vocab_size"), positive(config, "hidden_size")
        return cls(load_tokenizer(folder), vocab_size, embed_size, max_sequence_length(config))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool | None = None,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> ARInput:
        guarded = self._prompts.guarded()
        self._check_messages(messages, self._prompts.tokenizer.chat_template)
        turns = []
        for message in messages:
            for part in message.parts:
                if not isinstance(part, TextPart):
                    raise UnsupportedModalityError(f"this model reads text only, not {type(part).__name__}")
            # Joined before it is guarded: a special token may be spelled over two parts.
            content = guarded.guard("".join(part.text for part in message.parts if isinstance(part, TextPart)))
            turns.append(turn_of(message, content))
        return ARInput(self._prompts.encode(self._template.text(turns, tools, guarded, thinking, template), guarded))

    def _render(self, turns: list[Turn], tools: list[ToolSpec] | None, **options: Any) -> str:
        fixed = {"tokenize": False, "add_generation_prompt": True}
        return str(self._prompts.tokenizer.apply_chat_template(turns, tools=tools, **{**fixed, **options}))

    def tokens(self, prompt: OmniTokensPrompt) -> ARInput:
        return tokens_input(prompt, self._vocab_size, self._embed_size)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises bare ones for a file that it cannot read
        raise CheckpointError(f"no usable tokenizer in {folder}: {error}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"the tokenizer in {folder} has no fast (tokenizer.json) form; convert it first")
    return tokenizer
