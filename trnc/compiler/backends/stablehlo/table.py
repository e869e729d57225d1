"""Every op that this backend lowers: its name in the canonical text, and the function that does."""

from __future__ import annotations

from collections.abc import Mapping

from trnc.compiler.backends.stablehlo.aten import ATEN
from trnc.compiler.backends.stablehlo.attention import ATTENTION
from trnc.compiler.backends.stablehlo.linear import LINEAR
from trnc.compiler.backends.stablehlo.sampling import SAMPLING
from trnc.compiler.backends.stablehlo.site import Row

TABLE: Mapping[str, Row] = {**ATEN, **ATTENTION, **LINEAR, **SAMPLING}
