"""A scheduler in the place of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.core.errors import InvalidRequestError
from omnistage.core.validation import short_repr

if TYPE_CHECKING:
    from diffusers import SchedulerMixin


def other_scheduler(stock: SchedulerMixin | None, name: str | None) -> SchedulerMixin | None:
    """The scheduler called `name`, which can take the place of `stock`; None where that is `stock` itself."""
    if name is None or type(stock).__name__ == name:
        return None
    classes = {cls.__name__: cls for cls in getattr(stock, "compatibles", ())}
    if stock is None or name not in classes:
        names = sorted({type(stock).__name__, *classes}) if stock is not None else ["none"]
        raise InvalidRequestError(
            f"there is no scheduler {short_repr(name)} for this model; known: {', '.join(names)}", param="scheduler"
        )
    try:
        return classes[name].from_config(stock.config)
    except (ImportError, TypeError, ValueError) as error:  # it needs a package, or settings that these do not have
        reason = " ".join(str(error).split())[:200]
        raise InvalidRequestError(
            f"{name} cannot be used with this checkpoint ({reason}); use another", param="scheduler"
        ) from error
