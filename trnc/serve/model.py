"""What the API process knows of the model: its names, its words and its author's advice."""

from __future__ import annotations

from dataclasses import dataclass, field

from trnc.checkpoint.chat_template import ChatTemplate
from trnc.checkpoint.generation import GenerationDefaults, generation_defaults
from trnc.checkpoint.source import Source
from trnc.checkpoint.tokenizer import Tokenizer, load_tokenizer
from trnc.serve.markup import Markup, choose_markup


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is served. `names` are what clients may call it; the first is the default.

    `template` is None for a model that was not made for chats, `source` for one without files.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    source: Source | None = None
    markup: Markup = field(default_factory=Markup)


def load_model(
    source: Source,
    *,
    names: tuple[str, ...] = (),
    reasoning_parser: str = "auto",
    tool_call_parser: str = "auto",
) -> ServedModel:
    """Load what the API process needs of a model; `names` default to the source's own.

    Raises:
        CheckpointError: a file is missing, damaged or not supported.
        ConfigError: there is no such parser.
    """
    tokenizer = load_tokenizer(source)
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
    return ServedModel(
        names=names or (source.name,),
        tokenizer=tokenizer,
        template=template,
        defaults=generation_defaults(source),
        source=source,
        markup=choose_markup(
            tokenizer.chat_template, reasoning=reasoning_parser, tools=tool_call_parser
        ),
    )
