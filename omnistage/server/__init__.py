"""The service: OpenAI-compatible HTTP over `AsyncOmni`. Needs the extra `omnistage[server]`."""
