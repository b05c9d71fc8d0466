"""The exchanges of `exchanges.py`, with the clients that this environment has."""

from __future__ import annotations

import importlib.util

import pytest

from tests.clients.exchanges import EXCHANGES
from tests.server.harness import Running
from tests.server.starter_harness import server, starter

__all__ = ["server", "starter"]  # fixtures

MODULES = {"langchain-openai": "langchain_openai", "llama-index": "llama_index", "pydantic-ai": "pydantic_ai"}
MODULES |= {"openai-agents": "agents.realtime", "livekit-agents": "livekit.agents"}
TOOLS = ("guidellm", "aiperf", "vllm-bench")


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(MODULES.get(name, name)) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("client", "way"),
    [
        pytest.param(client, way, id=f"{client}-{way}")
        for client, ways in EXCHANGES.items()
        if client not in TOOLS and is_installed(client)
        for way in ways
    ],
)
def test_a_client_works(server: Running, client: str, way: str) -> None:
    EXCHANGES[client][way](f"{server.url}/v1", "starter")
