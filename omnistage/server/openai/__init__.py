"""The OpenAI-compatible endpoints, a module or folder each."""
