"""The resident server: an OpenAI-compatible API over one open model (extra `server`)."""
