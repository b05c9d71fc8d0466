"""What callers send, parsed into typed prompts: chat messages and requests to draw."""
