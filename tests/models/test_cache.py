"""What the cache holds of a layer, and which heads an int8 cache refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.compiler.test_trace import MODEL
from trnc.errors import ConfigError
from trnc.models.cache import cache_layout


def test_int8_pages_have_room_for_scales_and_need_heads_in_fours() -> None:
    layout = cache_layout(MODEL, "int8", 32)
    assert layout.pages["k_pages"].shape == ("pages", 2, 20, 32)
    assert layout.pages["v_pages"].shape == ("pages", 2, 32, 20)
    odd = replace(MODEL, head_dim=18)
    assert cache_layout(odd, "float16", 32).pages["k_pages"].shape == ("pages", 2, 18, 32)
    with pytest.raises(ConfigError, match=r"heads of a multiple of 4.* have 18.*float16"):
        cache_layout(odd, "int8", 32)
