// Compiled programs whose calls let Python's other threads run. torch's own binding of the loader
// holds Python's lock for the whole call, in which a server could not send a token; operators that
// are registered with torch release it.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

#include <memory>
#include <mutex>

namespace outrider {

struct Program {
  torch::inductor::AOTIModelPackageLoader loader;
  std::mutex running;  // the loader is made for one thread at a time

  explicit Program(const std::string& path) : loader(path, "model", true, 1, -1) {}
};

// Python holds a program by its address.
static Program& program_at(int64_t address) { return *reinterpret_cast<Program*>(address); }

static int64_t load_program(const std::string& path) {
  return reinterpret_cast<int64_t>(new Program(path));
}

static std::vector<std::string> constant_names(int64_t address) {
  return program_at(address).loader.get_constant_fqns();
}

// Tells the program the addresses of its tensors, which the caller keeps.
static void use_constants(int64_t address, const c10::Dict<std::string, at::Tensor>& tensors) {
  std::unordered_map<std::string, at::Tensor> map;
  for (const auto& each : tensors) map.emplace(each.key(), each.value());
  program_at(address).loader.load_constants(map, false, true, true);
}

static std::vector<at::Tensor> run_program(int64_t address, at::TensorList inputs) {
  Program& program = program_at(address);
  const std::lock_guard<std::mutex> lock(program.running);
  return program.loader.boxed_run(inputs.vec());
}

}  // namespace outrider

// No operator: Python frees a program whenever it collects garbage, which may be while torch traces
// another one and records every operator that is called.
extern "C" void outrider_free_program(int64_t address) { delete &outrider::program_at(address); }

TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("load_program(str path) -> int", &outrider::load_program);
  library.def("constant_names(int address) -> str[]", &outrider::constant_names);
  library.def("use_constants(int address, Dict(str, Tensor) tensors) -> ()",
              &outrider::use_constants);
  library.def("run_program(int address, Tensor[] inputs) -> Tensor[]", &outrider::run_program);
}
