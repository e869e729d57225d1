"""OpenAI's chat, completions and models endpoints."""
