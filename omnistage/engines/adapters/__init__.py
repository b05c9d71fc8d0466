"""LoRA adapters: read from their checkpoints, kept in host memory, added to a network's linear layers from outside."""
