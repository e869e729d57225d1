"""The CPU counts as 8 devices here: jax counts them once in a process, when it first looks."""

from __future__ import annotations

from trnc.runtime.xla_client import prepare_host

prepare_host(8)
