"""Load generators, each with a few requests."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .exchange import HELLO, exchange, need


def tool(*command: str, seconds: float = 200) -> str:
    program, *options = command
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *options],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    need(done.returncode == 0, (done.stdout + done.stderr)[-280:])
    return done.stdout + done.stderr


def byte_tokenizer(folder: Path) -> str:
    """A tokenizer of bytes: the tools count with one of their own, and would fetch it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


@exchange("guidellm", "load")
def guidellm_load(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{HELLO} {i}"}) + "\n" for i in range(8)))
        report = Path(folder) / "report.json"
        options = ["--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model={model}"]
        options += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
        options += ["--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"]
        tool("guidellm", "run", "--disable-console", *options)
        (bench,) = json.loads(report.read_text())["benchmarks"]
        requests = bench["requests"]
        need(len(requests["successful"] or ()) >= 6 and not requests["errored"], requests)


@exchange("aiperf", "load")
def aiperf_load(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--model", model, "--url", url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming"]
        options += [
            "--request-count",
            "6",
            "--concurrency",
            "2",
            "--tokenizer",
            byte_tokenizer(Path(folder)),
            "--ui",
            "none",
        ]
        options += [
            "--output-artifact-dir",
            folder,
            "--synthetic-input-tokens-mean",
            "20",
            "--output-tokens-mean",
            "10",
        ]
        tool("aiperf", "profile", *options)
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        need(json.loads(report.read_text())["request_count"]["avg"] >= 6)


# What `vllm bench serve` calls; the command does not start from the wheel for processors, which has another name.
_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@exchange("vllm-bench", "load")
def vllm_load(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--backend", "openai-chat", "--base-url", url.removesuffix("/v1"), "--model", model]
        options += ["--endpoint", "/v1/chat/completions", "--dataset-name", "random", "--num-prompts", "6"]
        options += ["--random-input-len", "20", "--random-output-len", "10", "--ignore-eos"]
        options += ["--tokenizer", byte_tokenizer(Path(folder)), "--save-result", "--result-dir", folder]
        tool("python", "-c", _BENCH, *options)
        (report,) = Path(folder).glob("*.json")
        counts = json.loads(report.read_text())
        need(counts["completed"] == 6 and counts["total_output_tokens"] == 60, counts)
