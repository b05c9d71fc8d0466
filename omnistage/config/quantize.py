"""The settings of a stage's quantised weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from omnistage.config.scalars import ConfigModel
from omnistage.core.validation import short_repr
from omnistage.quantisation.schemes import SCHEMES, Scheme

RECIPE_FILE = "quantisation.json"
"""Of a quantised checkpoint: what is quantised in which stage."""
if TYPE_CHECKING:
    SchemeName = str
else:
    SchemeName = Literal[tuple(SCHEMES)]


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{short_repr(pattern)} is not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_pattern)]


class QuantizeConfig(ConfigModel):
    """Which weights of a stage are quantised, and how. A scheme alone (`quantize: int8`) takes the defaults."""

    scheme: SchemeName = Field(
        description="; ".join(f"{name}: {scheme.summary}" for name, scheme in SCHEMES.items()) + "."
    )
    exclude: tuple[Pattern, ...] = Field(
        default=(), max_length=1000, description="Modules that stay in full precision: regular expressions of names."
    )
    include: tuple[Pattern, ...] = Field(
        default=(), max_length=1000, description="Linear layers to quantise although the defaults leave them out."
    )
    only: tuple[Pattern, ...] | None = Field(
        default=None,
        max_length=100_000,
        description="Layers to quantise, instead of the defaults, include and exclude; of quantised checkpoints.",
    )
    group_size: Literal[32, 64, 128, 256] = Field(default=128, description="int4: weights that share a scale.")
    required: bool = Field(
        default=True, description="Refuse a stage that has nothing to quantise; `--quantize` leaves such stages alone."
    )

    @property
    def method(self) -> Scheme:
        return SCHEMES[self.scheme](self.group_size)


def _from_scheme(value: Any) -> Any:
    return {"scheme": value} if isinstance(value, str) else value


Quantize = Annotated[QuantizeConfig, BeforeValidator(_from_scheme)]
