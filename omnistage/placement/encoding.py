"""Stage inputs and chunks as bytes: JSON for their structure, raw buffers for what tensors and arrays hold.

The codecs are made from the annotations of the dataclasses themselves, so that a value of another type than declared
is refused on both sides. Nothing is pickled, and no name that comes over a channel is ever imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from omnistage.core.errors import InternalError, OmniError, StageError
from omnistage.placement.device_memory import DeviceMemory, Region, on_device

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

T = TypeVar("T")
Json = Any
"""What `json` reads and writes."""
Buffer = bytes | bytearray | memoryview


class Buffers(list[memoryview]):
    """What is not JSON of some values, in the order in which they refer to it."""

    def __init__(self, items: Iterable[memoryview] = (), devices: DeviceMemory | None = None) -> None:
        super().__init__(items)
        self.devices = devices
        """Where tensors on a GPU may stay there."""


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """One type's way to JSON and back. None: JSON has it as it is."""

    encode: Callable[[T, Buffers], Json] | None = None
    """Puts what is not JSON at the end of the buffers."""
    decode: Callable[[Json, Buffers], T] | None = None
    plain: frozenset[type] | None = None
    """What JSON has as it is: the types that it may have."""


_AS_IT_IS: Codec[Any] = Codec()
_NONE = type(None)
_LISTS, _MAPPINGS = frozenset({list}), frozenset({dict})
_PLAIN: dict[type, set[type]] = {str: {str}, int: {int, bool}, float: {float, int}, bool: {bool}, _NONE: {_NONE}}


def encode(kind: object, value: object, buffers: Buffers) -> Json:
    """A value of a declared type as JSON; raises `InternalError` for one of another type."""
    codec = codec_of(kind)
    try:
        return value if codec.encode is None else codec.encode(value, buffers)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise InternalError(f"a {type(value).__name__} cannot be sent to another process") from error


def decode(kind: object, data: Json, buffers: Buffers) -> Any:
    """The value again. Its tensors and arrays share the memory of `buffers`."""
    codec = codec_of(kind)
    return data if codec.decode is None else codec.decode(data, buffers)


def to_json(data: Json) -> bytes:
    return json.dumps(data, separators=(",", ":"), default=_plain).encode()


def _plain(value: object) -> object:
    """What is inside values that are declared as any JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


@functools.cache
def codec_of(kind: Any) -> Codec[Any]:
    """The codec of a type, as an annotation gives it."""
    import numpy as np
    import numpy.typing
    import torch
    from PIL.Image import Image

    origin, args = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return _AS_IT_IS
    if origin is Literal:
        return _plain_codec({type(value) for value in args})
    if kind in _PLAIN:
        return _plain_codec(_PLAIN[kind])
    if kind is bytes:
        return Codec(_add_bytes, lambda index, buffers: bytes(buffers[index]))
    if origin in (Union, types.UnionType):
        return _union_codec(args)
    if origin is tuple and args[1:] == (Ellipsis,):
        return _sequence_codec(tuple, codec_of(args[0]))
    if origin is frozenset:
        return _sequence_codec(frozenset, codec_of(args[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping) and args[0] is str:
        return _mapping_codec(codec_of(args[1]))
    if origin in (np.ndarray, numpy.typing.NDArray):  # from numpy 2.5 on NDArray is a type of its own
        return codec_of(np.ndarray)
    if not isinstance(kind, type):
        raise InternalError(f"{kind} cannot be sent to another process")
    special: dict[type, Codec[Any]] = {
        torch.Tensor: Codec(_encode_tensor, _decode_tensor),
        np.ndarray: Codec(_encode_array, _decode_array),
        Image: Codec(_encode_image, _decode_image),
        OmniError: Codec(_encode_error, _decode_error),
    }
    if kind in special:
        return special[kind]
    if issubclass(kind, Enum):
        return Codec(lambda value, _buffers: value.value, lambda data, _buffers: kind(data))
    if issubclass(kind, BaseModel):
        return _model_codec(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_codec(kind)
    raise InternalError(f"{kind.__name__} cannot be sent to another process")


# ------------------------------------------------------------------------------------------------ containers


def _plain_codec(types: Iterable[type]) -> Codec[Any]:
    plain = frozenset(types)

    def decode_plain(data: Json, _buffers: Buffers) -> Any:
        if type(data) not in plain:
            _refuse((data,), plain)
        return data

    return Codec(None, decode_plain, plain)


def _refuse(values: Iterable[object], plain: frozenset[type]) -> None:
    kinds = " or ".join(sorted(kind.__name__ for kind in plain))
    others = sorted({type(value).__name__ for value in values if type(value) not in plain})
    raise InternalError(f"another process has sent {', '.join(others)} in place of {kinds}")


def _sequence_codec(kind: type[tuple[Any, ...]] | type[frozenset[Any]], item: Codec[Any]) -> Codec[Any]:
    encode, decode, plain = item.encode, item.decode, item.plain

    def encode_items(values: Any, buffers: Buffers) -> Json:
        return list(values) if encode is None else [encode(value, buffers) for value in values]

    def decode_items(data: Json, buffers: Buffers) -> Any:
        if type(data) is not list:
            _refuse((data,), _LISTS)
        if plain is not None and not plain.issuperset(map(type, data)):  # at once: prompts are long
            _refuse(data, plain)
        return kind(data if decode is None or plain is not None else (decode(value, buffers) for value in data))

    return Codec(encode_items, decode_items)


def _mapping_codec(item: Codec[Any]) -> Codec[Any]:
    encode, decode = item.encode, item.decode

    def encode_items(values: Any, buffers: Buffers) -> Json:
        return dict(values) if encode is None else {key: encode(value, buffers) for key, value in values.items()}

    def decode_items(data: Json, buffers: Buffers) -> Any:
        if type(data) is not dict:
            _refuse((data,), _MAPPINGS)
        return data if decode is None else {key: decode(value, buffers) for key, value in data.items()}

    return Codec(encode_items, decode_items)


def _union_codec(members: Sequence[Any]) -> Codec[Any]:
    """Of dataclasses by their names, of one type and None, or of what JSON can tell apart: numbers, texts, lists."""
    rest = [member for member in members if member is not type(None)]
    kinds = [member for member in rest if isinstance(member, type) and dataclasses.is_dataclass(member)]
    by_name = {kind.__name__: codec_of(kind) for kind in kinds}
    if len(rest) > 1 and by_name:
        if len(by_name) < len(rest):
            raise InternalError(f"a union of {', '.join(map(str, members))} cannot be sent to another process")
        return _named_codec(by_name, optional=_NONE in members)
    codecs = [codec for member in rest if (codec := codec_of(member)).encode is not None]
    plain = frozenset[type]().union(*(codec.plain for member in members if (codec := codec_of(member)).plain))
    if not codecs:
        return _plain_codec(plain) if Any not in rest and object not in rest else _AS_IT_IS
    (inner,) = codecs
    if len(rest) == 1:
        encode, decode = inner.encode, inner.decode
        return Codec(
            lambda value, buffers: None if value is None else encode(value, buffers),  # type: ignore[misc]
            lambda data, buffers: None if data is None else decode(data, buffers),  # type: ignore[misc]
        )
    # A tuple, a mapping, or a value that JSON has as it is.
    others = _plain_codec(plain)
    return Codec(
        lambda value, buffers: inner.encode(value, buffers) if isinstance(value, tuple | Mapping) else value,  # type: ignore[misc]
        lambda data, buffers: (inner if isinstance(data, list | dict) else others).decode(data, buffers),  # type: ignore[misc]
    )


def _named_codec(by_name: Mapping[str, Codec[Any]], *, optional: bool) -> Codec[Any]:
    def encode_named(value: Any, buffers: Buffers) -> Json:
        if value is None and optional:
            return None
        name = type(value).__name__
        return [name, by_name[name].encode(value, buffers)]  # type: ignore[misc]

    def decode_named(data: Json, buffers: Buffers) -> Any:
        return None if data is None and optional else by_name[data[0]].decode(data[1], buffers)  # type: ignore[misc]

    return Codec(encode_named, decode_named)


# ---------------------------------------------------------------------------------------- dataclasses, models


def _dataclass_codec(kind: type) -> Codec[Any]:
    """Its fields in their order."""
    hints = typing.get_type_hints(kind, localns=_names())
    names = [each.name for each in dataclasses.fields(kind)]
    codecs = [codec_of(hints[name]) for name in names]
    encoders = [(name, codec.encode) for name, codec in zip(names, codecs, strict=True)]
    decoders = [codec.decode for codec in codecs]

    def encode_fields(value: Any, buffers: Buffers) -> Json:
        if type(value) is not kind:
            raise TypeError(f"a {type(value).__name__} is not a {kind.__name__}")
        return [
            getattr(value, name) if encode is None else encode(getattr(value, name), buffers)
            for name, encode in encoders
        ]

    def decode_fields(data: Json, buffers: Buffers) -> Any:
        return kind(
            *(value if decode is None else decode(value, buffers) for value, decode in zip(data, decoders, strict=True))
        )

    return Codec(encode_fields, decode_fields)


def _names() -> dict[str, object]:
    """What modules import for their annotations only."""
    import numpy as np
    import torch
    from PIL import Image

    from omnistage.core import clips, messages

    return {**vars(clips), **vars(messages), "np": np, "torch": torch, "Image": Image}


def _model_codec(base: type[BaseModel]) -> Codec[Any]:
    """A pydantic model of this type or one derived from it: what was set, validated again."""

    def encode_model(value: Any, _buffers: Buffers) -> Json:
        if not isinstance(value, base):
            raise TypeError(f"a {type(value).__name__} is not a {base.__name__}")
        return [type(value).__name__, value.model_dump(exclude_unset=True)]

    def decode_model(data: Json, _buffers: Buffers) -> Any:
        return _subclass(base, data[0]).model_validate(data[1])

    return Codec(encode_model, decode_model)


def _subclass(base: type[T], name: str) -> type[T]:
    for kind in _with_subclasses(base):
        if kind.__name__ == name:
            return kind
    raise InternalError(f"there is no {base.__name__} of the name {name}")


def _with_subclasses(base: type[T]) -> Iterator[type[T]]:
    yield base
    for kind in base.__subclasses__():
        yield from _with_subclasses(kind)


def _encode_error(error: OmniError, _buffers: Buffers) -> Json:
    return [type(error).__name__, error.message, error.param, getattr(error, "retry_after", None)]


def _decode_error(data: Json, _buffers: Buffers) -> OmniError:
    name, message, param, retry_after = data
    kind = next((each for each in _with_subclasses(OmniError) if each.__name__ == name), StageError)
    error = kind.__new__(kind)  # some take more than a message
    OmniError.__init__(error, message, param=param)
    if retry_after is not None:
        error.retry_after = retry_after  # type: ignore[attr-defined]
    return error


# ---------------------------------------------------------------------------------------------------- buffers


def _add(data: Buffer, buffers: Buffers) -> int:
    buffers.append(memoryview(data).cast("B"))
    return len(buffers) - 1


def _add_bytes(value: bytes, buffers: Buffers) -> int:
    if not isinstance(value, bytes):
        raise TypeError(f"a {type(value).__name__} is not bytes")
    return _add(value, buffers)


def _encode_tensor(tensor: torch.Tensor, buffers: Buffers) -> Json:
    import torch

    name, device = str(tensor.dtype).removeprefix("torch."), None
    if not tensor.numel():
        return [name, list(tensor.shape), None, device]
    if tensor.is_cuda and buffers.devices is not None:
        if (region := buffers.devices.put(tensor)) is not None:
            return [name, list(tensor.shape), dataclasses.astuple(region), None]
        device = buffers.devices.shared(tensor.device)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return [name, list(tensor.shape), _add(flat.view(torch.uint8).numpy().data, buffers), device]


def _decode_tensor(data: Json, buffers: Buffers) -> torch.Tensor:
    import torch

    name, shape, index, device = data
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise InternalError(f"{name} is not a type of tensors")
    if index is None:
        return torch.empty(shape, dtype=dtype)
    if isinstance(index, list) and buffers.devices is not None:
        return buffers.devices.take(Region(*index)).view(dtype).reshape(shape)
    tensor = torch.frombuffer(buffers[index], dtype=dtype).reshape(shape)
    return tensor if device is None else on_device(tensor, device)


def _encode_array(array: np.ndarray, buffers: Buffers) -> Json:
    import numpy as np

    if array.dtype.hasobject:
        raise TypeError("an array of objects cannot be sent")
    if not array.size:
        return [array.dtype.str, list(array.shape), None]
    return [
        array.dtype.str,
        list(array.shape),
        _add(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, buffers),
    ]


def _decode_array(data: Json, buffers: Buffers) -> np.ndarray:
    import numpy as np

    name, shape, index = data
    if index is None:
        return np.empty(shape, np.dtype(name))
    return np.frombuffer(buffers[index], np.dtype(name)).reshape(shape)


def _encode_image(image: Image, buffers: Buffers) -> Json:
    return [image.mode, list(image.size), _add(image.tobytes(), buffers)]


def _decode_image(data: Json, buffers: Buffers) -> Image:
    from PIL import Image

    mode, size, index = data
    return Image.frombytes(mode, tuple(size), bytes(buffers[index]))
