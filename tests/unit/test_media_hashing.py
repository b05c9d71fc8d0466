"""Content keys: equal content, equal key; anything else, another key."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.media.hashing import content_key


def test_the_key_is_stable_across_releases() -> None:
    assert content_key("image", b"abc", 2, "x").hex() == "37c8139e2d62c8515028820930a6e7e5"
    assert content_key("audio", np.arange(3, dtype=np.float32)).hex() == "a194908865e3f0f6bc221788040f762f"


def test_layout_and_byte_order_do_not_matter() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    key = content_key("image", array)
    assert len(key) == 16
    assert content_key("image", np.asfortranarray(array)) == key
    assert content_key("image", array.astype(">i4")) == key


def test_kind_type_shape_and_extras_each_change_the_key() -> None:
    array = np.zeros(4, np.uint8)
    keys = [
        content_key("image", array),
        content_key("audio", array),
        content_key("image", array.astype(np.int8)),
        content_key("image", array.reshape(2, 2)),
        content_key("image", array.tobytes()),
        content_key("image", array, 1),
        content_key("image", array, 1.0),
        content_key("image", array, "1"),
        content_key("image", array, b"1"),
        content_key("image", array, True),
        content_key("image", array, None),
        content_key("image", array, "a", "b"),
        content_key("image", array, "ab"),
        content_key("image", np.array(0, np.uint8)),
        content_key("image", np.array([0], np.uint8)),
        content_key("image", np.zeros((0, 3), np.uint8)),
        content_key("image", np.zeros((3, 0), np.uint8)),
    ]
    assert len(set(keys)) == len(keys)


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="numeric"):
        content_key("image", np.array([object()]))
