"""The base of everything that clients send."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """Unknown fields are refused: one that is mistyped would otherwise be left aside in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)
