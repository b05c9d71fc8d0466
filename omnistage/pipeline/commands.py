"""What a loop is told: the commands that it applies between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from omnistage.core.stage import Stage
from omnistage.core.types import StageFeed, StageInput

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Submit(Generic[Owner]):
    owner: Owner
    stage_input: StageInput


@dataclass(frozen=True, slots=True)
class Feed(Generic[Owner]):
    owner: Owner
    request_id: str
    feed: StageFeed


@dataclass(frozen=True, slots=True)
class Abort(Generic[Owner]):
    owner: Owner
    request_id: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Run another stage from now on."""

    stage: Stage


Command = Submit[Owner] | Feed[Owner] | Abort[Owner] | Replace
