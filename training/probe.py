"""Which layer's hidden states say most about a picture: a linear map from each layer's rows to tiny pictures.

    python training/probe.py

prints, for each layer, the share of variance of 8x8 pictures that it explains on captions it has not seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from captions import Scene
from scenes import Batches, EmojiSet, SceneLayout, SceneRenderer
from text import TextEncoder, condition_rows, mask_of
from train import transformers_module


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build"))
    args = parser.parse_args()
    transformers = transformers_module()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pictures = EmojiSet.read(args.build / "emoji.safetensors")
    encoder = TextEncoder(args.build / "text.safetensors", transformers).to(device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.build / "tokenizer")
    batches = Batches(pictures, tokenizer, (encoder.prefix, encoder.suffix), 1, 0)
    kept = [i for i, name in enumerate(pictures.captions) if not name.endswith("skin")]
    seen, rows = [], []
    renderer = SceneRenderer(pictures, device)
    for start in range(0, len(kept), 256):
        some = kept[start : start + 256]
        drawn = batches.layout_tensors([SceneLayout(Scene(pictures.captions[i]), i) for i in some])
        seen.append(torch.nn.functional.adaptive_avg_pool2d(renderer(_on(drawn, device)), 8).flatten(1))
        said = _on(batches.tokens([f"Draw a {pictures.captions[i]}." for i in some]), device)
        mask = mask_of(said["ids"], said["end"])
        hidden = encoder(said["ids"].long(), mask)
        conditions = [condition_rows(state, said["start"], said["end"]) for state in hidden]
        rows.append(torch.stack([torch.cat([r.mean(1) * 4, _last(r)], -1) for r in conditions]))
    target, every = torch.cat(seen), torch.cat(rows, 1)
    names = [pictures.captions[i] for i in kept]
    order = sorted(set(names))
    picked = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))[: len(order) // 5]
    test = torch.tensor([name in {order[i] for i in picked} for name in names], device=device)
    mean = target[~test].mean(0)
    for layer, state in enumerate(every):
        scaled = (state - state[~test].mean(0)) / (state[~test].std(0) + 1e-6)
        gram = scaled[~test].T @ scaled[~test]
        best = max(
            _explained(
                scaled[test],
                torch.linalg.solve(
                    gram + weight * torch.eye(len(gram), device=device), scaled[~test].T @ (target[~test] - mean)
                ),
                target[test] - mean,
            )
            for weight in (1e3, 3e3, 1e4, 3e4)
        )
        print(f"layer {layer}: {best:.4f}", flush=True)


def _last(rows: torch.Tensor) -> torch.Tensor:
    ends = rows.abs().sum(-1).gt(0).sum(1) - 1
    return rows[torch.arange(len(rows), device=rows.device), ends]


def _explained(inputs: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor) -> float:
    return float(1 - (inputs @ weights - targets).square().sum() / targets.square().sum())


def _on(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


if __name__ == "__main__":
    main()
