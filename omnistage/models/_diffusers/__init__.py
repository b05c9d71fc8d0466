"""What the families of diffusers models share: loading parts, prompts, schedules, decoding."""
