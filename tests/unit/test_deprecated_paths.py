"""Old module paths: every public name that they had in 0.1 is found, and warns once for each import."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "omnistage.types": """
        ARInput AudioChunk ChatInput ChunkPayload CodecFrames CodecInput CodecParams
        CompletionOutput Condition DTypeName DiffusionInput DiffusionParams FinishReason ImageChunk
        Latents MediaSpan Modality ModuleInput ModuleOutput OmniError OmniRequestOutput
        OmniTokensPrompt OutputChunk Progress RequestInfo SHOWN_CHARS SamplingParams SideRows
        StageChunk StageFeed StageInput StageParams StagePayloadIn StageTrace StructuredOutput
        TokenChunk TokenLogprob TokenLogprobs Trace Usage VideoChunk invalid_params is_utf8 record
        short_repr
    """,
    "omnistage.errors": """
        BridgeError CapacityError CheckpointError ConfigError DeadlineExceededError InternalError
        InvalidRequestError LimitExceededError MediaError MissingDependencyError OmniError
        PromptTooLongError QueueFullError RegistryError ShutdownError StageError
        UnsupportedModalityError UnsupportedModelError
    """,
    "omnistage.chat": """
        AudioPart ChatMessage ImagePart Part Role TextPart ToolCall VideoPart parse_messages
    """,
    "omnistage.pipeline.registry": """
        AnyProcessor Bridge BridgeResult ComponentFactory DrawingProcessor ENTRY_POINT_GROUP Family
        HearingProcessor InputProcessor LoadContext PartialProcessor REGISTRY ReadingProcessor
        Registry WritingProcessor check_bridge check_name
    """,
    "omnistage.pipeline.stage": """
        Stage StageStats
    """,
    "omnistage.server.filters": """
        AnswerText ContentFilter FilterContext FilterFactory GROUP Pass PassingFilter PromptText
        Redact Refuse RequestFilter Verdict make_filter register_filter
    """,
}
"""What each module defined before its names moved."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module].split()])
def test_a_name_is_found_at_its_old_path_with_one_warning(module: str, name: str) -> None:
    old = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} has moved to omnistage") as warned:
        value = getattr(old, name)
    assert len(warned) == 1
    assert warned[0].filename == __file__  # the importer's line, not ours
    new = str(warned[0].message).split(" has moved to ")[1].split(";")[0]
    home, _, renamed = new.rpartition(".")
    places = [(new, name), (home, renamed)]
    assert any(_attribute(place, attribute) is value for place, attribute in places)


def _attribute(module: str, name: str) -> object:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def test_a_name_that_never_was_is_refused_with_where_to_look() -> None:
    import omnistage.errors

    with pytest.raises(AttributeError, match=r"omnistage\.core\.errors"):
        omnistage.errors.NoSuchError  # noqa: B018
