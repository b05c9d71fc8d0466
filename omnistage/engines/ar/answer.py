"""One of a request's answers while it is generated: its text, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, FinishReason
from omnistage.engines.ar.text import TextStream


@dataclass(slots=True)
class Answer:
    """One of a request's answers while it is generated."""

    request_id: str
    index: int
    params: SamplingParams
    payload: ARInput
    text: TextStream | None
    limit: int
    """Tokens that it may generate, by its parameters and by the room left after its prompt."""
    stop_ids: frozenset[int]
    generated: int = 0
    announced: bool = False

    def advance(self, token_id: int) -> tuple[str, FinishReason | None, int | None]:
        """Count a sampled token; the text that it released, and whether and by which id it ended the answer."""
        self.generated += 1
        ends = token_id in self.stop_ids and self.generated >= self.params.min_tokens
        # A stop token that the user named is dropped from the text, like a stop string.
        text = "" if ends or self.text is None else self.text.push(token_id)
        finish = None
        if ends or (self.text is not None and self.text.stopped):
            finish = FinishReason.STOP
        elif self.generated >= self.limit:
            finish = FinishReason.LENGTH if self.payload.num_tokens is None else FinishReason.STOP
        if finish is not None and self.text is not None:
            text += self.text.finish()
        return text, finish, token_id if ends else None
