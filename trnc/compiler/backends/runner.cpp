// The linked program runner: executes a program (stage calls, then state updates) as one call that
// holds no lock of Python.
//
// All tensors live in one table. Slots of weights and state are bound once; the inputs of a step
// are set by the call; the slots of values are filled by the stages and emptied after their last
// use, so that the allocator can hand the same memory to the next stage.
//
// A runner is used by one thread at a time.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace {

using torch::inductor::AOTIModelContainerRunnerCpu;

struct Instruction {
  int64_t target;  // index of a stage, or of an update op
  bool is_update;
  std::vector<int64_t> inputs;
  std::vector<int64_t> outputs;
  std::vector<int64_t> dead;  // value slots that nothing reads after this instruction
};

struct Program {
  std::vector<Instruction> instructions;
  std::vector<int64_t> inputs;
  std::vector<int64_t> outputs;
};

struct Runner : torch::CustomClassHolder {
  std::vector<std::unique_ptr<AOTIModelContainerRunnerCpu>> stages;
  std::vector<c10::OperatorHandle> updates;
  std::vector<Program> programs;
  std::vector<at::Tensor> table;

  explicit Runner(int64_t slots) : table(slots) {}

  // Load a compiled stage (a shared library, its custom-op list beside it). Returns its index.
  int64_t load_stage(const std::string& path) {
    stages.push_back(std::make_unique<AOTIModelContainerRunnerCpu>(path, 1, true));
    return static_cast<int64_t>(stages.size()) - 1;
  }

  // Find an operator that takes only tensors and writes to the first ones. Returns its index.
  int64_t load_update(const std::string& name) {
    updates.push_back(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""));
    return static_cast<int64_t>(updates.size()) - 1;
  }

  void bind(int64_t slot, const at::Tensor& tensor) { table.at(slot) = tensor; }

  // `code` is a flat list of instructions: target, is_update, then three counted lists of slots.
  int64_t add_program(const std::vector<int64_t>& code, std::vector<int64_t> inputs,
                      std::vector<int64_t> outputs) {
    Program program{{}, std::move(inputs), std::move(outputs)};
    size_t at = 0;
    auto list = [&] {
      std::vector<int64_t> slots(code.at(at++));
      for (auto& slot : slots) {
        slot = code.at(at++);
        TORCH_CHECK(slot >= 0 && slot < static_cast<int64_t>(table.size()), "slot out of range");
      }
      return slots;
    };
    while (at < code.size()) {
      Instruction next;
      next.target = code.at(at++);
      next.is_update = code.at(at++) != 0;
      next.inputs = list();
      next.outputs = list();
      next.dead = list();
      program.instructions.push_back(std::move(next));
    }
    programs.push_back(std::move(program));
    return static_cast<int64_t>(programs.size()) - 1;
  }

  std::vector<at::Tensor> run(int64_t index, const std::vector<at::Tensor>& inputs) {
    const Program& program = programs.at(index);
    TORCH_CHECK(inputs.size() == program.inputs.size(), "program takes ", program.inputs.size(),
                " inputs, got ", inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) table[program.inputs[i]] = inputs[i];
    const at::AutoDispatchBelowADInplaceOrView no_gradients;  // or each write asks for them
    for (const Instruction& next : program.instructions) {
      execute(next);
      for (int64_t slot : next.dead) table[slot].reset();
    }
    std::vector<at::Tensor> outputs;
    outputs.reserve(program.outputs.size());
    for (int64_t slot : program.outputs) outputs.push_back(std::move(table[slot]));
    return outputs;
  }

  void execute(const Instruction& next) {
    if (next.is_update) {
      torch::jit::Stack stack;
      stack.reserve(next.inputs.size());
      for (int64_t slot : next.inputs) stack.emplace_back(table[slot]);
      updates[next.target].callBoxed(stack);
      return;
    }
    std::vector<at::Tensor> arguments;
    arguments.reserve(next.inputs.size());
    for (int64_t slot : next.inputs) arguments.push_back(table[slot]);
    std::vector<at::Tensor> results = stages[next.target]->boxed_run(std::move(arguments));
    for (size_t i = 0; i < results.size(); ++i) table[next.outputs[i]] = std::move(results[i]);
  }
};

// The writes below are a few numbers: finding out how ATen would do them takes longer than they do.
void store_tokens(at::Tensor last_tokens, const at::Tensor& slots, const at::Tensor& tokens) {
  auto kept = last_tokens.accessor<int64_t, 1>();
  const auto to = slots.accessor<int64_t, 1>(), from = tokens.accessor<int64_t, 1>();
  for (int64_t r = 0; r < to.size(0); ++r) kept[to[r]] = from[r];
}

void store_states(at::Tensor states, const at::Tensor& slots, const at::Tensor& hidden,
                  const at::Tensor& rows) {
  TORCH_CHECK(states.stride(1) == 1 && hidden.stride(1) == 1, "states are rows of memory");
  auto kept = states.accessor<float, 2>();
  const auto given = hidden.accessor<float, 2>();
  const auto to = slots.accessor<int64_t, 1>(), from = rows.accessor<int64_t, 1>();
  for (int64_t r = 0; r < to.size(0); ++r)
    std::copy_n(given[from[r]].data(), given.size(1), kept[to[r]].data());
}

std::tuple<at::Tensor, at::Tensor> accept_drafts(const at::Tensor& sampled, const at::Tensor& drafted,
                                                 const at::Tensor& sequences) {
  const int64_t count = sequences.size(0);
  at::Tensor accepted = sampled.new_empty({count});
  at::Tensor last_rows = sampled.new_empty({count});
  const auto picked = sampled.accessor<int64_t, 1>(), guessed = drafted.accessor<int64_t, 1>();
  const auto places = sequences.accessor<int32_t, 2>();
  for (int64_t r = 0; r < count; ++r) {
    const int64_t first = places[r][0], drafts = places[r][1] - 1;
    int64_t right = 0;
    while (right < drafts && picked[first + right] == guessed[first + right + 1]) ++right;
    accepted.data_ptr<int64_t>()[r] = right;
    last_rows.data_ptr<int64_t>()[r] = first + right;
  }
  return {accepted, last_rows};
}

}  // namespace

TORCH_LIBRARY(trnc_runtime, m) {
  m.class_<Runner>("Runner")
      .def(torch::init<int64_t>())
      .def("load_stage", &Runner::load_stage)
      .def("load_update", &Runner::load_update)
      .def("bind", &Runner::bind)
      .def("add_program", &Runner::add_program)
      .def("run", &Runner::run);
}

TORCH_LIBRARY_IMPL(trnc, CPU, m) {
  m.impl("store_tokens", &store_tokens);
  m.impl("store_states", &store_states);
  m.impl("accept_drafts", &accept_drafts);
}
