"""Plain lines on a terminal: text from elsewhere is never taken for markup, nor broken in pipes.

rich is imported with the first line: the engine of `trnc serve` is started before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Say = Callable[[str], None]


def say(console: Console, style: str | None = None) -> Say:
    """Return a function that prints one line just as it is; the terminal does the wrapping."""
    return partial(console.print, style=style, markup=False, highlight=False, soft_wrap=True)


def tell(line: str) -> None:
    """Print one line on stdout."""
    from rich.console import Console

    say(Console())(line)


def print_error(message: str) -> None:
    """Print `error: message` on stderr."""
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error:", "bold red"), " ", message)
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)
