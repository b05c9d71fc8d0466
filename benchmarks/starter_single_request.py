"""One request at a time, our engine against `transformers`, in many pairs: a difference smaller than the noise.

    omnistage pull starter
    python benchmarks/starter_single_request.py [--pairs 47]

SmolLM2-135M-Instruct in float32, 40 tokens in, 24 out, greedy. Each side has a process of its own; the sides of a pair
follow each other, the other one first in every second pair.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from side_process import Side
from starter_transformers import SINGLE

from omnistage.core.user_cache import weights_home

_PROMPT = [list(range(100, 140))]
_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=weights_home() / "starter" / "think", help="a causal LM's folder")
    parser.add_argument("--pairs", type=int, default=47)
    options = parser.parse_args()
    python, seconds = Path(sys.executable), {"ours": [0.0], "transformers": [0.0]}
    with (
        Side(python, "starter_omnistage.py", options.model, {}, None) as ours,
        Side(python, "starter_transformers.py", options.model, {}, None) as theirs,
    ):
        sides = {"ours": ours.run(_TOKENS, "ours"), "transformers": theirs.run(_TOKENS, SINGLE)}
        for pair in range(options.pairs + 1):  # the first is a warm-up
            for name in list(sides)[:: 1 if pair % 2 else -1]:
                time.sleep(0.3)
                seconds[name].append(sides[name](_PROMPT).seconds)
    own, their = (seconds[name][2:] for name in ("ours", "transformers"))
    ratio = statistics.median(b / a for a, b in zip(own, their, strict=True))
    print(f"{len(own)} pairs; seconds of transformers over ours: median of the pairs {ratio:.3f},", end=" ")
    print(f"sum over sum {sum(their) / sum(own):.3f}, least over least {min(their) / min(own):.3f}")
    print(f"tokens a second, median: ours {_TOKENS / statistics.median(own):.1f},", end=" ")
    print(f"transformers {_TOKENS / statistics.median(their):.1f}")


if __name__ == "__main__":
    main()
