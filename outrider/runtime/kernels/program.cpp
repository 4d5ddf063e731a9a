// Compiled programs, by the C functions that AOTInductor puts into their libraries. torch's own binding
// of its loader holds Python's lock for the whole call, in which a server could not send a token;
// operators that are registered with torch release it. The headers of that loader take a compiler
// longer than most kernels.

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_runtime/interface.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "operator_tensors.h"

namespace outrider {

namespace {

// A function of a library, and its type.
#define FUNCTION(library, name) \
  function<decltype(AOTInductorModelContainer##name)>(library, "AOTInductorModelContainer" #name)

template <typename F>
F* function(void* library, const char* name) {
  void* found = dlsym(library, name);
  TORCH_CHECK(found, "the library of a program has no ", name);
  return reinterpret_cast<F*>(found);
}

void check(AOTIRuntimeError error, const char* what) {
  TORCH_CHECK(error == AOTI_RUNTIME_SUCCESS, "a compiled program cannot ", what);
}

class Program {
 public:
  explicit Program(const std::string& path) : library_(dlopen(path.c_str(), RTLD_NOW)) {
    TORCH_CHECK(library_, dlerror());
    run_ = FUNCTION(library_, RunSingleThreaded);
    check(FUNCTION(library_, CreateWithDevice)(&container_, 1, "cpu", nullptr), "be loaded");
    check(FUNCTION(library_, GetNumOutputs)(container_, &num_outputs_), "count its outputs");
  }

  ~Program() {
    if (container_) FUNCTION(library_, Delete)(container_);
    dlclose(library_);
  }

  // Names of the tensors whose addresses it wants, as the compiler and as the model's code calls them.
  std::vector<std::pair<std::string, std::string>> constants() const {
    const auto name = FUNCTION(library_, GetConstantName);
    const auto original = FUNCTION(library_, GetConstantOriginalFQN);
    size_t count;
    check(FUNCTION(library_, GetNumConstants)(container_, &count), "count its constants");
    std::vector<std::pair<std::string, std::string>> names;
    for (size_t i = 0; i < count; i++) {
      const char *ours, *theirs;
      check(name(container_, i, &ours), "name its constants");
      check(original(container_, i, &theirs), "name its constants");
      names.emplace_back(ours, theirs);
    }
    return names;
  }

  void use_constants(const std::unordered_map<std::string, AtenTensorHandle>& by_original) {
    std::unordered_map<std::string, AtenTensorHandle> handles;
    for (const auto& [ours, theirs] : constants()) handles.emplace(ours, by_original.at(theirs));
    const auto map = reinterpret_cast<AOTInductorConstantMapHandle>(&handles);
    check(FUNCTION(library_, UpdateUserManagedConstantBuffer)(container_, map, false, true),
          "take its constants");
  }

  // Takes over the handles of its inputs; those of its outputs belong to the caller.
  std::vector<AtenTensorHandle> run(std::vector<AtenTensorHandle> inputs) {
    const std::lock_guard<std::mutex> lock(running_);  // it is made for one thread at a time
    std::vector<AtenTensorHandle> outputs(num_outputs_);
    check(run_(container_, inputs.data(), inputs.size(), outputs.data(), outputs.size(), nullptr,
               nullptr),
          "be run");
    return outputs;
  }

 private:
  void* library_;
  decltype(AOTInductorModelContainerRunSingleThreaded)* run_;
  AOTInductorModelContainerHandle container_ = nullptr;
  size_t num_outputs_ = 0;
  std::mutex running_;
};

// Python holds a program by its address.
Program& program_at(int64_t address) { return *reinterpret_cast<Program*>(address); }

int64_t load_program(const std::string& path) {
  return reinterpret_cast<int64_t>(new Program(path));
}

std::vector<std::string> constant_names(int64_t address) {
  std::vector<std::string> names;
  for (const auto& [_, theirs] : program_at(address).constants()) names.push_back(theirs);
  return names;
}

// A tensor over the memory of another one, which does not keep it.
Tensor unowned(const Tensor& x) {
  AtenTensorHandle handle;
  int64_t* strides;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(x.handle(), &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      x.data_ptr(), x.dim(), x.sizes().data(), strides, 0, static_cast<int32_t>(x.scalar_type()),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor::owned(handle);
}

// Tells the program the addresses of its tensors, which the caller keeps. torch's container never
// deletes the handles that it makes of them, so that they may not keep the tensors.
void use_constants(int64_t address, const std::vector<std::string>& names,
                   const std::vector<Shared>& tensors) {
  std::vector<Tensor> constants;
  std::unordered_map<std::string, AtenTensorHandle> handles;
  for (size_t i = 0; i < names.size(); i++) {
    constants.push_back(unowned(of(tensors.at(i))));
    handles.emplace(names[i], constants.back().handle());
  }
  program_at(address).use_constants(handles);
}

// run_program(int address, Tensor[] inputs) -> Tensor[], by handles, without an object for each.
void run_program(StableIValue* stack, uint64_t, uint64_t) {
  Program& program = program_at(stable::to<int64_t>(stack[0]));
  const auto list = stable::to<StableListHandle>(stack[1]);
  size_t count;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &count));
  std::vector<AtenTensorHandle> inputs(count);
  for (size_t i = 0; i < count; i++) {
    StableIValue value;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &value));
    inputs[i] = stable::to<AtenTensorHandle>(value);
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  StableListHandle outputs;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(count, &outputs));
  for (AtenTensorHandle each : program.run(std::move(inputs)))
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(outputs, stable::from(each)));
  stack[0] = stable::from(outputs);
}

}  // namespace

}  // namespace outrider

// No operator: Python frees a program whenever it collects garbage, which may be while torch traces
// another one and records every operator that is called.
extern "C" void outrider_free_program(int64_t address) { delete &outrider::program_at(address); }

STABLE_TORCH_LIBRARY_IMPL(outrider, CompositeExplicitAutograd, library) {
  library.impl("load_program", TORCH_BOX(&outrider::load_program));
  library.impl("constant_names", TORCH_BOX(&outrider::constant_names));
  library.impl("use_constants", TORCH_BOX(&outrider::use_constants));
  library.impl("run_program", &outrider::run_program);
}
