"""OpenAI's realtime protocol: one conversation over one WebSocket, spoken or typed."""
