"""Our own operators: each has a plain-torch reference and its CPU kernels."""
