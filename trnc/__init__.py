"""trnc: a compiler-style LLM inference engine."""

__version__ = "0.1.0"
