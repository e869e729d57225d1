"""Presets: TOML files that name one static configuration, as frozen, validated dataclasses."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trnc.errors import ConfigError, nearest

KvDtype = Literal["float32", "float16", "bfloat16", "int8"]

# Every feature, as preset key and (with hyphens) as flag, and what it is for.
FEATURES: Mapping[str, str] = {
    "logprobs": "log-probabilities of the output",
    "logit_bias": "logit_bias",
    "structured_outputs": "JSON schemas, regexes, grammars, and tool_choice",
    "token_masks": "allowed_token_ids and bad_words",
    "min_tokens": "min_tokens",
    "thinking_budget": "thinking_token_budget",
    "penalties": "repetition, frequency and presence penalties",
    "prompt_logprobs": "log-probabilities of the prompt",
}


@dataclass(frozen=True, slots=True)
class TrainiumOptions:
    """The table `[trainium]` of a preset: what only that backend needs to know.

    `context_buckets` are the static context lengths, beside the longest one (see
    `trnc.compiler.matrix.context_buckets`). `ranks` is the number of logical cores that share the
    model, `lnc` how many physical ones each of them has. `matmul` is what products of bf16 weights
    are computed in (sums are f32 in both). The others are handed to `neuronx-cc`: its model type,
    its automatic casts, and the optimisation level of each kind of step.
    """

    context_buckets: tuple[int, ...] = ()
    ranks: int = 1
    lnc: int = 2
    matmul: Literal["float32", "bfloat16"] = "float32"
    model_type: str = "transformer"
    auto_cast: Literal["none", "matmult", "all"] = "none"
    prefill_opt_level: int = 1
    decode_opt_level: int = 2


@dataclass(frozen=True, slots=True)
class Preset:
    """One static configuration. Everything here shapes the variant matrix or its memory.

    `decode_rows` and `prefill_tokens` are the buckets, ascending; a step runs in the smallest one
    that holds it. `max_context` is the most tokens (prompt + output) of one sequence and
    `page_size` the tokens of one KV page, which is also what the prefix cache shares.
    `kv_memory_mib` is what the KV pages may take; 0 means "as much as max_rows full contexts
    need, but at most half of the memory that is free when the weights are loaded".

    `mtp_depths` are how many tokens a round of speculation may guess, ascending; none: the MTP
    layer is left out. The depth of a round is chosen as it goes, 0 (a plain decode) included; with
    `mtp_always` it is always the deepest.

    The keys of `FEATURES` are true or false. `penalty_buckets` are sizes, too: how many distinct
    tokens of a sequence are penalised; one for a full context is always there beside them.
    """

    name: str
    description: str
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    max_context: int
    page_size: int = 32
    kv_dtype: KvDtype = "float16"
    kv_memory_mib: int = 0
    mtp_depths: tuple[int, ...] = ()
    mtp_always: bool = False
    logprobs: bool = True
    logit_bias: bool = True
    structured_outputs: bool = False
    token_masks: bool = False
    min_tokens: bool = False
    thinking_budget: bool = False
    penalties: bool = False
    penalty_buckets: tuple[int, ...] = (64, 512)
    prompt_logprobs: bool = False
    trainium: TrainiumOptions = TrainiumOptions()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that are on."""
        return tuple(name for name in FEATURES if getattr(self, name))

    @property
    def masks(self) -> bool:
        """Whether variants with a token mask are needed: four features share them."""
        masked = ("structured_outputs", "token_masks", "min_tokens", "thinking_budget")
        return any(name in self.features for name in masked)

    @property
    def penalty_sizes(self) -> tuple[int, ...]:
        """The sizes of the penalties' inputs, ascending; the last holds any sequence."""
        if not self.penalties:
            return ()
        return (*(n for n in self.penalty_buckets if n < self.positions), self.positions)

    @property
    def max_rows(self) -> int:
        """The most sequences that run at once."""
        return self.decode_rows[-1]

    @property
    def max_prefill_tokens(self) -> int:
        """The most tokens of one prefill step."""
        return self.prefill_tokens[-1]

    @property
    def max_pages(self) -> int:
        """The width of a block table: the pages of one full context, and of drafts behind it."""
        return -(-self.positions // self.page_size)

    @property
    def positions(self) -> int:
        """How many positions a step can name: a draft may look beyond the end of a context."""
        return self.max_context + max(self.mtp_depths, default=0)


def preset_names() -> list[str]:
    """Return the names of the presets that ship with trnc, sorted."""
    root = resources.files("trnc") / "presets"
    return sorted(p.name.removesuffix(".toml") for p in root.iterdir() if p.name.endswith(".toml"))


def load_preset(name_or_path: str) -> Preset:
    """Load a shipped preset by name, or any preset by the path of its `.toml` file.

    Raises:
        ConfigError: no such preset, a bad TOML file, or a key or value that is not valid; the
            message names the key and the nearest valid one.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"--preset {name_or_path}: no such file")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--preset {name_or_path}: cannot be read: {error}") from None
        return parse_preset(text, name=path.stem)
    if name_or_path not in preset_names():
        known = ", ".join(preset_names())
        raise ConfigError(
            f"--preset {name_or_path}: no such preset.{nearest(name_or_path, preset_names())}"
            f" Shipped presets: {known}; or give the path of a .toml file."
        )
    resource = resources.files("trnc") / "presets" / f"{name_or_path}.toml"
    return parse_preset(resource.read_text(), name=name_or_path)


def parse_preset(text: str, *, name: str) -> Preset:
    """Parse and validate the text of a preset. Raises ConfigError naming the key."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"preset '{name}' is not valid TOML: {error}") from None
    known = {f.name for f in fields(Preset)} - {"name"}
    for key in table:
        if key not in known:
            raise ConfigError(f"preset '{name}': unknown key '{key}'.{nearest(key, known)}")
    options = table.pop("trainium", {})
    values = {key: _typed(name, key, value) for key, value in table.items()}
    values |= {"name": name, "trainium": _trainium(name, options)}
    missing = [f.name for f in fields(Preset) if f.default is MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"preset '{name}': missing key '{missing[0]}'")
    preset = Preset(**values)
    _validate(preset)
    return preset


def with_features(
    preset: Preset, features: Mapping[str, bool], penalty_buckets: Sequence[int] = ()
) -> Preset:
    """Return the preset with features switched on or off, as by the flags of a command.

    Raises:
        ConfigError: an unknown feature, or buckets that are not ascending.
    """
    for name in features:
        if name not in FEATURES:
            raise ConfigError(f"unknown feature '{name}'.{nearest(name, FEATURES)}")
    buckets = tuple(penalty_buckets) or preset.penalty_buckets
    values: dict[str, Any] = dict(features)
    changed = replace(preset, **values, penalty_buckets=buckets)
    _validate(changed)
    if penalty_buckets and not changed.penalties:
        raise ConfigError("--penalty-buckets needs --penalties")
    return changed


def _trainium(name: str, table: Any) -> TrainiumOptions:
    """Check the table `[trainium]`."""
    if not isinstance(table, dict):
        raise ConfigError(f"preset '{name}': 'trainium' must be a table, got {table!r}")
    known = [f.name for f in fields(TrainiumOptions)]
    for key in table:
        if key not in known:
            near = nearest(key, known)
            raise ConfigError(f"preset '{name}': unknown key 'trainium.{key}'.{near}")
    prefix = "trainium."
    values = {
        key: _typed(name, key, value, TrainiumOptions, prefix) for key, value in table.items()
    }
    return TrainiumOptions(**values)


def _typed(name: str, key: str, value: Any, of: type = Preset, prefix: str = "") -> Any:
    """Check one TOML value against the annotation of the field it sets."""
    wanted = get_type_hints(of)[key]
    key = prefix + key
    if wanted == tuple[int, ...]:
        if isinstance(value, list) and all(type(v) is int for v in value):
            return tuple(value)
        raise ConfigError(f"preset '{name}': '{key}' must be a list of integers, got {value!r}")
    if get_origin(wanted) is Literal:
        choices = get_args(wanted)
        if value in choices:
            return value
        raise ConfigError(
            f"preset '{name}': '{key}' must be one of {', '.join(choices)}, got {value!r}"
        )
    if type(value) is not wanted:
        raise ConfigError(f"preset '{name}': '{key}' must be {wanted.__name__}, got {value!r}")
    return value


def _validate(preset: Preset) -> None:
    def check(ok: bool, key: str, rule: str) -> None:
        if not ok:
            got = getattr(preset, key)
            raise ConfigError(f"preset '{preset.name}': '{key}' must be {rule}, got {got}")

    for key in ("decode_rows", "prefill_tokens", "mtp_depths", "penalty_buckets"):
        sizes = getattr(preset, key)
        may_be_empty = key in ("mtp_depths", "penalty_buckets")
        check(bool(sizes) or may_be_empty, key, "a list of integers, at least one")
        ascending = sizes == tuple(sorted(set(sizes))) and min(sizes, default=1) >= 1
        check(ascending, key, "ascending and positive")
    check(max(preset.mtp_depths, default=0) <= 8, "mtp_depths", "at most 8")
    check(
        not preset.mtp_always or bool(preset.mtp_depths), "mtp_always", "false without mtp_depths"
    )
    check(preset.max_rows <= 256, "decode_rows", "at most 256")
    check(preset.max_prefill_tokens <= 8192, "prefill_tokens", "at most 8192")
    check(preset.page_size in (16, 32, 64), "page_size", "16, 32 or 64")
    check(preset.max_context >= preset.page_size, "max_context", "at least one page")
    check(preset.kv_memory_mib >= 0, "kv_memory_mib", "0 (automatic) or more")
    _validate_trainium(preset)


def _validate_trainium(preset: Preset) -> None:
    options, page = preset.trainium, preset.page_size
    buckets = options.context_buckets
    rules = {
        "context_buckets": (
            buckets == tuple(sorted(set(buckets)))
            and all(b > 0 and b % page == 0 for b in buckets),
            f"ascending multiples of the page size, {page}",
        ),
        "ranks": (options.ranks >= 1, "1 or more"),
        "lnc": (options.lnc in (1, 2), "1 or 2"),
        "prefill_opt_level": (options.prefill_opt_level in (1, 2, 3), "1, 2 or 3"),
        "decode_opt_level": (options.decode_opt_level in (1, 2, 3), "1, 2 or 3"),
    }
    for key, (ok, rule) in rules.items():
        if not ok:
            got = getattr(options, key)
            raise ConfigError(f"preset '{preset.name}': 'trainium.{key}' must be {rule}, got {got}")
