"""Pictures with OpenAI's own client: drawn, changed, streamed, fetched from the store."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from omnistage.core.errors import ConfigError, LimitExceededError
from omnistage.media.image_output import read_metadata
from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.openai.files import FileStore
from omnistage.server.service import Service
from tests.server.harness import Running, serving

SMALL: dict[str, Any] = {"model": "draw", "prompt": "a red cat", "size": "64x48"}


def fast(**more: object) -> dict[str, object]:
    return {"steps": 3, "seed": 7, **more}


def opened(data: bytes) -> Image.Image:
    picture = Image.open(io.BytesIO(data))
    picture.load()
    return picture


def decoded(entry: Any) -> Image.Image:
    return opened(base64.b64decode(entry.b64_json))


def png(width: int = 64, height: int = 48, seed: int = 0, mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(encoded, "PNG")
    return encoded.getvalue()


def plain_mask(value: int, width: int = 64, height: int = 48) -> bytes:
    encoded = io.BytesIO()
    Image.new("L", (width, height), value).save(encoded, "PNG")
    return encoded.getvalue()


# --------------------------------------------------------------------------------------------- generations


def test_several_pictures_each_from_its_seed(client: openai.OpenAI) -> None:
    two = client.images.generate(**SMALL, n=2, extra_body=fast())
    assert two.size == "64x48"
    assert two.output_format == "png"
    assert two.data is not None
    first, second = (np.asarray(decoded(entry)) for entry in two.data)
    assert first.shape == (48, 64, 3)
    assert (first != second).any()
    alone = client.images.generate(**SMALL, extra_body=fast(seed=8))
    assert alone.data is not None
    # Another batch size adds up in another order: the last bit of a pixel may differ.
    assert np.abs(np.asarray(decoded(alone.data[0])).astype(int) - second).max() <= 1
    assert alone.data[0].model_extra == {"seed": 8}


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_formats(client: openai.OpenAI, format: Any) -> None:
    answer = client.images.generate(**SMALL, output_format=format, extra_body=fast())
    assert answer.data is not None
    picture = decoded(answer.data[0])
    assert picture.format == format.upper()
    assert picture.size == (64, 48)


def test_compression_makes_it_smaller(client: openai.OpenAI) -> None:
    sizes = []
    for compression in (0, 100):
        answer = client.images.generate(
            **SMALL, output_format="jpeg", output_compression=compression, extra_body=fast()
        )
        assert answer.data is not None
        sizes.append(len(base64.b64decode(answer.data[0].b64_json or "")))
    assert sizes[0] < sizes[1]


def test_a_picture_says_what_made_it_and_not_where(client: openai.OpenAI, models: dict[str, AsyncOmni]) -> None:
    answer = client.images.generate(**SMALL, extra_body=fast())
    assert answer.data is not None
    said = read_metadata(base64.b64decode(answer.data[0].b64_json or ""))
    assert said["model"] == "draw"
    assert said["prompt"] == "a red cat"


def test_a_prompt_too_long_for_exif_still_gives_its_picture(client: openai.OpenAI) -> None:
    given = {**SMALL, "prompt": "ü" * 31_000, "output_format": "jpeg"}
    answer = client.images.generate(**given, extra_body=fast(steps=1))
    assert answer.data is not None
    assert decoded(answer.data[0]).size == (64, 48)


# --------------------------------------------------------------------------------------------------- edits


def test_a_picture_is_changed(client: openai.OpenAI) -> None:
    given = {**SMALL, "image": ("cat.png", png(), "image/png")}
    weak, strong = (
        np.asarray(decoded(client.images.edit(**given, extra_body=fast(steps=8, strength=s)).data[0]))  # type: ignore[index]
        for s in (0.2, 1.0)
    )
    assert weak.shape == strong.shape == (48, 64, 3)
    assert (weak != strong).any()


@pytest.mark.parametrize(("painted", "same"), [(0, True), (255, False)])
def test_a_mask_says_where(client: openai.OpenAI, painted: int, same: bool) -> None:
    """What is black stays as it is whatever the prompt, what is white is drawn anew."""
    drawn = []
    for prompt in ("a red cat", "two green houses"):
        answer = client.images.edit(
            **{**SMALL, "prompt": prompt},
            image=("cat.png", png(), "image/png"),
            mask=("mask.png", plain_mask(painted), "image/png"),
            extra_body=fast(strength=1.0),
        )
        assert answer.data is not None
        drawn.append(np.asarray(decoded(answer.data[0])))
    assert (drawn[0] == drawn[1]).all() == same


def test_pictures_as_a_list(client: openai.OpenAI) -> None:
    answer = client.images.edit(**SMALL, image=[("a.png", png(), "image/png")], extra_body=fast())
    assert answer.data is not None
    alone = client.images.edit(**SMALL, image=("a.png", png(), "image/png"), extra_body=fast())
    assert alone.data is not None
    assert answer.data[0].b64_json == alone.data[0].b64_json


# -------------------------------------------------------------------------------------------------- stream


def test_a_stream_shows_the_picture_as_it_comes(client: openai.OpenAI) -> None:
    events = list(client.images.generate(**SMALL, stream=True, partial_images=2, extra_body=fast(steps=9)))
    partial = [e for e in events if e.type == "image_generation.partial_image"]
    done = [e for e in events if e.type == "image_generation.completed"]
    assert len(done) == 1
    assert events[-1] is done[0]
    assert 1 <= len(partial) <= 2  # one that is overtaken by the next is left out
    assert [e.partial_image_index for e in partial] == list(range(len(partial)))
    assert done[0].usage.total_tokens == 0
    whole = client.images.generate(**SMALL, extra_body=fast(steps=9))
    assert whole.data is not None
    assert (np.asarray(decoded(done[0])) == np.asarray(decoded(whole.data[0]))).all()


def test_a_stream_of_several(client: openai.OpenAI) -> None:
    events = list(client.images.generate(**SMALL, n=2, stream=True, extra_body=fast()))
    done = [e for e in events if e.type == "image_generation.completed"]
    assert {e.model_extra["image_index"] for e in done if e.model_extra} == {0, 1}
    assert not [e for e in events if e.type == "image_generation.partial_image"]


def test_every_event_is_a_picture_unless_progress_is_asked_for(client: openai.OpenAI) -> None:
    """OpenAI's client reads any event as one of its own, which all carry a picture."""
    given = {**SMALL, "image": ("cat.png", png(), "image/png")}
    streams = {
        "image_generation": lambda extra: client.images.generate(**SMALL, stream=True, extra_body=extra),
        "image_edit": lambda extra: client.images.edit(**given, stream=True, extra_body=extra),
    }
    for kind, call in streams.items():
        assert [decoded(event).size for event in call(fast())] == [(64, 48)]
        asked = list(call(fast(progress=True)))
        steps = [e.model_extra for e in asked if e.type == f"{kind}.progress"]
        assert [e.type for e in asked[len(steps) :]] == [f"{kind}.completed"]
        assert steps
        assert all(1 <= told["step"] <= told["steps"] for told in steps if told is not None)


def test_previews_without_named_steps(client: openai.OpenAI) -> None:
    events = list(client.images.generate(**SMALL, stream=True, partial_images=3, extra_body={"seed": 1}))
    assert 1 <= len([e for e in events if e.type == "image_generation.partial_image"]) <= 3


def test_a_change_streams(client: openai.OpenAI) -> None:
    given = {**SMALL, "image": ("cat.png", png(), "image/png")}
    events = list(client.images.edit(**given, stream=True, partial_images=1, extra_body=fast(steps=4, strength=0.9)))
    assert events[-1].type == "image_edit.completed"
    assert decoded(events[-1]).size == (64, 48)


def test_a_wrong_stream_has_its_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.images.generate(**{**SMALL, "size": "63x48"}, stream=True, extra_body=fast())


# ---------------------------------------------------------------------------------------------------- urls


def test_a_picture_is_fetched(client: openai.OpenAI) -> None:
    given = {**SMALL, "output_format": "webp"}
    answer = client.images.generate(**given, n=2, response_format="url", extra_body=fast())
    assert answer.data is not None
    urls = [entry.url or "" for entry in answer.data]
    assert len(set(urls)) == 2
    for url in urls:
        fetched = httpx.get(url)
        assert fetched.headers["content-type"] == "image/webp"
        assert fetched.headers["x-content-type-options"] == "nosniff"
        assert opened(fetched.content).size == (64, 48)
    assert answer.data[0].b64_json is None


@pytest.mark.parametrize("name", ["nothing.png", "..%2f..%2fetc%2fpasswd", "A" * 32 + ".png", "A" * 32 + ".svg"])
def test_no_such_file(server: Running, name: str) -> None:
    answer = httpx.get(f"{server.url}/files/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] in ("not_found_error", "invalid_request_error")


def test_a_file_is_found_by_its_name_alone(models: dict[str, AsyncOmni], tmp_path: Path) -> None:
    service = Service(keyring=Keyring([Holder("me", digest_of("secret-key"))]), state=tmp_path)
    service.add("draw", models["draw"])
    service.loading = False
    with serving(service) as running, running.client(api_key="secret-key") as client:
        answer = client.images.generate(**SMALL, response_format="url", extra_body=fast())
        assert answer.data is not None
        url = answer.data[0].url or ""
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret-key"}):
            assert opened(httpx.get(url, headers=headers).content).size == (64, 48)
        # Only the whole name: nothing lists or shortens it, and everything else still asks for the key.
        place, _, name = url.rpartition("/")
        for other in (f"{place}/", f"{place}/{name[:-5]}.png", f"{place}/{'A' * 32}.png"):
            assert httpx.get(other).status_code == 404
        assert httpx.get(f"{running.url}/v1/models").status_code == 401


# --------------------------------------------------------------------------------------------------- wrong


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"model": "lm"}, 400, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "  "}, 400, "prompt"),
        ({"size": "big"}, 400, "size"),
        ({"size": "65x48"}, 400, "size"),
        ({"size": "12x48"}, 400, "size"),
        ({"size": "99999x99999"}, 400, "size"),
        ({"n": 0}, 400, "n"),
        ({"n": 17}, 400, "n"),
        ({"output_format": "tiff"}, 400, "output_format"),
        ({"output_compression": 50}, 400, "output_compression"),
        ({"stream": True, "response_format": "url"}, 400, "response_format"),
        ({"background": "transparent"}, 400, "background"),
        ({"steps": 0}, 400, "steps"),
        ({"seed": -1}, 400, "seed"),
        ({"strength": 0.5}, 400, "strength"),
        ({"scheduler": "os.system"}, 400, "scheduler"),
        ({"unknown_field": 1}, 400, "unknown_field"),
        ({"timeout": 1e-4}, 408, None),
    ],
)
def test_what_is_wrong_is_named(server: Running, change: dict[str, object], status: int, param: str | None) -> None:
    body = {**SMALL, **fast(), **change}
    answer = httpx.post(f"{server.url}/v1/images/generations", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert param is None or error["param"] == param, error


@pytest.mark.parametrize(
    ("files", "status", "param"),
    [
        ({}, 400, "image"),
        ({"image": b"no picture at all"}, 400, "image"),
        ({"image": b""}, 400, "image"),
        ({"image": png()[:200]}, 400, "image"),
        ({"image": png(), "mask": b"none"}, 400, "mask"),
        ({"image": png(), "mask": plain_mask(255, 32, 32)}, 400, "mask"),
        ({"image": png(), "markup": png()}, 400, "markup"),
    ],
)
def test_wrong_files_are_named(server: Running, files: dict[str, bytes], status: int, param: str) -> None:
    sent = [(name, (f"{name}.png", data, "image/png")) for name, data in files.items()]
    # A part without a file name is a plain field: the form is multipart even where no file goes with it.
    fields = [(name, (None, str(value))) for name, value in {**SMALL, **fast()}.items()]
    answer = httpx.post(f"{server.url}/v1/images/edits", files=[*fields, *sent])
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_wrong_fields_of_a_form_are_named(client: openai.OpenAI) -> None:
    given = {**SMALL, "image": ("cat.png", png(), "image/png")}
    for change, param in (({"steps": "many"}, "steps"), ({"strength": 2.0}, "strength"), ({"other": 1}, "other")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.images.edit(**given, extra_body=change)
        assert refused.value.param == param


# --------------------------------------------------------------------------------------------------- store


def test_the_store_drops_the_oldest_by_count_and_by_bytes(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=100, max_files=3)
    names = [store.put(bytes([i]) * 20, "png") for i in range(4)]
    assert [store.get(name) is not None for name in names] == [False, True, True, True]
    big = store.put(b"x" * 70, "jpeg")
    assert [store.get(name) is not None for name in names] == [False, False, False, True]
    assert store.get(big) == (b"x" * 70, "image/jpeg")
    with pytest.raises(LimitExceededError, match="b64_json"):
        store.put(b"x" * 101, "png")
    assert len(list(tmp_path.iterdir())) == 2


def test_the_store_knows_its_files_again(tmp_path: Path) -> None:
    first = FileStore(tmp_path)
    names = [first.put(bytes([i]) * 20, "png") for i in range(3)]
    for age, name in enumerate(names):
        os.utime(tmp_path / name, ns=(age, age))
    (tmp_path / "half.png.part").write_bytes(b"x")
    (tmp_path / "other.txt").write_bytes(b"mine")
    again = FileStore(tmp_path, max_files=2)
    assert [again.get(name) is not None for name in names] == [False, True, True]
    assert again.get("other.txt") is None
    assert (tmp_path / "other.txt").exists()
    assert not (tmp_path / "half.png.part").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--state"):
        FileStore(tmp_path / "file" / "store")
