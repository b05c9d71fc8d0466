"""The remote engine: a text stage whose language model is on a server that speaks OpenAI's API."""
