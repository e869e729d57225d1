"""The Trainium backend: canonical stage graphs to StableHLO, through JAX.

Importing a module of this package imports jax, which is the extra `trnc[trainium]`: nothing outside
imports one before this backend is asked for.
"""

from __future__ import annotations

from importlib.util import find_spec

from trnc.errors import ConfigError


def require_jax(flag: str) -> None:
    """Raise ConfigError where jax is not installed; `flag` is what asked for it."""
    if find_spec("jax") is None:
        raise ConfigError(f"{flag} needs jax, which is not installed: pip install 'trnc[trainium]'")
