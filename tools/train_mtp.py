"""Trains the MTP block of a model on text that the model itself writes; needs no GPU.

    python tools/train_mtp.py generate && python tools/train_mtp.py states
    python tools/train_mtp.py train && python tools/train_mtp.py evaluate
    python tools/train_mtp.py export

Every step keeps its results in --folder and goes on where it was interrupted; the same seed gives
the same block. docs/MTP.md has what came of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from mtp import generation, prompts
from mtp.acceptance import Acceptance, measure, right_drafts
from mtp.block import MtpBlock, initial_weights
from mtp.block_file import read_block, write_block
from mtp.states import Example, load_examples, write_states
from mtp.target import Target, load_target
from mtp.training import Batch, Plan, Trainer, batches, skip
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file, save_file
from torch import Tensor

from trnc.checkpoint.mtp_file import TARGET, read_mtp_file
from trnc.checkpoint.source import DEFAULT_MODEL, resolve
from trnc.checkpoint.tokenizer import load_tokenizer

app = typer.Typer(no_args_is_help=True, add_completion=False)

Folder = Annotated[Path, typer.Option(help="Where everything is kept.")]
ModelName = Annotated[str, typer.Option("--model", "-m", help="As `trnc serve` takes it.")]
Seed = Annotated[int, typer.Option(help="Of the prompts, their sampling and the training.")]
BlockFile = Annotated[Path | None, typer.Option(help="Default: the best one of the training.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Default: what torch takes.")]
DEFAULT_FOLDER = Path("mtp-training")
CHECKPOINT = "checkpoint.pt"
BEST = "best.safetensors"
TRAINED_ON = "trained_on"  # metadata of a block
DRAFT_IDS = "draft-ids.safetensors"

console = Console(stderr=True)


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


@app.callback()
def _steps() -> None:
    """Make subcommands of the steps, even of a single one."""


@app.command()
def generate(
    folder: Folder = DEFAULT_FOLDER,
    model: ModelName = DEFAULT_MODEL,
    preset: Annotated[str, typer.Option("--preset", "-p")] = "batch16",
    count: Annotated[int, typer.Option(help="How many prompts to train on.")] = 5000,
    first: Annotated[int, typer.Option(help="Where to begin, for a second process.")] = 0,
    held_out: Annotated[int, typer.Option(help="How many prompts to measure on.")] = 200,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 256,
    seed: Seed = 0,
) -> None:
    """Let the model answer the prompts."""
    tokenizer = load_tokenizer(resolve(model))
    executor = generation.open_engine(model, preset)
    splits: list[tuple[prompts.Split, range]] = [("train", range(first, count))]
    if first == 0:
        splits.insert(0, ("held_out", range(held_out)))
    with progress() as bar:
        for split, indexes in splits:
            task = bar.add_task(split, total=len(indexes))
            chosen = prompts.compose(split, indexes.stop, seed=seed)
            path = folder / f"{split}-{indexes.start}.jsonl"
            tokens = sum(len(answer.output_ids) for answer in generation.read_lines(path))
            bar.update(task, completed=len(generation.read_lines(path)))
            for answer in generation.generate(
                executor, tokenizer, chosen, indexes, path, seed=seed, max_tokens=max_tokens
            ):
                tokens += len(answer.output_ids)
                bar.update(task, advance=1, description=f"{split}: {tokens:,} tokens")
    executor.close()


@app.command()
def states(
    folder: Folder = DEFAULT_FOLDER,
    model: ModelName = DEFAULT_MODEL,
    batch_tokens: Annotated[int, typer.Option(help="Of one pass through the model.")] = 4096,
    only: Annotated[str, typer.Option(help="Of these files alone, for a second process.")] = "*",
    threads: Threads = None,
) -> None:
    """Compute the model's states of all answers: bf16 for training, f32 for measuring."""
    set_threads(threads)
    target = open_target(model)
    with progress() as bar:
        for path in sorted(folder.glob(f"{only}.jsonl"), reverse=True):
            bf16 = not path.name.startswith("held_out")
            task = bar.add_task(path.name, total=len(generation.read_lines(path)))
            bar.update(task, completed=len(load_examples(path, target.config.hidden_size)))
            for count in write_states(target, path, bf16=bf16, batch_tokens=batch_tokens):
                bar.update(task, advance=count)


@app.command()
def train(
    folder: Folder = DEFAULT_FOLDER,
    model: ModelName = DEFAULT_MODEL,
    epochs: Annotated[float, typer.Option(help="How often every answer is seen.")] = 3.0,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    rounds: Annotated[int, typer.Option(help="How many drafts are trained for.")] = 3,
    batch_tokens: Annotated[int, typer.Option(help="Of one step.")] = 4096,
    draft_vocab: Annotated[int, typer.Option(help="How many tokens can be drafted.")] = 8192,
    every: Annotated[int, typer.Option(help="Measure and save after so many steps.")] = 50,
    patience: Annotated[int, typer.Option(help="How many measurements may be no better.")] = 5,
    start: Annotated[Path | None, typer.Option(help="Begin with the block of this file.")] = None,
    bf16: bool = True,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Train the block, and keep the best one by the held-out loss of one prompt in four."""
    set_threads(threads)
    target = open_target(model)
    examples = load_split(folder, "train", target, seed)
    chosen_by = load_split(folder, "held_out", target, seed)[::4]
    ids = choose_draft_ids(examples, draft_vocab, target.config.vocab_size)
    save_file({"ids": ids}, folder / DRAFT_IDS)
    tokens = sum(len(example.tokens) for example in examples)
    steps = max(1, round(epochs * tokens / batch_tokens))
    plan = Plan(steps, batch_tokens, rounds, rate, bf16=bf16, seed=seed)
    weights = initial_weights(target)
    if start is not None:
        weights, _ = read_block(start, layer=target.config.num_layers)
    trainer = Trainer(
        block=MtpBlock(target.config, weights),
        embed=target.embed,
        head=target.head[ids],
        plan=plan,
    )
    data = f"{len(examples)} answers, {tokens} tokens, {len(ids)} drafted, start {start}"
    if (folder / CHECKPOINT).exists():
        trainer.load(folder / CHECKPOINT, data)
    console.print(f"{data}, {steps} steps")
    _train(trainer, examples, chosen_by, folder, data, every=every, patience=patience)


def _train(
    trainer: Trainer,
    examples: list[Example],
    chosen_by: list[Example],
    folder: Path,
    data: str,
    *,
    every: int,
    patience: int,
) -> None:
    done, steps = trainer.progress, trainer.plan.steps
    stream = skip(batches(examples, trainer.plan), done.step)
    with progress() as bar:
        task = bar.add_task("train", total=steps, completed=done.step)
        while done.step < steps and done.step - done.best_step <= every * patience:
            loss = trainer.step(Batch.of(next(stream)))
            bar.update(task, completed=done.step, description=f"loss {loss.mean:.3f}")
            if done.step % every == 0 or done.step == steps:
                held_out, agreed = trainer.validate(chosen_by)
                if held_out < done.best:
                    done.best, done.best_step = held_out, done.step
                    about = {TRAINED_ON: data, "steps": str(done.step)}
                    save_file(trainer.block.state_dict(), folder / BEST, metadata=about)
                trainer.save(folder / CHECKPOINT, data)
                console.print(
                    f"step {done.step}: loss {loss.mean:.3f}, held out {held_out:.3f}, agreement"
                    f" {', '.join(f'{part:.1%}' for part in agreed)}"
                )


@app.command()
def evaluate(
    folder: Folder = DEFAULT_FOLDER,
    model: ModelName = DEFAULT_MODEL,
    block: BlockFile = None,
    full_head: Annotated[bool, typer.Option(help="Draft all tokens, not only some.")] = False,
    depth: Annotated[int, typer.Option(help="How many drafts are made.")] = 4,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Print the acceptance on held-out prompts, without those that the best block was chosen by."""
    set_threads(threads)
    target = open_target(model)
    held_out = [e for i, e in enumerate(load_split(folder, "held_out", target, seed)) if i % 4]
    weights, ids = read_block(block or folder / BEST, layer=target.config.num_layers)
    trained = MtpBlock(target.config, weights)
    if ids is None and not full_head:
        ids = load_file(folder / DRAFT_IDS)["ids"]
    print(table(acceptance_by_domain(trained, target, None if full_head else ids, held_out, depth)))
    if ids is not None:
        outputs = torch.cat([torch.tensor(e.answer.output_ids) for e in held_out])
        covered = float(torch.isin(outputs, ids).float().mean())
        console.print(f"{len(ids)} tokens can be drafted: {covered:.2%} of the held-out answers")


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="The file to write, such as NAME.mtp.safetensors.")],
    folder: Folder = DEFAULT_FOLDER,
    model: ModelName = DEFAULT_MODEL,
    block: BlockFile = None,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Write the block in int8, as the engine takes it, with its acceptance on held-out prompts."""
    set_threads(threads)
    source, target = resolve(model), open_target(model)
    layer = target.config.num_layers
    weights, _ = read_block(block or folder / BEST, layer=layer)
    ids = load_file(folder / DRAFT_IDS)["ids"]
    held_out = [e for i, e in enumerate(load_split(folder, "held_out", target, seed)) if i % 4]
    scratch = out.with_suffix(".tmp")
    write_block(scratch, weights, ids, layer=layer, metadata={})
    rounded, _ = read_block(scratch, layer=layer)
    scratch.unlink()
    found = acceptance_by_domain(MtpBlock(target.config, rounded), target, ids, held_out, 4)
    metadata = {
        "made_by": "tools/train_mtp.py, on answers that the model itself gave",
        "license": "Apache-2.0",
        "target": source.name,
        "seed": str(seed),
        **read_mtp_file(block or folder / BEST).metadata,
        "held_out_acceptance": json.dumps(
            {n: [round(p, 4) for p in a.positions] for n, a in found.items()}
        ),
    }
    if source.kind == "gguf":
        with source.path.open("rb") as file:
            metadata[TARGET] = hashlib.file_digest(file, "sha256").hexdigest()
    write_block(out, weights, ids, layer=layer, metadata=metadata)
    print(table(found))
    console.print(f"{out}: {out.stat().st_size / 2**20:.2f} MiB")


def acceptance_by_domain(
    block: MtpBlock, target: Target, ids: Tensor | None, examples: list[Example], depth: int
) -> dict[str, Acceptance]:
    """Return what the drafts of a block give, by domain and for all; `ids` None: it drafts any."""
    head = target.head if ids is None else target.head[ids]
    rights: dict[str, list[Tensor]] = {}
    for example in examples:
        right = right_drafts(block, target.embed, head, ids, example, depth)
        rights.setdefault(example.answer.domain, []).append(right)
    parts = {name: rights[name] for name in prompts.DOMAINS if name in rights}
    parts["all"] = [right for part in parts.values() for right in part]
    return {name: measure(part) for name, part in parts.items()}


def table(found: dict[str, Acceptance]) -> str:
    """Return acceptance as Markdown."""
    drafts = range(1, len(found["all"].positions) + 1)
    header = [f"draft {d}" for d in drafts] + [f"tokens at depth {d}" for d in drafts]
    lines = [f"| domain | places | {' | '.join(header)} |", "|---" * (2 + len(header)) + "|"]
    for name, part in found.items():
        cells = [f"{p:.1%}" for p in part.positions] + [f"{n:.2f}" for n in part.lengths]
        lines.append(f"| {name} | {part.rows:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def open_target(model: str) -> Target:
    """Read a model; a block that it comes with is of no interest here."""
    return load_target(replace(resolve(model), mtp=None))


def load_split(folder: Path, split: prompts.Split, target: Target, seed: int) -> list[Example]:
    """Return the answers of a split that have states, in the order of their prompts."""
    hidden = target.config.hidden_size
    paths = sorted(folder.glob(f"{split}-*.jsonl"))
    examples = [example for path in paths for example in load_examples(path, hidden)]
    if not examples:
        raise SystemExit(f"{folder} has no states of {split} answers: run `generate` and `states`")
    asked = prompts.compose(split, 1 + max(e.answer.index for e in examples), seed=seed)
    used = [e for e in examples if len(e.answer.output_ids) > 1 and not asked[e.answer.index].mixed]
    return sorted(used, key=lambda e: e.answer.index)


def choose_draft_ids(examples: list[Example], count: int, vocab: int) -> Tensor:
    """Return the tokens that answers have most often, ascending.

    Those that none has come last, by their id: a tokenizer numbers common ones first.
    """
    seen = torch.zeros(vocab, dtype=torch.int64)
    for example in examples:
        seen += torch.bincount(torch.tensor(example.answer.output_ids), minlength=vocab)
    order = torch.argsort(seen, descending=True, stable=True)
    return order[:count].sort().values


def set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    app()
