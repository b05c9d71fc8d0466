"""Small random checkpoints of diffusers pipelines that give sound, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omnistage.hf import transformers
from omnistage.models._diffusers import tiny
from omnistage.models._diffusers.loading import diffusers

_CLAP_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "projection_dim": 32,
    "vocab_size": 1000,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "projection_hidden_act": "gelu",
}
_CLAP_AUDIO = {
    "spec_size": 64,
    "window_size": 4,
    "num_mel_bins": 64,
    "intermediate_size": 37,
    "depths": [1, 1],
    "num_attention_heads": [2, 2],
    "num_hidden_layers": 2,
    "hidden_size": 192,
    "projection_dim": 32,
    "patch_size": 2,
    "patch_stride": 2,
    "patch_embed_input_channels": 4,
}
_BLOCKS = {"sample_size": 32, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "norm_num_groups": 8}


def _vae() -> Any:
    return diffusers().AutoencoderKL(
        block_out_channels=(8, 16),
        in_channels=1,
        out_channels=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    )


def _vocoder() -> Any:
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8,
        sampling_rate=8000,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3], [1, 3]],
        normalize_before=False,
    )
    return transformers.SpeechT5HifiGan(config)


def _scheduler() -> Any:
    return diffusers().DDIMScheduler(
        beta_start=0.0015, beta_end=0.0195, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
    )


def _roberta(folder: Path) -> Any:
    """CLIP's byte pairs under RoBERTa's special tokens."""
    vocab, merges = tiny.clip_vocabulary()
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *list(vocab)[:990]]
    known = set(words)
    kept = [pair for pair in merges if {*pair, "".join(pair)} <= known]
    tokenizer = transformers.RobertaTokenizer(
        vocab={word: index for index, word in enumerate(words)}, merges=kept, model_max_length=77
    )
    tokenizer.save_pretrained(folder)
    return transformers.RobertaTokenizer.from_pretrained(folder)


def write_audioldm(folder: Path) -> None:
    torch.manual_seed(0)
    unet = diffusers().UNet2DConditionModel(
        **_BLOCKS,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=(8, 16),
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=32,
        class_embeddings_concat=True,
    )
    diffusers().AudioLDMPipeline(
        vae=_vae(),
        text_encoder=transformers.ClapTextModelWithProjection(transformers.ClapTextConfig(**_CLAP_TEXT)),
        tokenizer=_roberta(folder.parent / f"{folder.name}-tokenizer"),
        unet=unet,
        scheduler=_scheduler(),
        vocoder=_vocoder(),
    ).save_pretrained(folder)


def _clap() -> Any:
    config = transformers.ClapConfig(
        text_config=transformers.ClapTextConfig(**_CLAP_TEXT).to_dict(),
        audio_config=transformers.ClapAudioConfig(**_CLAP_AUDIO).to_dict(),
        projection_dim=16,
    )
    return transformers.ClapModel(config)


def write_audioldm2(folder: Path) -> None:
    torch.manual_seed(2)
    unet = diffusers().AudioLDM2UNet2DConditionModel(
        **_BLOCKS,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=((None, 16, 64), (None, 16, 64)),
        attention_head_dim=2,
    )
    language = transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=2, n_positions=256, vocab_size=64, bos_token_id=0, eos_token_id=0, max_new_tokens=4
    )
    tokenizers = folder.parent / f"{folder.name}-tokenizers"
    tiny.write_t5_tokenizer(tokenizers / "t5")
    diffusers().AudioLDM2Pipeline(
        vae=_vae(),
        text_encoder=_clap(),
        text_encoder_2=transformers.T5EncoderModel(tiny.t5(0.0).config),
        projection_model=diffusers().AudioLDM2ProjectionModel(
            text_encoder_dim=16, text_encoder_1_dim=64, langauge_model_dim=16
        ),
        language_model=transformers.GPT2LMHeadModel(language),
        tokenizer=_roberta(tokenizers / "roberta"),
        tokenizer_2=transformers.T5TokenizerFast.from_pretrained(tokenizers / "t5"),
        feature_extractor=transformers.ClapFeatureExtractor(feature_size=64, sampling_rate=16000),
        unet=unet,
        scheduler=_scheduler(),
        vocoder=_vocoder(),
    ).save_pretrained(folder)


def write_dance_diffusion(folder: Path) -> None:
    torch.manual_seed(3)
    unet = diffusers().UNet1DModel(
        block_out_channels=(32, 32, 64),
        extra_in_channels=64,
        sample_size=512,
        sample_rate=16000,
        in_channels=2,
        out_channels=2,
        flip_sin_to_cos=True,
        use_timestep_embedding=False,
        time_embedding_type="fourier",
        mid_block_type="UNetMidBlock1D",
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )
    diffusers().DanceDiffusionPipeline(unet=unet, scheduler=diffusers().IPNDMScheduler()).save_pretrained(folder)


def write_ltx2(folder: Path) -> None:
    """LTX-2: a video and its sound from one transformer, with Gemma 3 as the text encoder."""
    torch.manual_seed(4)
    tokenizers = folder.parent / f"{folder.name}-tokenizer"
    tiny.write_t5_tokenizer(tokenizers)
    text = {
        "vocab_size": 1280,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 512,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    gemma = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=1279, boi_token_index=1277
    )
    ltx2 = diffusers().pipelines.ltx2
    diffusers().LTX2Pipeline(
        scheduler=diffusers().FlowMatchEulerDiscreteScheduler(),
        vae=diffusers().AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            down_block_types=("LTX2VideoDownBlock3D",),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatial",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            patch_size=1,
            patch_size_t=1,
        ),
        audio_vae=diffusers().AutoencoderKLLTX2Audio(
            base_channels=4,
            output_channels=2,
            ch_mult=(1,),
            num_res_blocks=1,
            in_channels=2,
            resolution=32,
            latent_channels=2,
            norm_type="pixel",
            causality_axis="height",
            sample_rate=16000,
            mel_hop_length=160,
            mel_bins=8,
        ),
        text_encoder=transformers.Gemma3ForConditionalGeneration(gemma),
        tokenizer=transformers.T5TokenizerFast.from_pretrained(tokenizers),
        connectors=ltx2.LTX2TextConnectors(
            caption_channels=16,
            text_proj_in_factor=2,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=8,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=None,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=8,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=None,
            connector_rope_base_seq_len=32,
            rope_double_precision=False,
        ),
        transformer=diffusers().LTX2VideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=4,
            audio_cross_attention_dim=8,
            num_layers=2,
            caption_channels=16,
            rope_double_precision=False,
        ),
        vocoder=ltx2.LTX2Vocoder(
            in_channels=16,
            hidden_channels=32,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=16000,
        ),
    ).save_pretrained(folder)
