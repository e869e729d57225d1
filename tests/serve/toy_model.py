"""A tokenizer trained on a few sentences, and a small chat template."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from trnc.checkpoint.chat_template import ChatTemplate
from trnc.checkpoint.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Once upon a time there was a small house in the wood, with a red door.",
    "user assistant system question answer hello word",
]


@cache
def _backend_json() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return str(backend.to_str())


def toy_tokenizer(
    template: str | None = TEMPLATE, *, bos: bool = False, special: tuple[str, ...] = ()
) -> tuple[Tokenizer, ChatTemplate | None]:
    """Return a byte-level BPE tokenizer whose only end is `<|im_end|>`, and its template.

    With `bos` every text starts with `<|endoftext|>`; `special` are further special tokens.
    """
    backend = Backend.from_str(_backend_json())
    backend.add_special_tokens(list(special))
    if bos:
        start = ("<|endoftext|>", backend.token_to_id("<|endoftext|>"))
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[start]
        )
    tokenizer = Tokenizer(
        backend=backend,
        eos_token_ids=(backend.token_to_id("<|im_end|>"),),
        chat_template=template,
        special_tokens={"eos_token": "<|im_end|>"},
    )
    if template is None:
        return tokenizer, None
    return tokenizer, ChatTemplate(template, special_tokens=tokenizer.special_tokens)


def load_toy() -> Tokenizer:
    """Return the tokenizer, as what compiles grammars loads it."""
    return toy_tokenizer()[0]
