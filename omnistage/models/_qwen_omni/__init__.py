"""What the Qwen-Omni families share: chats to inputs, the edges between their stages, the chats of `verify`."""
