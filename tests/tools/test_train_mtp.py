"""tools/train_mtp.py on a tiny model: prompts, answers, states, training, and the file it gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import PRESET, VOCAB, tiny_model
from trnc.checkpoint.source import resolve
from trnc.core import SamplingParams
from trnc.engine.messages import Submit

TOOLS = Path(__file__).parents[2] / "tools"
LAYERS = 3


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """The tool and the modules of its package, importable for these tests."""
    sys.path.insert(0, str(TOOLS))
    import train_mtp
    from mtp import acceptance, block, block_file, generation, prompts, states, target, training

    sys.path.remove(str(TOOLS))
    yield SimpleNamespace(
        main=train_mtp,
        acceptance=acceptance,
        block=block,
        block_file=block_file,
        generation=generation,
        prompts=prompts,
        states=states,
        target=target,
        training=training,
    )
    for name in [name for name in sys.modules if name.split(".")[0] in ("mtp", "train_mtp")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama-tied").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(tool: Any, model: str) -> Any:
    return tool.target.load_target(resolve(model))


@pytest.fixture(scope="module")
def executor(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from trnc.runtime.start import StartOptions, require_cache, start_executor

    options = StartOptions(model, PRESET, "eager", tmp_path_factory.mktemp("store"))
    executor, _, _ = start_executor(options, require_cache, lambda line: None)
    yield executor
    executor.close()


class Letters:
    """A tokenizer of letters, with no chat template."""

    chat_template = None
    eos_token_ids = (7,)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [20 + ord(letter) % 128 for letter in text][:40]


@pytest.fixture(scope="module")
def folder(tool: Any, executor: Any, target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 24 answers to train on and 12 to measure on, and their states."""
    path = tmp_path_factory.mktemp("training")
    for split, count in (("train", 24), ("held_out", 12)):
        chosen = tool.prompts.compose(split, count, seed=0)
        answers = path / f"{split}-0.jsonl"
        list(generate(tool, executor, chosen, range(count), answers))
        list(tool.states.write_states(target, answers, bf16=False, batch_tokens=200))
    return path


def generate(tool: Any, executor: Any, chosen: Any, indexes: range, path: Path) -> Iterator[Any]:
    yield from tool.generation.generate(
        executor, Letters(), chosen, indexes, path, seed=0, max_tokens=20
    )


# --- prompts --------------------------------------------------------------------------------------


def test_held_out_subjects_and_templates_are_never_in_training(tool: Any) -> None:
    train = tool.prompts.compose("train", 5000, seed=0)
    held_out = tool.prompts.compose("held_out", 200, seed=0)
    assert len({prompt.text for prompt in train}) > 4500
    for domain in tool.prompts.DOMAINS:
        one, other = ([p for p in part if p.domain == domain] for part in (train, held_out))
        assert one
        assert other
        assert not {p.subject for p in one} & {p.subject for p in other}
        assert not {p.template for p in one} & {p.template for p in other}
    seen = " ".join(prompt.text for prompt in train if prompt.domain in ("prose", "lists"))
    used = [prompt for prompt in held_out if not prompt.mixed]
    assert len(used) > 150
    assert not any(f"about {p.subject}" in seen for p in used if p.domain == "chat")


def test_prompts_are_those_of_their_seed(tool: Any) -> None:
    compose = tool.prompts.compose
    assert compose("train", 50, seed=3) == compose("train", 400, seed=3)[:50]
    assert compose("train", 50, seed=3) != compose("train", 50, seed=4)
    with pytest.raises(ValueError, match="held_out has no 5000 distinct prompts"):
        compose("held_out", 5000, seed=0)


# --- answers and states ---------------------------------------------------------------------------


def test_answers_are_those_of_the_engine(tool: Any, folder: Path, executor: Any) -> None:
    from trnc.engine.offline import run_requests

    answers = tool.generation.read_lines(folder / "train-0.jsonl")
    assert sorted(answer.index for answer in answers) == list(range(24))
    assert {answer.temperature > 0 for answer in answers} == {True, False}
    for answer in answers[:6]:
        sampling = tool.generation.sampling(answer.index, "train", 0)
        assert sampling.temperature == answer.temperature
        request = Submit("r", tuple(answer.prompt_ids), sampling, 20, (7,))
        alone = [t for delta in run_requests(executor, [request]) for t in delta.token_ids]
        assert alone == answer.output_ids
    held_out = tool.generation.read_lines(folder / "held_out-0.jsonl")
    assert {answer.temperature for answer in held_out} == {0.0}
    assert tool.generation.sampling(3, "held_out", 0) == SamplingParams()


def test_generation_goes_on_where_it_was_cut_off(
    tool: Any, folder: Path, executor: Any, target: Any, tmp_path: Path
) -> None:
    whole, path = folder / "train-0.jsonl", tmp_path / "train-0.jsonl"
    lines = whole.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:9]) + lines[9][:30])
    list(tool.states.write_states(target, path, bf16=False, batch_tokens=200))
    states = tool.states.states_path(path)
    states.write_bytes(states.read_bytes()[:-100])  # in the middle of an answer
    chosen = tool.prompts.compose("train", 24, seed=0)
    added = list(generate(tool, executor, chosen, range(24), path))
    assert len(added) == 15
    assert sorted(path.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    list(tool.states.write_states(target, path, bf16=False, batch_tokens=200))
    hidden = target.config.hidden_size
    pairs = zip(
        tool.states.load_examples(path, hidden),
        tool.states.load_examples(whole, hidden),
        strict=True,
    )
    for got, wanted in pairs:
        assert got.answer == wanted.answer
        torch.testing.assert_close(got.states, wanted.states, atol=2e-3, rtol=0)


def test_states_are_those_of_transformers(tool: Any, folder: Path) -> None:
    reference = tiny_model("llama-tied")
    for example in tool.states.load_examples(folder / "train-0.jsonl", 64)[:4]:
        with torch.no_grad():
            wanted = reference.model(example.tokens[None]).last_hidden_state[0]
        torch.testing.assert_close(example.states.float(), wanted, atol=4e-3, rtol=0)


# --- training -------------------------------------------------------------------------------------


def trainer(tool: Any, target: Any, **changes: Any) -> Any:
    plan = tool.training.Plan(**{"steps": 12, "batch_tokens": 256, "bf16": False, **changes})
    block = tool.block.MtpBlock(target.config, tool.block.initial_weights(target))
    return tool.training.Trainer(block=block, embed=target.embed, head=target.head, plan=plan)


def run(tool: Any, trainer: Any, examples: list[Any], until: int) -> list[float]:
    stream = tool.training.skip(
        tool.training.batches(examples, trainer.plan), trainer.progress.step
    )
    losses = []
    while trainer.progress.step < until:
        losses.append(trainer.step(tool.training.Batch.of(next(stream))).mean.item())
    return losses


def test_the_loss_goes_down(tool: Any, target: Any, folder: Path) -> None:
    examples = tool.main.load_split(folder, "train", target, 0)
    mine = trainer(tool, target, steps=40, rate=4e-3)
    before, _ = mine.validate(examples)
    run(tool, mine, examples, 40)
    after, agreed = mine.validate(examples)
    assert after < 0.9 * before
    assert len(agreed) == 3


def test_a_resumed_run_gives_the_same_block(
    tool: Any, target: Any, folder: Path, tmp_path: Path
) -> None:
    examples = tool.main.load_split(folder, "train", target, 0)
    whole, first = trainer(tool, target), trainer(tool, target)
    run(tool, whole, examples, 12)
    run(tool, first, examples, 5)
    first.save(tmp_path / "checkpoint.pt", "data")
    second = trainer(tool, target)
    second.load(tmp_path / "checkpoint.pt", "data")
    run(tool, second, examples, 12)
    for name, weight in whole.block.state_dict().items():
        assert torch.equal(second.block.state_dict()[name], weight), name
    with pytest.raises(SystemExit, match="is of another run"):
        trainer(tool, target).load(tmp_path / "checkpoint.pt", "other data")
    with pytest.raises(SystemExit, match="is of another run"):
        trainer(tool, target, rate=1.0).load(tmp_path / "checkpoint.pt", "data")


def test_the_gradient_is_that_of_autograd(tool: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    drafts, targets, head = (torch.randn(n, 16, generator=generator) for n in (300, 300, 50))
    drafts.requires_grad_()
    loss, hits = tool.training._SoftLoss.apply(drafts, targets, head)
    (got,) = torch.autograd.grad(loss, drafts)
    wanted = (targets @ head.T).softmax(-1)
    given = (drafts @ head.T).log_softmax(-1)
    plain = -(wanted * given).sum()
    (gradient,) = torch.autograd.grad(plain, drafts)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, gradient)
    _, hits = tool.training._SoftLoss.apply(drafts.detach(), targets, head)
    assert int(hits) == int((wanted.argmax(-1) == given.argmax(-1)).sum())


def test_a_batch_counts_the_answers_alone(tool: Any, target: Any, folder: Path) -> None:
    examples = tool.main.load_split(folder, "train", target, 0)[:5]
    batch = tool.training.Batch.of(examples)
    for row, example in enumerate(examples):
        foretold = batch.counts[row].nonzero().flatten() + 2
        start, end = example.prompt + 1, len(example.tokens)
        assert foretold.tolist() == list(range(start, end))
        assert torch.equal(batch.tokens[row, foretold - 2], example.tokens[foretold - 1])
        assert torch.equal(batch.following[row, foretold - 2].half(), example.states[foretold - 1])
        later = batch.counted(2)[row].nonzero().flatten() + 2
        assert later.tolist() == list(range(start + 2, end))


# --- what the block does --------------------------------------------------------------------------


def test_unrolled_rounds_are_the_drafts_of_the_engine(
    tool: Any, target: Any, model: str, tmp_path: Path
) -> None:
    """Round r of the training is what the engine's stages give on the r-th token of a draft."""
    from tests.models.test_mtp import Drafter
    from trnc.runtime.start import open_model

    weights = tool.block.initial_weights(target)
    generator = torch.Generator().manual_seed(4)
    noise = {n: torch.randn(w.shape, generator=generator) * 0.1 for n, w in weights.items()}
    weights = {name: weight + noise[name] for name, weight in weights.items()}
    path = tmp_path / "block.safetensors"
    tool.block_file.write_block(path, weights, None, layer=LAYERS, metadata={})
    rounded, _ = tool.block_file.read_block(path, layer=LAYERS)
    block = tool.block.MtpBlock(target.config, rounded)
    tokens = torch.randint(0, VOCAB, (24,), generator=generator)
    drafter = Drafter(open_model(model, report=lambda line: None, mtp=str(path)))
    states = drafter.states(tokens.tolist(), 0)
    with torch.inference_mode():
        rounds = tool.block.unroll(block, target.embed[tokens[None, 1:]], states[None, :-1], 4)
    for begin in (0, 7, 15):
        drafted, previous = 0, states[: begin + 1]
        for round, wanted in enumerate(rounds):
            chunk = tokens[drafted + 1 : begin + round + 2].tolist()
            previous, _ = drafter.draft(chunk, previous, drafted)
            drafted += len(chunk)
            torch.testing.assert_close(previous[0], wanted[0, begin + round], atol=1e-4, rtol=0)


def test_acceptance_counts_drafts_up_to_the_first_wrong_one(tool: Any) -> None:
    right = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    found = tool.acceptance.measure([right])
    assert found.rows == 5
    assert found.positions == (3 / 5, 2 / 3, 1 / 2)
    # depth 1: rows 0 (+1), 2 (+1), 4; depth 2 and 3: rows 0 (+2), 3 (+2 or 3)
    assert found.lengths == (5 / 3, 6 / 2, 7 / 2)


def test_a_perfect_and_a_wrong_draft_are_told_apart(tool: Any, target: Any, folder: Path) -> None:
    example = tool.main.load_split(folder, "held_out", target, 0)[0]
    block = tool.block.MtpBlock(target.config, tool.block.initial_weights(target))
    truth = example.tokens[example.prompt + 1 :]

    def rights(head: Tensor, ids: Tensor | None) -> Tensor:
        return tool.acceptance.right_drafts(block, target.embed, head, ids, example, 2)

    for token in truth.unique():  # a head that knows one token drafts it everywhere
        right = rights(target.head[token][None], token[None])
        assert right[:, 0].tolist() == (truth == token).tolist()
        assert right[:-1, 1].tolist() == (truth[1:] == token).tolist()
    assert not rights(target.head, None)[-1, 1]  # there is no token after the last


def test_int8_is_close_and_keeps_the_largest(tool: Any) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    rounded = tool.block_file.quantize(weight).dequantize()
    groups = weight.unflatten(1, (-1, 32)).abs().amax(2)
    error = (rounded - weight).abs().unflatten(1, (-1, 32)).amax(2)
    assert (error <= groups / 127 * 0.57).all()  # half a step, and the scale's own rounding
    assert (rounded[3] == 0).all()


def test_the_command_line_trains_evaluates_and_exports(
    tool: Any, folder: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    from trnc.checkpoint.mtp_file import read_mtp_file
    from trnc.runtime.start import open_model

    common = ["--folder", str(folder), "--model", model]
    out = tmp_path / "tiny.mtp.safetensors"
    for command in (
        [
            "train",
            *common,
            *["--batch-tokens", "256", "--epochs", "2", "--every", "3", "--no-bf16"],
        ],
        ["evaluate", *common],
        ["export", str(out), *common],
        ["evaluate", *common, "--block", str(out)],
    ):
        result = CliRunner().invoke(tool.main.app, command)
        assert result.exit_code == 0, result.output
        if command[0] != "train":
            assert "| domain | places | draft 1 |" in result.output
            assert "| all |" in result.output
    header = read_mtp_file(out)
    assert header.draft_vocab == VOCAB
    assert header.metadata["trained_on"].startswith("24 answers, ")
    assert set(json.loads(header.metadata["held_out_acceptance"])) >= {"chat", "all"}
    opened = open_model(model, report=lambda line: None, mtp=str(out))
    assert opened.config.mtp_vocab == VOCAB


def test_a_model_that_cannot_be_trained_for_is_refused(tool: Any, tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="norms of q and k"):
        tool.target.load_target(replace(resolve(str(tmp_path)), mtp=None))
