"""OpenAI's realtime protocol: a spoken or written conversation over a WebSocket."""
