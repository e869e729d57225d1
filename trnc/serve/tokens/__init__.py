"""/tokenize and /detokenize, in the shapes of SGLang and of vLLM at once."""
