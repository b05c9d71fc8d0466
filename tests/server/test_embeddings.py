"""Embeddings, scores, reranking and moderations over HTTP, with OpenAI's client where it has the method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from omnistage.core.errors import StageError
from omnistage.omni import AsyncOmni
from omnistage.server.openai.embeddings import check_finite
from omnistage.server.service import ServedModel, Service
from tests.server.harness import Running, make, serving

TEXTS = ["A man is eating food.", "cheetah", "The weather is bright, the river is quiet"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("encoders")
    models = {}
    for variant in ("encoder", "decoder", "cross_encoder", "classifier"):
        models[variant] = AsyncOmni(make_variant(folder, variant), progress=False)
    models["lm"] = AsyncOmni(make("causal_lm", folder / "lm"), progress=False)
    with serving(Service({name: ServedModel(name, omni) for name, omni in models.items()})) as running:
        yield running
    for omni in models.values():
        omni.orchestrator.check_idle()
        omni.orchestrator.shutdown(False)


def make_variant(folder: Any, variant: str) -> Any:
    from omnistage.models.text_encoder import tiny

    tiny.write(folder / variant, variant=variant)
    return folder / variant


def post(server: Running, path: str, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    return response.json() if response.status_code == 200 else (response.status_code, response.json()["error"])


def test_embeddings_are_the_same_as_floats_and_as_base64(server: Running) -> None:
    client = server.client()
    decoded = client.embeddings.create(model="encoder", input=TEXTS)  # the client asks for base64 and decodes it
    plain = client.embeddings.create(model="encoder", input=TEXTS, encoding_format="float")
    assert [item.index for item in plain.data] == [0, 1, 2]
    np.testing.assert_array_equal([item.embedding for item in plain.data], [item.embedding for item in decoded.data])
    np.testing.assert_allclose([np.linalg.norm(item.embedding) for item in plain.data], 1.0, atol=1e-6)
    one = client.embeddings.create(model="encoder", input=TEXTS[1], encoding_format="float")
    np.testing.assert_allclose(one.data[0].embedding, plain.data[1].embedding, atol=1e-6)
    assert plain.usage.total_tokens == plain.usage.prompt_tokens > one.usage.prompt_tokens > 0


def test_token_ids_may_be_sent_in_place_of_texts(server: Running) -> None:
    client = server.client()
    both = client.embeddings.create(model="encoder", input=[[5, 6, 7], [8]])
    one = client.embeddings.create(model="encoder", input=[5, 6, 7])
    np.testing.assert_allclose(both.data[0].embedding, one.data[0].embedding, atol=1e-6)
    assert both.usage.prompt_tokens == 4


def test_embeddings_are_cut_where_the_model_was_trained_for_it(server: Running) -> None:
    client = server.client()
    whole = np.array(client.embeddings.create(model="decoder", input="Hello").data[0].embedding)
    cut = client.embeddings.create(model="decoder", input="Hello", dimensions=16).data[0].embedding
    np.testing.assert_allclose(cut, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="may not be cut"):
        client.embeddings.create(model="encoder", input="Hello", dimensions=16)
    with pytest.raises(openai.BadRequestError, match="the model gives 64"):
        client.embeddings.create(model="decoder", input="Hello", dimensions=65)


def test_a_prompt_of_the_checkpoint_is_written_before_each_text(server: Running) -> None:
    client = server.client()
    named = client.embeddings.create(model="encoder", input="Hello", extra_body={"prompt_name": "query"})
    written = client.embeddings.create(model="encoder", input="query: Hello")
    assert named.data[0].embedding == written.data[0].embedding
    with pytest.raises(openai.BadRequestError, match="its prompts: query, document"):
        client.embeddings.create(model="encoder", input="Hello", extra_body={"prompt_name": "title"})


def test_a_cross_encoder_ranks_documents_by_its_scores(server: Running) -> None:
    scored = post(server, "/v1/score", model="cross_encoder", text_1="Who eats?", text_2=TEXTS)
    scores = [item["score"] for item in scored["data"]]
    ranked = post(server, "/v1/rerank", model="cross_encoder", query="Who eats?", documents=TEXTS, top_n=2)
    order = sorted(range(3), key=lambda place: -scores[place])[:2]
    assert [item["index"] for item in ranked["results"]] == order
    assert [item["document"]["text"] for item in ranked["results"]] == [TEXTS[place] for place in order]
    np.testing.assert_allclose([item["relevance_score"] for item in ranked["results"]], [scores[i] for i in order])
    assert all(0 < value < 1 for value in scores)
    assert ranked["usage"] == scored["usage"]


def test_an_embedding_model_scores_pairs_by_the_cosine(server: Running) -> None:
    scored = post(server, "/v1/score", model="encoder", text_1=TEXTS[0], text_2=TEXTS)
    client = server.client()
    query = client.embeddings.create(model="encoder", input=f"query: {TEXTS[0]}").data[0].embedding
    documents = client.embeddings.create(model="encoder", input=TEXTS).data
    expected = [float(np.dot(query, item.embedding)) for item in documents]
    np.testing.assert_allclose([item["score"] for item in scored["data"]], expected, atol=1e-6)
    given = [{"text": text} for text in TEXTS]
    ranked = post(server, "/v1/rerank", model="encoder", query=TEXTS[0], documents=given, return_documents=False)
    assert [item["index"] for item in ranked["results"]] == sorted(range(3), key=lambda place: -expected[place])
    assert "document" not in ranked["results"][0]


def test_a_multi_label_classifier_answers_moderations(server: Running) -> None:
    answer = server.client().moderations.create(model="classifier", input=TEXTS)
    for result in answer.results:
        scores = result.category_scores.model_dump()
        given = {name: scores[name] for name in ("violence", "harassment", "spam")}
        flags = result.categories.model_dump()
        assert all(flags[name] == (value >= 0.5) for name, value in given.items())
        assert result.flagged == any(value >= 0.5 for value in given.values())


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/embeddings", {"model": "lm", "input": "a"}, "model", "gives text, not embedding"),
        ("/v1/embeddings", {"model": "encoder", "input": []}, "input", "not empty"),
        ("/v1/embeddings", {"model": "encoder", "input": ["a", 1]}, "input", "must be a text"),
        ("/v1/embeddings", {"model": "encoder", "input": "word " * 200}, "input[0]", "takes 64"),
        ("/v1/embeddings", {"model": "encoder", "input": ["a"] * 2049}, "input", "2048"),
        ("/v1/embeddings", {"model": "encoder", "input": "a", "size": 1}, "size", "unknown field"),
        ("/v1/score", {"model": "classifier", "text_1": "a", "text_2": "b"}, "model", "3 classes"),
        ("/v1/score", {"model": "encoder", "text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "as many"),
        ("/v1/moderations", {"model": "cross_encoder", "input": "a"}, "model", "harmless"),
        ("/v1/rerank", {"model": "encoder", "query": "a", "documents": []}, "documents", ""),
        (
            "/v1/chat/completions",
            {"model": "encoder", "messages": [{"role": "user", "content": "a"}]},
            "model",
            "not chat",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_in_openais_form(
    server: Running, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    status, error = post(server, path, **body)
    assert status in (400, 413)
    assert error["param"] == param
    assert words in error["message"]


def test_the_endpoints_are_in_the_openapi_document(server: Running) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    for path in ("/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/moderations"):
        assert "application/json" in paths[path]["post"]["responses"]["200"]["content"]


def test_a_deadline_that_has_passed_is_an_error(server: Running) -> None:
    status, error = post(server, "/v1/embeddings", model="encoder", input="a", timeout=-1)
    assert status == 400
    assert error["param"] == "timeout"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_json_does_not_have_are_an_error(value: float) -> None:
    check_finite(np.ones((2, 3)))
    with pytest.raises(StageError, match="not finite"):
        check_finite(np.array([[0.5, value]]))
