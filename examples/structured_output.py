"""Output that follows a JSON schema, from any causal language model. Needs the extra `structured`.

python examples/structured_output.py out/tiny-lm
"""

from __future__ import annotations

import argparse
import json

from omnistage import Omni, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Japan"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "population", "capital"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint's folder, or a name in the local hub cache")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    params = SamplingParams(max_tokens=256, seed=args.seed, structured=StructuredOutput(json_schema=SCHEMA))
    with Omni(args.model) as omni:
        out = omni.chat([{"role": "user", "content": "Describe one city as JSON."}], params)
    # A text that was cut by max_tokens would not parse; the reason tells.
    if out.finish_reason != "stop":
        raise SystemExit(f"the output ended with reason {out.finish_reason}; raise max_tokens")
    print(json.dumps(json.loads(out.text), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
