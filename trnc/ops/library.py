"""The op namespace `trnc`: one declaration for each op, with its reference beside it.

An op has a schema, a fake implementation (shapes only, for tracing) and a plain-torch reference.
The reference runs wherever no native kernel is loaded; `trnc.ops.native` takes over the CPU key
when it loads the compiled library. References are dtype polymorphic: given fp64 activations they
compute in fp64, which is what makes the eager backend an oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_REFERENCE_KEY = "CompositeExplicitAutograd"
_LIBRARY = torch.library.Library("trnc", "DEF")


def declare(schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Declare the op `trnc::<schema>`; call once, when the module of the op is imported.

    `reference` and `fake` take the arguments of the schema in its order. `fake` sees tensors
    without data and returns tensors of the right shape and dtype.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, _REFERENCE_KEY)
    torch.library.register_fake(f"trnc::{name}", fake, lib=_LIBRARY)


class _ReferenceMode(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "trnc":
            key = torch._C.DispatchKey.CompositeExplicitAutograd
            return func._op_dk(key, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def reference_mode() -> TorchDispatchMode:
    """Return a context in which ops of this namespace run their references, native or not."""
    return _ReferenceMode()  # type: ignore[no-untyped-call]
