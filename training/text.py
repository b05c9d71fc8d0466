"""The thinker's hidden states, as the picture's condition: the first layers of SmolLM2, and which rows are read.

    python training/text.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --think ~/.cache/omnistage/starter/think

writes a small file with the layers that are needed, still quantised as in the GGUF, and the embeddings of all words
that captions are made of: training needs nothing else of the language model.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from captions import ASKS, BACKGROUNDS, BEHIND, BESIDE, HUES
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

LAYERS = 12
"""Layers that are kept; pictures are conditioned on the output of one of them."""
ROWS = 24
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class TextEncoder(nn.Module):
    """The first layers of the language model over tokens of captions."""

    def __init__(self, path: Path, transformers: Any) -> None:
        super().__init__()
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        config = transformers.LlamaConfig(**json.loads(metadata["config"]))
        config._attn_implementation = "sdpa"
        self.prefix, self.suffix = json.loads(metadata["template"])
        self.embedding = nn.Embedding.from_pretrained(tensors.pop("embedding").float())
        self.register_buffer("row_of", tensors.pop("row_of"))
        config.vocab_size, config.pad_token_id = 1, None
        self.model = transformers.LlamaModel(config)
        self.model.norm = nn.Identity()  # hidden states of layers are read before it
        state = {}
        for name, value in tensors.items():
            kind = GGMLQuantizationType[json.loads(metadata["kinds"])[name]]
            state[name] = _dequantize(value.numpy(), kind, name, config)
        missing = self.model.load_state_dict(state, strict=False)
        if missing.unexpected_keys or set(missing.missing_keys) != {"embed_tokens.weight"}:
            raise ValueError(f"{path} does not fit: {missing}")
        self.requires_grad_(False).eval()

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Hidden states `[B, T, H]` after no layer, the first, the second, ..."""
        rows = self.row_of[ids]
        out = self.model(
            inputs_embeds=self.embedding(rows.clamp(min=0)).to(self.model.layers[0].mlp.up_proj.weight.dtype),
            attention_mask=mask,
            use_cache=False,
            output_hidden_states=True,
        )
        return out.hidden_states  # type: ignore[no-any-return]


def mask_of(ids: Tensor, end: Tensor) -> Tensor:
    """`int64 [B, T]`: 1 where a prompt that ends at `end` has tokens."""
    return (torch.arange(ids.shape[1], device=ids.device) < end[:, None]).long()


def condition_rows(hidden: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """`[B, ROWS, H]`: the last rows of `[start, end)`, each of root mean square 1, then rows of zeros."""
    begin = torch.maximum(start, end - ROWS)
    places = begin[:, None] + torch.arange(ROWS, device=hidden.device)
    inside = places < end[:, None]
    picked = hidden.gather(1, places.clamp(max=hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[2])).float()
    picked = picked * torch.rsqrt(picked.square().mean(-1, keepdim=True) + 1e-6)
    return picked * inside[..., None]


def _dequantize(raw: np.ndarray, kind: GGMLQuantizationType, name: str, config: Any) -> Tensor:
    values = torch.from_numpy(np.array(dequantize(raw, kind), dtype=np.float32))
    if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF keeps rotary halves interleaved
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        values = values.view(heads, -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
    return values


def _words(names: Iterable[str]) -> set[str]:
    """Every word that a caption may hold, as a tokenizer may meet it."""
    said = [*names, *HUES, *BACKGROUNDS, *ASKS, *BEHIND, *BESIDE, "a", "an", "with skin", "Here is"]
    bare = {w for text in said for w in text.translate(str.maketrans("{}.,?!:", "       ")).split()}
    bare |= {piece for text in said for piece in text.split()} - {"{x}"}
    forms = {form for word in bare for form in (word, word.capitalize(), word.lower())}
    return {f"{space}{form}{end}" for form in forms for space in ("", " ") for end in ("", ".", "?", ",")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--think", type=Path, required=True, help="the checkpoint that `omnistage pull starter` made")
    parser.add_argument("--data", type=Path, default=Path("build/emoji.safetensors"))
    parser.add_argument("--out", type=Path, default=Path("build/text.safetensors"))
    args = parser.parse_args()
    from omnistage.hf import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.think)
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "@@"}], tokenize=False, add_generation_prompt=True
    ).split("@@")
    with safe_open(args.data, "pt") as file:
        names = {entry["caption"] for entry in json.loads(file.metadata()["entries"])}
    used = {token for word in _words(names) for token in tokenizer(word)["input_ids"]}
    used |= {token for part in said for token in tokenizer(part)["input_ids"]}
    used |= {token for c in string.printable for token in tokenizer(c)["input_ids"]}
    reader = gguf.GGUFReader(args.gguf)
    tensors, kinds, kept = {}, {}, sorted(used)
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            rows = dequantize(tensor.data[kept], tensor.tensor_type)
            tensors["embedding"] = torch.from_numpy(rows.astype(np.float16))
        elif tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) < LAYERS:
            _, layer, part, _ = tensor.name.split(".")
            name = f"layers.{layer}.{_NAMES[part]}.weight"
            tensors[name] = torch.from_numpy(np.array(tensor.data))
            kinds[name] = tensor.tensor_type.name
    row_of = torch.full((len(tokenizer),), -1, dtype=torch.int32)
    row_of[kept] = torch.arange(len(kept), dtype=torch.int32)
    tensors["row_of"] = row_of
    config = json.loads((args.think / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    metadata = {"config": json.dumps(config), "kinds": json.dumps(kinds), "template": json.dumps(said)}
    save_file(tensors, args.out, metadata)
    print(f"{LAYERS} layers, {len(kept)} words, {args.out.stat().st_size / 1e6:.1f} MB: {args.out}")


if __name__ == "__main__":
    main()
