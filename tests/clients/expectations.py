"""What vLLM's, vLLM-Omni's and SGLang's own API tests expect of a service, tried against one that runs.

    omnistage serve starter --port 8000                                   in another terminal
    python -m tests.clients.expectations --url http://127.0.0.1:8000

Every expectation is one request: whose test it is from, what it says, what must come back. It ends with how many hold,
and what came instead where one does not. docs/clients.md has the result. What the starter has not (pictures that it
sees, adapters, embeddings) is not in the list.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from . import expected_completions, expected_media
from .expectation import Answer, send
from .expected_chat import ALL

__all__ = ["expected_completions", "expected_media"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    url = parser.parse_args().url
    held: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for wanted in ALL:
        answer: Answer | None = None
        try:
            answer = send(url, wanted)
            holds, what = bool(wanted.holds(answer)), f"{answer.status} {answer.raw[:300]!r}"
        except Exception as error:  # an answer of another form is what is looked for
            holds, what = False, f"{type(error).__name__}: {error}; {answer.raw[:300] if answer else b''!r}"
        tried[wanted.source] += 1
        held[wanted.source] += holds
        crashed = answer is not None and answer.status >= 500
        if not holds or crashed:
            print(f"{'CRASH' if crashed else 'no'}  {wanted.source}: {wanted.says}: {what}", flush=True)
    for source, count in tried.items():
        print(f"{source}: {held[source]} of {count}")
    print(f"all: {held.total()} of {tried.total()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
