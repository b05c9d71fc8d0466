"""The diffusion engine: step-level continuous batching over diffusers' own modules and schedulers."""
