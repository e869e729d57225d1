"""Prompts of wide variety, composed of subjects, templates and styles, for a model to answer.

Each domain has lists of subjects and of templates (prompts.toml). A sixth of each is held out: a
held-out prompt has both a subject and a template that no prompt for training has, so what is
measured on them is not what was learnt by heart.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

Domain = Literal["chat", "prose", "lists", "code", "json"]
Split = Literal["train", "held_out"]

DOMAINS: tuple[Domain, ...] = ("chat", "prose", "lists", "code", "json")
_TURNS: tuple[Domain, ...] = (  # chat 8 of 20, and so on
    *("chat", "prose", "chat", "lists", "code", "chat", "json", "chat", "prose", "code"),
    *("chat", "lists", "chat", "prose", "json", "chat", "code", "prose", "chat", "lists"),
)
_HELD_OUT = 6  # one of so many subjects and templates


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `raw`: it is continued as it stands, without the chat template."""

    domain: Domain
    split: Split
    subject: str
    template: str
    text: str
    raw: bool

    @property
    def mixed(self) -> bool:
        """Whether its topic is one that the other split chats about: then it is not used."""
        topic = self.subject.rsplit(" about ", 1)[-1]
        return topic in _TOPICS and topic not in _share(_TOPICS, self.split)


def compose(split: Split, count: int, *, seed: int) -> list[Prompt]:
    """Return `count` distinct prompts, the same ones for the same arguments.

    A shorter list is the beginning of a longer one. Raises ValueError if there are not so many.
    """
    streams = {domain: _stream(domain, split, seed) for domain in DOMAINS}
    prompts: list[Prompt] = []
    for domain in cycle(_TURNS):
        if len(prompts) == count:
            return prompts
        prompt = next(streams[domain], None)
        if prompt is None:
            raise ValueError(f"{split} has no {count} distinct prompts of {domain}")
        prompts.append(prompt)
    raise AssertionError("a cycle does not end")


def parts(domain: Domain, split: Split) -> tuple[list[str], list[str]]:
    """Return the subjects and the templates of a domain that a split may use."""
    return _share(_SUBJECTS[domain], split), _share(_TEMPLATES[domain], split)


def _share(items: list[str], split: Split) -> list[str]:
    held_out = items[_HELD_OUT - 1 :: _HELD_OUT]
    return held_out if split == "held_out" else [item for item in items if item not in held_out]


def _stream(domain: Domain, split: Split, seed: int) -> Iterator[Prompt]:
    """Yield the pairs of subject and template in random order, each with a style."""
    subjects, templates = parts(domain, split)
    pick = random.Random(f"{domain} {split} {seed}")
    pairs = [(subject, template) for subject in subjects for template in templates]
    pick.shuffle(pairs)
    for subject, template in pairs:
        raw = template.startswith(RAW)
        text = template.removeprefix(RAW).format(subject, s=subject, S=_capital(subject))
        style = "" if raw else pick.choice(_STYLES[domain])
        yield Prompt(domain, split, subject, template, f"{text}{style}", raw)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


RAW = "raw: "  # marks a template whose text is continued without the chat template

_TABLE = tomllib.loads((Path(__file__).parent / "prompts.toml").read_text())
_TOPICS = _TABLE["subjects"]["chat"]
_SUBJECTS: dict[Domain, list[str]] = _TABLE["subjects"] | {
    "prose": _TABLE["subjects"]["prose"] + [f"a memory about {topic}" for topic in _TOPICS[::3]],
    "lists": _TABLE["subjects"]["lists"] + [f"facts about {topic}" for topic in _TOPICS[1::3]],
}
_TEMPLATES: dict[Domain, list[str]] = _TABLE["templates"]
_STYLES: dict[Domain, list[str]] = _TABLE["styles"]
