"""Tokenizers of folders and GGUF files against transformers, and streaming of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.checkpoint.files import write_gguf
from trnc.checkpoint.source import Source
from trnc.checkpoint.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from trnc.errors import CheckpointError, RequestError

CORPUS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs.\n\nIt's the THIRD time, we've said!",
    "  def f(x):\n        return x ** 2  # für größere Zahlen: naïve café 日本語 и русский 😀😃",
    "hello world hello there the the the and and of of to to",
] * 3
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "   leading and  double   spaces ",
    "<s>special</s> in <|im_start|>user\ntext<|im_end|>\n\n",
    "unseen: \x00 ﷽ \U0001d518\U0001d52b 🇩🇪 e\u0301\u200b\tTabs\r\n",
]
SPECIALS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("  ", normalized=False)]
    )
    return backend


def sentencepiece_backend() -> Backend:
    """A BPE with byte fallback, `▁` for spaces and a space at the start of a text."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    specials = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=specials + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    backend.train_from_iterator([t.replace("😀😃", "") for t in CORPUS], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in specials]
    state["pre_tokenizer"] = None
    return Backend.from_str(json.dumps(state))


def metaspace_backend() -> Backend:
    state = json.loads(sentencepiece_backend().to_str())
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return Backend.from_str(
        json.dumps({**state, "normalizer": None, "pre_tokenizer": space, "decoder": space})
    )


def strip_two_backend() -> Backend:
    """Two spaces are lost at the start, maybe of different tokens."""
    backend = sentencepiece_backend()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    return backend


def joined_backend() -> Backend:
    """No decoder: tokens are joined with spaces."""
    backend = byte_level_backend()
    state = json.loads(backend.to_str())
    return Backend.from_str(json.dumps({**state, "decoder": None}))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level_backend,
    "sentencepiece": sentencepiece_backend,
    "metaspace": metaspace_backend,
    "strip-two": strip_two_backend,
    "joined": joined_backend,
}
TOKENIZERS = {name: Tokenizer(backend=make()) for name, make in BACKENDS.items()}


# --- streaming ------------------------------------------------------------------------------------


@st.composite
def chunked_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of text, any ids, byte tokens, ids that do not exist; cut anywhere."""
    text = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))
    of_text = text.map(lambda t: tokenizer.encode(t, add_special_tokens=False))
    spaces = [i for t in ("▁", "▁▁", "Ġ", " ") if (i := tokenizer.token_to_id(t)) is not None]
    low_bytes = [i for b in range(256) if (i := tokenizer.token_to_id(f"<0x{b:02X}>")) is not None]
    anything = st.integers(0, tokenizer.vocab_size + 3)
    some = st.sampled_from([*spaces, *low_bytes] or [0])
    parts = draw(st.lists(st.one_of(of_text, st.lists(anything), st.lists(some)), max_size=5))
    ids = [i for part in parts for i in part]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_pushed_text_joins_to_the_decoded_text(name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=120, deadline=None)
    @given(chunked_ids(tokenizer))
    def check(chunks: list[list[int]]) -> None:
        stream = Detokenizer(tokenizer, skip_special_tokens=skip)
        ids = [i for chunk in chunks for i in chunk]
        pushed = [stream.push(chunk) for chunk in chunks]
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pushed) + stream.flush() == whole

    check()


@pytest.mark.parametrize(
    ("name", "texts"), [("sentencepiece", ["", " ", "h"]), ("strip-two", ["", "", "h"])]
)
def test_the_spaces_that_the_start_loses_may_be_tokens_of_their_own(
    name: str, texts: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]
    stream = Detokenizer(tokenizer)
    ids = [tokenizer.token_to_id(token) for token in ("▁", "▁", "h")]
    assert [stream.push([i]) for i in ids if i is not None] == texts


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "metaspace"])
def test_no_half_character_is_ever_pushed(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in TEXTS:
        stream = Detokenizer(tokenizer)
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            assert "\ufffd" not in stream.push([token_id])


def test_text_comes_as_soon_as_it_is_certain() -> None:
    for name in ("byte-level", "sentencepiece"):
        tokenizer = TOKENIZERS[name]
        stream = Detokenizer(tokenizer)
        ids = tokenizer.encode("hello the world", add_special_tokens=False)
        seen = ""
        for count, token_id in enumerate(ids, 1):
            seen += stream.push([token_id])
            assert seen == tokenizer.decode(ids[:count])


def test_token_bytes_join_to_the_text() -> None:
    for name in ("byte-level", "sentencepiece", "metaspace"):
        tokenizer = TOKENIZERS[name]
        # Without byte fallback the decoder shows a byte token as it is spelled.
        for text in ("größer and  so\n",) if name == "metaspace" else ("größer 😀", "日本語\n"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
            assert joined.removeprefix(" ") == text
        assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()])
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: Any) -> None:
    backend = byte_level_backend()
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="decoder"):
        Tokenizer(backend=backend)


def test_lone_surrogates_are_a_request_error() -> None:
    with pytest.raises(RequestError, match="surrogates"):
        TOKENIZERS["byte-level"].encode("\ud800", add_special_tokens=False)


# --- Hugging Face folders -------------------------------------------------------------------------


def write_folder(folder: Path, backend: Backend, **config: Any) -> Source:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    table = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({k: v for k, v in table.items() if v is not None}))
    return Source("folder", folder, "m")


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "metaspace"])
def test_encodes_and_decodes_as_transformers(name: str, bos: bool, tmp_path: Path) -> None:
    backend = BACKENDS[name]()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    # transformers reads these flags only where there is no tokenizer.json.
    source = write_folder(tmp_path, backend, add_bos_token=not bos, add_eos_token=True)
    ours = load_tokenizer(source)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.vocab_size, ours.bos_token_id) == (len(theirs), theirs.bos_token_id)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )


def test_the_ids_that_end_a_text(tmp_path: Path) -> None:
    source = write_folder(
        tmp_path, byte_level_backend(), chat_template="{{ '<|im_start|>' }}x{{ '<|im_end|>' }}"
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    tokenizer = load_tokenizer(source)
    turn_end = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.eos_token_ids == (7, 1, turn_end)
    assert tokenizer.special_tokens["eos_token"] == "</s>"


def test_where_the_chat_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    source = write_folder(tmp_path, byte_level_backend(), chat_template=named)
    assert load_tokenizer(source).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(source).chat_template == "J"
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(write_folder(tmp_path, byte_level_backend())).chat_template is None


def test_added_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    source = write_folder(tmp_path, byte_level_backend())
    path = tmp_path / "tokenizer_config.json"
    table = json.loads(path.read_text())
    new = load_tokenizer(source).vocab_size
    table["added_tokens_decoder"] = {str(new): {"content": "<new>", "special": True}}
    path.write_text(json.dumps(table))
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode("a<new>", add_special_tokens=False)[-1] == new
    assert new in tokenizer.special_ids
    table["added_tokens_decoder"] = {str(new + 5): {"content": "<new>", "special": True}}
    path.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="<new>"):
        load_tokenizer(source)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    source = Source("folder", tmp_path, "m")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(source)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"):
        load_tokenizer(source)


# --- GGUF -----------------------------------------------------------------------------------------


def gguf_metadata(backend: Backend, kind: str, **extra: Any) -> dict[str, Any]:
    """Return what llama.cpp's converter writes for a tokenizer."""
    state = json.loads(backend.to_str())
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    added = {t["id"]: 3 if t["special"] else 4 for t in state["added_tokens"]}
    kinds = [added.get(i, 6 if t.startswith("<0x") else 1) for i, t in enumerate(tokens)]
    merges = [" ".join(m) for m in state["model"]["merges"]]
    result = {"model": kind, "tokens": tokens, "token_type": kinds}
    if kind == "gpt2":
        result["merges"] = merges
    else:
        rank = {"".join(m.split(" ")): -float(i) for i, m in enumerate(merges)}
        result["scores"] = [rank.get(t, -1e4) for t in tokens]
        kinds[tokens.index("<unk>")] = 2
    result |= {f"{n}_token_id": tokens.index(t) for n, t in (("bos", "<s>"), ("eos", "</s>"))}
    result["unknown_token_id"] = tokens.index("<unk>")
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**result, **extra}.items()}
    return {k: v for k, v in metadata.items() if v is not None}


def gguf_source(folder: Path, metadata: dict[str, Any]) -> Source:
    return Source("gguf", write_gguf(folder / "m.gguf", metadata=metadata), "m")


def test_byte_level_gguf_equals_the_tokenizer_that_it_came_from(tmp_path: Path) -> None:
    backend = byte_level_backend()
    source = gguf_source(tmp_path, gguf_metadata(backend, "gpt2", pre="smollm"))
    ours = load_tokenizer(source, cache=tmp_path)
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert ours.encode(text, add_special_tokens=True) == ids
        assert ours.decode(ids, skip_special_tokens=False) == backend.decode(
            ids, skip_special_tokens=False
        )
        assert ours.decode(ids) == backend.decode(ids)
    ends = [ours.token_to_id(t) for t in ("</s>", "<|im_end|>")]
    assert list(ours.eos_token_ids) == ends
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_sentencepiece_gguf_equals_the_tokenizer_that_it_came_from(tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    source = gguf_source(tmp_path, gguf_metadata(backend, "llama"))
    ours = load_tokenizer(source, cache=tmp_path)
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text, add_special_tokens=True) == [backend.token_to_id("<s>"), *ids]
        assert ours.decode(ids) == backend.decode(ids)


def test_gguf_space_prefix_bos_and_eos_flags(tmp_path: Path) -> None:
    flags = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    source = gguf_source(tmp_path, gguf_metadata(sentencepiece_backend(), "llama", **flags))
    ours = load_tokenizer(source, cache=tmp_path)
    ids = ours.encode("hello", add_special_tokens=True)
    assert ids[-1] == ours.token_to_id("</s>")
    assert ours.decode(ids) == "hello"
    assert ours.decode(ours.encode(" hello", add_special_tokens=False)) == " hello"


PRES = {
    "gpt-2": ["I", "'ve", "Ġ", "Ġ12345", "ĠX", "!!", "Ċ"],
    "smollm": ["I", "'ve", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĠX", "!!", "Ċ"],
    "llama-bpe": ["I", "'ve", "Ġ", "Ġ", "123", "45", "ĠX", "!!Ċ"],
    "qwen2": ["I", "'ve", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĠX", "!!Ċ"],
    "tekken": ["I", "'ve", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĠX", "!!Ċ"],
}


@pytest.mark.parametrize(("pre", "pieces"), [("llama-bpe", ["ab"]), ("qwen2", ["a", "b"])])
def test_a_whole_token_beats_merges_where_its_models_say_so(
    pre: str, pieces: list[str], tmp_path: Path
) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd"]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": ["c d"]}
    metadata |= {"token_type": [1] * len(tokens), "add_bos_token": False}
    source = gguf_source(tmp_path, {f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    tokenizer = load_tokenizer(source, cache=tmp_path)
    ids = tokenizer.encode("ab", add_special_tokens=True)
    assert [tokenizer.id_to_token(i) for i in ids] == pieces
    composed = tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=True))
    assert composed == ("\u00e9" if pre == "qwen2" else "e\u0301")


@pytest.mark.parametrize("pre", PRES)
def test_each_pre_tokenizer_cuts_as_its_models_do(pre: str, tmp_path: Path) -> None:
    """The vocabulary holds every piece whole, so the pieces are what the regex cuts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = sorted(
        {p for cuts in PRES.values() for p in cuts if len(p) > 1}, key=lambda p: (-len(p), p)
    )
    merges, vocabulary = [], list(alphabet)
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocabulary:
                vocabulary.append(piece[:end])
                merges.append(f"{piece[: end - 1]} {piece[end - 1]}")
    metadata = {"model": "gpt2", "pre": pre, "tokens": vocabulary, "merges": merges}
    metadata |= {"token_type": [1] * len(vocabulary), "add_bos_token": False}
    source = gguf_source(tmp_path, {f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    tokenizer = load_tokenizer(source, cache=tmp_path)
    ids = tokenizer.encode("I've  12345 X!!\n", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == PRES[pre]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, r"tokenizer\.ggml\.model' is 't5'"),
        ({"pre": "smolm"}, "Did you mean 'smollm'"),
        ({"pre": None}, r"tokenizer\.ggml\.pre"),
        ({"merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
        ({"tokens": None}, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"token_type": [1]}, "token_type"),
        ({"merges": ["no such"]}, "damaged"),
        ({"add_bos_token": True, "bos_token_id": 99999}, "bos_token_id"),
    ],
)
def test_a_gguf_tokenizer_that_is_not_understood(
    changes: dict, message: str, tmp_path: Path
) -> None:
    metadata = gguf_metadata(byte_level_backend(), "gpt2", **{"pre": "smollm", **changes})
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(gguf_source(tmp_path, metadata), cache=tmp_path)


def test_a_derived_tokenizer_is_cached_and_a_broken_cache_is_rebuilt(tmp_path: Path) -> None:
    metadata = gguf_metadata(byte_level_backend(), "gpt2", pre="smollm")
    source = gguf_source(tmp_path, metadata)
    wanted = load_tokenizer(source, cache=tmp_path).encode(TEXTS[0], add_special_tokens=True)
    (kept,) = (tmp_path / "tokenizers").iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", whole[:500], whole.replace(b"true", b"false"), whole[:-1] + b"x"):
        kept.write_bytes(damaged)
        tokenizer = load_tokenizer(source, cache=tmp_path)
        assert tokenizer.encode(TEXTS[0], add_special_tokens=True) == wanted
        assert kept.read_bytes() == whole
    before = kept.stat().st_mtime_ns
    load_tokenizer(source, cache=tmp_path)
    assert kept.stat().st_mtime_ns == before, "a whole one is used, not written again"


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    source = gguf_source(tmp_path, gguf_metadata(byte_level_backend(), "gpt2", pre="smollm"))
    (tmp_path / "file").touch()
    assert load_tokenizer(source, cache=tmp_path / "file").vocab_size == 402
