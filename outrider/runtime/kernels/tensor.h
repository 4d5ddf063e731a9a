// Tensors as the kernels read and write them, by torch's C functions: the headers of at::Tensor take a
// compiler about as long as all kernels.

#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <span>
#include <utility>

namespace outrider {

using Sizes = std::span<const int64_t>;

// A tensor on the CPU, by its handle, which either belongs to somebody else or is deleted with this
// object; or none. Metadata are read once.
class Tensor {
 public:
  Tensor() = default;
  static Tensor borrowed(AtenTensorHandle handle) { return Tensor(handle, false); }
  static Tensor owned(AtenTensorHandle handle) { return Tensor(handle, true); }

  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_), std::swap(is_owned_, other.is_owned_);
    data_ = other.data_, sizes_ = other.sizes_, strides_ = other.strides_, dtype_ = other.dtype_;
    return *this;
  }
  ~Tensor() {
    if (is_owned_) aoti_torch_delete_tensor_object(handle_);
  }

  bool defined() const { return handle_; }
  AtenTensorHandle handle() const { return handle_; }

  // The handle, which then belongs to the caller; a new one if it is borrowed.
  AtenTensorHandle release() {
    AtenTensorHandle handle = handle_;
    if (!is_owned_) TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle_, &handle));
    is_owned_ = false;
    return handle;
  }

  c10::ScalarType scalar_type() const { return dtype_; }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  Sizes sizes() const { return sizes_; }
  int64_t size(int64_t i) const { return sizes_[i < 0 ? i + dim() : i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  int64_t numel() const {
    int64_t numel = 1;
    for (int64_t size : sizes_) numel *= size;
    return numel;
  }
  bool is_contiguous() const {
    bool is_contiguous;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle_, &is_contiguous));
    return is_contiguous;
  }

  void* data_ptr() const { return data_; }
  template <typename T>
  T* mutable_data_ptr() const {
    TORCH_CHECK(dtype_ == c10::CppTypeToScalarType<T>::value, "a tensor of ", dtype_,
                " where one of ", c10::CppTypeToScalarType<T>::value, " is read");
    return static_cast<T*>(data_);
  }
  template <typename T>
  const T* const_data_ptr() const {
    return mutable_data_ptr<T>();
  }

 private:
  Tensor(AtenTensorHandle handle, bool is_owned) : handle_(handle), is_owned_(is_owned) {
    int64_t dim, *sizes, *strides;
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data_));
    sizes_ = Sizes(sizes, dim), strides_ = Sizes(strides, dim);
    dtype_ = static_cast<c10::ScalarType>(dtype);
  }

  AtenTensorHandle handle_ = nullptr;
  bool is_owned_ = false;
  void* data_ = nullptr;
  Sizes sizes_, strides_;
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
};

using Tensors = std::span<const Tensor>;

// A new tensor, whose numbers are not set.
Tensor allocate(Sizes sizes, c10::ScalarType dtype);

// The tensor in another dtype.
Tensor converted(Tensor x, c10::ScalarType dtype);

// The tensor in a dtype, each number beside the next: the same memory where that is so already.
Tensor contiguous(const Tensor& x, c10::ScalarType dtype);

// A view of these sizes, in which dimensions of size 1 are repeated; the tensor if it has them.
Tensor expand(const Tensor& x, Sizes sizes);

}  // namespace outrider
