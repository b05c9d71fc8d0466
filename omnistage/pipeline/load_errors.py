"""What a user is told where loading fails: a damaged checkpoint, or too little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omnistage.core.errors import CapacityError, CheckpointError, OmniError
from omnistage.core.failures import is_out_of_memory, raise_interrupt

_LONGEST_REASON = 200


@contextmanager
def reading_checkpoint(folder: Path, what: str) -> Iterator[None]:
    """The boundary around a checkpoint: the one broad handler of loading.

    A broken or hostile file can make `transformers`, `tokenizers` and `torch` raise anything at all, so what is not
    ours already is the folder's fault until shown otherwise; the cause stays chained.
    """
    try:
        yield
    except OmniError:
        raise
    except BaseException as error:  # a Rust extension panics over a file with no `Exception`
        raise_interrupt(error)
        if is_out_of_memory(error):
            raise CapacityError(
                f"there is not enough memory to load {what} from {folder}; use a smaller model or dtype, or another "
                f"device for this stage ({_shortened(error)})"
            ) from error
        raise CheckpointError(
            f"{what} cannot be loaded from {folder}; the checkpoint is damaged or not supported "
            f"({type(error).__name__}: {_shortened(error)})"
        ) from error


@contextmanager
def enough_memory(name: str) -> Iterator[None]:
    """What a stage takes beside its weights may be more than there is: its KV cache, its graphs, its largest step."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"there is not enough memory to run stage {name!r}; lower its budget, or use a smaller model or dtype, or "
            f"another device for this stage ({_shortened(error)})"
        ) from error


def _shortened(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
