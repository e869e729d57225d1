"""Reading models: safetensors, GGUF, quantised layouts, tokenizers, chat templates."""
