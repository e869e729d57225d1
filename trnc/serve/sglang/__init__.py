"""SGLang's native API: /generate."""
