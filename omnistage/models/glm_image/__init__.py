"""GLM-Image: a language model writes a picture's tokens, a diffusion transformer draws them."""
