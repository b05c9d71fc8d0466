"""vLLM's side of `starter_language_model.py`: runs in an environment of its own, spoken to over its standard streams.

    python benchmarks/starter_vllm.py FOLDER

Each line of its input is a JSON object with `prompts` (lists of token ids) and `tokens`; each line of its answer one
with `seconds`, `processor` (its seconds too) and `tokens` (the ids that were generated). The first line says which
versions run. Needs vllm alone, so that it can stay out of our own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # What vLLM prints belongs to the standard error; the standard output carries answers alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    import torch
    import vllm

    engine = vllm.LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        enable_prefix_caching=False,  # prompts come again in every round
        seed=0,
        disable_log_stats=True,
    )

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    say({"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        asked = json.loads(line)
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=True, seed=0
        )
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        start, busy = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds, processor = time.perf_counter() - start, time.process_time() - busy
        new = [list(output.outputs[0].token_ids) for output in outputs]
        say({"seconds": seconds, "processor": processor, "tokens": new})


if __name__ == "__main__":
    main()
