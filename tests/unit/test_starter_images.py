"""Images as text: labels, OCR, and the sentence that the language model gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from omnistage_starter import image_description
from omnistage_starter.efficientnet import CLASSES, EfficientNetLite0, _Conv
from omnistage_starter.image_description import LABEL_FILES, OCR_FILES, ImageDescriber
from omnistage_starter.image_labels import Labeller, class_names
from omnistage_starter.ocr import Box, TextReader, components, group_rows, run_to_end
from omnistage_starter.parts.manifest import STARTER
from omnistage_starter.parts.store import Store
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file

from omnistage.core.errors import CheckpointError, LimitExceededError, MediaError

pytest.importorskip("onnx", reason="the tiny networks are written with the package onnx")
pytest.importorskip("onnxruntime", reason="OCR runs on ONNX Runtime")

WHITE, BLUE, RED, GREEN = (255, 255, 255), (0, 0, 255), (255, 0, 0), (0, 255, 0)
LETTER = 30
"""Pixels of a letter for the tiny networks: a blue square reads "a", a red one "b", a green one is a space."""


def save_onnx(path: Path, nodes: list[object], output: tuple[str, list[object]], constants: dict[str, object]) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, path)


def write_reader(folder: Path, characters: Sequence[str] = ("a", "b")) -> Path:
    """Networks with the interface of the real ones: pixels that are not white are text, their colour is the letter."""
    from onnx import helper

    folder.mkdir(parents=True, exist_ok=True)
    find = [
        helper.make_node("ReduceMin", ["x"], ["darkest"], axes=[1], keepdims=1),
        helper.make_node("Mul", ["darkest", "steep"], ["chance"]),
        helper.make_node("Sigmoid", ["chance"], ["sigmoid_0.tmp_0"]),
    ]
    save_onnx(
        folder / OCR_FILES[0], find, ("sigmoid_0.tmp_0", ["n", 1, "h", "w"]), {"steep": np.array([-20.0], np.float32)}
    )
    weights = np.zeros((3, 4), np.float32)  # from blue, green, red to none, "a", "b", space
    weights[:, 1], weights[:, 2], weights[:, 3] = (10, -5, -5), (-5, -5, 10), (-5, 10, -5)
    read = [
        helper.make_node("AveragePool", ["x"], ["steps"], kernel_shape=[48, 8], strides=[48, 8]),
        helper.make_node("Squeeze", ["steps", "axis"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["rows", "weights"], ["scores"]),
        helper.make_node("Add", ["scores", "bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["softmax_11.tmp_0"], axis=-1),
    ]
    constants = {"axis": np.array([2]), "weights": weights, "bias": np.array([4, 0, 0, 0], np.float32)}
    save_onnx(folder / OCR_FILES[1], read, ("softmax_11.tmp_0", ["n", "t", 4]), constants)
    (folder / OCR_FILES[2]).write_text("\n".join(characters), encoding="utf-8")
    return folder


def write_labeller(folder: Path, *, sure: dict[int, float]) -> Path:
    """A network with random weights that gives these classes these logits for every image, and 0 to the others."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    weights = EfficientNetLite0().state_dict()
    weights["_fc.weight"].zero_()
    weights["_fc.bias"].zero_()
    for number, logit in sure.items():
        weights["_fc.bias"][number] = logit
    save_file(weights, folder / LABEL_FILES[0])
    (folder / LABEL_FILES[1]).write_text("\n".join(f"n{number}" for number in range(CLASSES)), encoding="utf-8")
    lemmas = "\n".join(f"n{number}\tthing {number}, Latina res" for number in range(CLASSES))
    (folder / LABEL_FILES[2]).write_text(lemmas, encoding="utf-8")
    return folder


def reader(folder: Path) -> TextReader:
    return TextReader(*(write_reader(folder) / name for name in OCR_FILES))


def page(*words: tuple[int, int, str], size: tuple[int, int] = (600, 400)) -> np.ndarray:
    """Words in the letters of the tiny networks, each at its left and top."""
    picture = Image.new("RGB", size, WHITE)
    draw = ImageDraw.Draw(picture)
    for left, top, word in words:
        for place, letter in enumerate(word):
            x = left + place * LETTER
            draw.rectangle((x, top, x + LETTER - 1, top + LETTER - 1), {"a": BLUE, "b": RED, " ": GREEN}[letter])
    return np.asarray(picture)


# ------------------------------------------------------------------------------------------------- the network


def test_padding_matches_tensorflow() -> None:
    conv = _Conv(1, 1, kernel=3, stride=2)
    with torch.no_grad():
        conv.weight.fill_(1)
        output = conv(torch.ones(1, 1, 4, 4))[0, 0]
    # Nothing is added on the left and at the top, one row and column on the other sides.
    assert output.tolist() == [[9, 6], [6, 4]]


def test_weights_are_loaded_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = EfficientNetLite0().eval()
    save_file(network.state_dict(), tmp_path / "net.safetensors")
    pixels = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(EfficientNetLite0.load(tmp_path / "net.safetensors")(pixels), network(pixels))
    assert sum(parameter.numel() for parameter in network.parameters()) == 4_652_008  # as published


@pytest.mark.parametrize("change", ["missing", "shape", "garbage", "absent"])
def test_other_weights_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "net.safetensors"
    weights = EfficientNetLite0().state_dict()
    if change == "missing":
        del weights["_blocks.3._bn1.running_mean"]
    if change == "shape":
        weights["_fc.bias"] = torch.zeros(10)
    if change != "absent":
        save_file(weights, path)
    if change == "garbage":
        path.write_bytes(b"no weights at all")
    with pytest.raises(CheckpointError, match="omnistage pull starter"):
        EfficientNetLite0.load(path)


# ---------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("lemmas", "name"),
    [
        ("goldfish, Carassius auratus", "goldfish"),
        ("tabby, tabby cat", "tabby cat"),
        ("mouse, computer mouse", "computer mouse"),
        ("dingo, warrigal, warragal, Canis dingo", "dingo"),
        ("gorilla, Gorilla gorilla", "gorilla"),
        ("Pembroke, Pembroke Welsh corgi", "Pembroke Welsh corgi"),
    ],
)
def test_classes_have_common_names(tmp_path: Path, lemmas: str, name: str) -> None:
    (tmp_path / "synsets").write_text("n1\n" * CLASSES, encoding="utf-8")
    (tmp_path / "lemmas").write_text(f"n0\tother\nn1\t{lemmas}\n", encoding="utf-8")
    assert set(class_names(tmp_path / "synsets", tmp_path / "lemmas")) == {name}


@pytest.mark.parametrize(("synsets", "lemmas"), [("n1\n", "n1\ta\n"), ("n2\n" * CLASSES, "n1\ta\n"), ("n1\n", "n1 a")])
def test_class_names_that_do_not_match_are_refused(tmp_path: Path, synsets: str, lemmas: str) -> None:
    (tmp_path / "synsets").write_text(synsets, encoding="utf-8")
    (tmp_path / "lemmas").write_text(lemmas, encoding="utf-8")
    with pytest.raises(CheckpointError):
        class_names(tmp_path / "synsets", tmp_path / "lemmas")


def test_labels_are_sorted_by_probability_and_unlikely_ones_are_dropped(tmp_path: Path) -> None:
    folder = write_labeller(tmp_path, sure={7: 9.0, 8: 8.0, 9: 2.0})
    labels = Labeller(*(folder / name for name in LABEL_FILES)).labels(Image.new("RGB", (50, 90), RED))
    assert [name for name, _ in labels] == ["thing 7", "thing 8"]
    # The softmax over all classes: two with logits, one with little, 997 with none.
    total = np.exp([9.0, 8.0, 2.0]).sum() + 997
    assert [probability for _, probability in labels] == pytest.approx([np.exp(9) / total, np.exp(8) / total], rel=1e-4)


def test_a_low_probability_gives_no_labels(tmp_path: Path) -> None:
    folder = write_labeller(tmp_path, sure={7: 5.0})  # 13%
    assert Labeller(*(folder / name for name in LABEL_FILES)).labels(Image.new("RGB", (50, 90), RED)) == []


# ------------------------------------------------------------------------------------------------------ text


def flood_fill(mask: np.ndarray, values: np.ndarray) -> set[tuple[int, int, int, int, float]]:
    """Components by flood fill over eight neighbours."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    areas = set()
    while left:
        area, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            area.add((y, x))
            near = {(y + down, x + across) for down in (-1, 0, 1) for across in (-1, 0, 1)} & left
            left -= near
            edge += near
        ys, xs = zip(*area, strict=True)
        mean = sum(float(values[place]) for place in area) / len(area)
        areas.add((min(xs), min(ys), max(xs) + 1, max(ys) + 1, mean))
    return areas


@given(arrays.arrays(bool, arrays.array_shapes(min_dims=2, max_dims=2, max_side=12)), st.integers(0, 9))
def test_components_are_those_of_a_flood_fill(mask: np.ndarray, seed: int) -> None:
    values = np.random.default_rng(seed).random(mask.shape).astype(np.float32)
    found = sorted((box.left, box.top, box.right, box.bottom, mean) for box, mean in components(mask, values))
    known = sorted(flood_fill(mask, values))
    assert [area[:4] for area in found] == [area[:4] for area in known]
    # Two components may share a box: sorted by it and then by their means, they still pair up.
    assert [area[4] for area in found] == pytest.approx([area[4] for area in known], abs=1e-5)


def test_boxes_are_ordered_by_row_and_from_the_left() -> None:
    title, right, left, below = Box(50, 0, 90, 20), Box(60, 33, 99, 52), Box(0, 30, 40, 50), Box(0, 55, 99, 75)
    assert group_rows([below, right, left, title]) == [[title], [left, right], [below]]


def test_overlapping_lines_below_each_other_are_two_rows() -> None:
    upper, lower = Box(0, 0, 100, 30), Box(0, 14, 100, 44)
    assert group_rows([lower, upper]) == [[upper], [lower]]


def test_text_is_read_in_order(tmp_path: Path) -> None:
    picture = page((300, 40, "bba"), (40, 40, "ab"), (40, 200, "aab a"))
    assert reader(tmp_path).read(Image.fromarray(picture)) == ["ab ba", "ab a"]


def test_equal_letters_are_merged_unless_a_gap_separates_them(tmp_path: Path) -> None:
    words = reader(tmp_path)
    line = Image.fromarray(page((0, 0, "aaa"), size=(3 * LETTER, LETTER)))
    assert run_to_end(words.read_box(line, Box(0, 0, *line.size))) == "a"
    apart = Image.fromarray(page((0, 0, "a"), (2 * LETTER, 0, "a"), size=(3 * LETTER, LETTER)))
    assert run_to_end(words.read_box(apart, Box(0, 0, *apart.size))) == "aa"


def test_a_vertical_line_is_rotated(tmp_path: Path) -> None:
    upright = Image.fromarray(page((0, 0, "abb"), size=(3 * LETTER, LETTER)))
    downwards = upright.transpose(Image.Transpose.ROTATE_270).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert downwards.size == (LETTER, 3 * LETTER)
    assert run_to_end(reader(tmp_path).read_box(downwards, Box(0, 0, *downwards.size))) == "ab"


def test_read_steps_yields_before_each_run_of_a_network(tmp_path: Path) -> None:
    upright = page((40, 40, "ab"), (40, 200, "ba"))
    downwards = np.ascontiguousarray(page((40, 40, "abab")).transpose(1, 0, 2))  # a tall box is read three ways
    words = reader(tmp_path)
    assert len(list(words.read_steps(Image.fromarray(upright)))) == 1 + 2
    assert len(list(words.read_steps(Image.fromarray(downwards)))) == 1 + 3


def test_a_line_with_low_confidence_or_without_letters_is_dropped(tmp_path: Path) -> None:
    words = reader(tmp_path)
    purple = Image.new("RGB", (60, LETTER), (255, 0, 255))  # "a" and "b" with the same probability
    assert run_to_end(words.read_box(purple, Box(0, 0, 60, LETTER))) == ""
    spaces = Image.new("RGB", (60, LETTER), GREEN)
    assert run_to_end(words.read_box(spaces, Box(0, 0, 60, LETTER))) == ""


def test_boxes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage_starter.ocr.MAX_BOXES", 2)
    picture = page((40, 20, "a"), (40, 120, "bab"), (40, 220, "aba"))
    assert reader(tmp_path).read(Image.fromarray(picture)) == ["bab", "aba"]


@pytest.mark.parametrize("size", [(1, 1), (3, 900), (4000, 5), (5000, 3000)])
def test_odd_sizes_are_read_too(tmp_path: Path, size: tuple[int, int]) -> None:
    assert reader(tmp_path).read(Image.new("RGB", size, WHITE)) == []


def test_networks_and_characters_that_do_not_match_are_refused(tmp_path: Path) -> None:
    folder = write_reader(tmp_path, characters=("a", "b", "c"))
    with pytest.raises(CheckpointError, match=r"read\.onnx"):
        TextReader(*(folder / name for name in OCR_FILES))
    (folder / OCR_FILES[2]).unlink()
    with pytest.raises(CheckpointError, match=r"characters\.txt"):
        TextReader(*(folder / name for name in OCR_FILES))


# -------------------------------------------------------------------------------------------------- the sentence


def test_labels_and_text_make_one_sentence(tmp_path: Path) -> None:
    write_labeller(tmp_path, sure={7: 9.0, 8: 7.5})
    write_reader(tmp_path)
    text = ImageDescriber(tmp_path).describe(page((40, 40, "ab"), (40, 200, "ba b")))
    assert text == '(A picture. It may show: thing 7 (74%), thing 8 (17%). The text in it says: "ab", "ba b".)'


def test_each_of_labels_and_text_works_without_the_other(tmp_path: Path) -> None:
    picture = page((40, 40, "ab"))
    labels, text = write_labeller(tmp_path / "labels", sure={7: 12.0}), write_reader(tmp_path / "text")
    assert ImageDescriber.present(labels)
    assert ImageDescriber.present(text)
    assert ImageDescriber(labels).describe(picture) == "(A picture. It may show: thing 7 (99%).)"
    assert ImageDescriber(text).describe(picture) == '(A picture. The text in it says: "ab".)'


def test_an_image_without_labels_and_text_is_described_as_unclear(tmp_path: Path) -> None:
    write_labeller(tmp_path, sure={})
    write_reader(tmp_path)
    assert ImageDescriber(tmp_path).describe(page()) == "(A picture. It is not clear what it shows.)"


def test_a_folder_without_parts_is_refused(tmp_path: Path) -> None:
    write_reader(tmp_path)
    (tmp_path / OCR_FILES[0]).unlink()
    assert not ImageDescriber.present(tmp_path)
    assert not ImageDescriber.present(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="omnistage pull starter"):
        ImageDescriber(tmp_path)


def test_text_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_description, "_MAX_CHARACTERS", 3)
    write_reader(tmp_path)
    text = ImageDescriber(tmp_path).describe(page((40, 40, "ab"), (40, 200, "bab"), (40, 300, "a")))
    assert text == '(A picture. The text in it says: "ab", "b...".)'


def test_text_cannot_escape_its_quotes_or_use_template_marks() -> None:
    assert image_description._quotable(['say "hi"', "<|im_end|>", "plain"]) == ["say 'hi'", "< |im_end| >", "plain"]


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)],
    ids=["grey", "alpha", "floats", "empty"],
)
def test_an_array_that_is_no_image_is_refused(tmp_path: Path, pixels: np.ndarray) -> None:
    with pytest.raises(MediaError, match="height, width, 3"):
        ImageDescriber(write_reader(tmp_path)).describe(pixels)


def test_images_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_description, "MAX_PIXELS", 100)
    with pytest.raises(LimitExceededError, match="at most 100"):
        ImageDescriber(write_reader(tmp_path)).describe(np.zeros((11, 10, 3), np.uint8))


# ------------------------------------------------------------------------------------------------ the real parts


@pytest.fixture(scope="module")
def describer() -> ImageDescriber:
    folder = Store.of(STARTER).root / "see"
    if not all((folder / name).is_file() for name in (*LABEL_FILES, *OCR_FILES)):
        pytest.skip("image recognition is not here: `omnistage pull starter` fetches it")
    return ImageDescriber(folder)


@pytest.mark.slow
@pytest.mark.parametrize("height", [14, 24, 48])
@pytest.mark.parametrize(("ink", "paper"), [("black", "white"), ("white", "navy"), ("red", "yellow")])
def test_rendered_text_is_read(describer: ImageDescriber, height: int, ink: str, paper: str) -> None:
    picture = Image.new("RGB", (640, 240), paper)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(height)
    draw.text((30, 40), "Mind the gap", font=font, fill=ink)
    draw.text((30, 140), "Wet paint", font=font, fill=ink)
    assert 'The text in it says: "Mind the gap", "Wet paint".' in describer.describe(np.asarray(picture))


@pytest.mark.slow
def test_a_photograph_is_labelled(describer: ImageDescriber) -> None:
    cbook = pytest.importorskip("matplotlib.cbook", reason="the photograph is one of its samples")
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        text = describer.describe(np.asarray(Image.open(file).convert("RGB")))
    assert text.startswith("(A picture. It may show: military uniform (")
