"""The codec engine: streaming vocoders and one-shot modules, batched across requests."""

from omnistage.engines.codec.component import CodecComponent, CodecLayout, Window
from omnistage.engines.codec.module import UNFINISHED, Job, ModuleComponent, ModuleStage
from omnistage.engines.codec.stage import CodecStage

__all__ = [
    "UNFINISHED",
    "CodecComponent",
    "CodecLayout",
    "CodecStage",
    "Job",
    "ModuleComponent",
    "ModuleStage",
    "Window",
]
