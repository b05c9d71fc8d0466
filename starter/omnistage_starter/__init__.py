"""The starter: small models with real weights in one pipeline, for text, speech and images on a CPU."""
