"""What the families' language models share on the autoregressive engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.engines.ar.attention import PagedContext
from omnistage.engines.ar.component import ARComponent, ARSpec, KVShape, StateShape
from omnistage.engines.ar.cpu_kernels import apply_cpu_kernels
from omnistage.hf import transformers
from omnistage.models.loading import freeze, kv_shape, positive, use_paged_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from omnistage.engines.ar.sharding import RankGroup


class DecoderComponent(ARComponent):
    """A decoder of `transformers` with its embedding and head, attending through the engine's pool."""

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: PreTrainedModel,
        head: nn.Module,
        config: PreTrainedConfig,
        *,
        vocab_size: int | None = None,
        embed_size: int | None = None,
        max_length: int | None = None,
        position_dims: int = 1,
        emit_size: int = 0,
        side_input: bool = False,
        prompt_vocab_size: int = 0,
        layer_shapes: tuple[KVShape, ...] = (),
        plain_attention: bool = True,
        states: tuple[tuple[StateShape, ...], ...] = (),
        uneven_states: bool = False,
    ) -> None:
        """`config` is the decoder's own; the rest is as in `ARSpec`, None for what the config says."""
        # Without attention there are only states.
        layers, kv_heads, head_dim = (0, 0, 0) if states and not layer_shapes else kv_shape(config)
        self.spec = ARSpec(
            num_layers=layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size or positive(config, "vocab_size"),
            embed_size=embed_size or positive(config, "hidden_size"),
            max_length=max_length or positive(config, "max_position_embeddings"),
            position_dims=position_dims,
            emit_size=emit_size,
            side_input=side_input,
            prompt_vocab_size=prompt_vocab_size,
            layer_shapes=layer_shapes,
            plain_attention=plain_attention,
            states=states,
            uneven_states=uneven_states,
        )
        self.model = freeze(model)
        self.decoder = decoder
        self._embedding, self._head = model.get_input_embeddings(), head
        self.device, self.dtype = model.device, model.dtype
        use_paged_attention(decoder)
        apply_cpu_kernels(model)

    def shard(self, group: RankGroup, device: torch.device) -> None:
        """Other ranks leave out the networks that lead to the decoder, like encoders, which rank 0 runs alone."""
        from omnistage.engines.ar.sharding import shard_model

        names = {module: name for name, module in self.model.named_modules()}
        head = names.get(self._head)
        heads = dict(zip(self.attention_modules, (shape[0] for shape in self.spec.kv_shapes), strict=True))
        if shard_model(self.model, self.decoder, None if head is None else self._head, heads, group):
            shapes = tuple((heads // group.size, key, value) for heads, key, value in self.spec.layer_shapes)
            self.spec = replace(self.spec, num_kv_heads=self.spec.num_kv_heads // group.size, layer_shapes=shapes)
        if head is not None:
            self._head = self.model.get_submodule(head)
        if group.rank:
            running = {module for decoder in self.decoders for module in decoder.modules()}
            for module, name in names.items():
                whole = isinstance(module, transformers.PreTrainedModel) and name
                if whole and running.isdisjoint(module.modules()):
                    self.model.set_submodule(name, nn.Identity())
        self.model.to(device)
        self.device = device

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.model,)

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        return (self._head,)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids)  # type: ignore[no-any-return]

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        # m-RoPE's three positions a token go before the batch's dimension.
        places = positions if self.spec.position_dims == 1 else positions[:, None]
        out = self.decoder(inputs_embeds=embeds[None], position_ids=places, use_cache=False, paged=paged)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def forward_media(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        paged: PagedContext,
        places: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        out = self.decoder(
            inputs_embeds=embeds[None],
            position_ids=positions if self.spec.position_dims == 1 else positions[:, None],
            use_cache=False,
            paged=paged,
            visual_pos_masks=places[None],
            deepstack_visual_embeds=rows.chunk(self.spec.deep_size // self.spec.embed_size, dim=1),
        )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)  # type: ignore[no-any-return]
