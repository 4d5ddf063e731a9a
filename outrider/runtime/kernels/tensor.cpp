#include "tensor.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace outrider {

using Dims = c10::SmallVector<int64_t, 5>;

Tensor allocate(Sizes sizes, c10::ScalarType dtype) {
  Dims strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1))
    strides[i] = stride;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      static_cast<int32_t>(dtype), aoti_torch_device_type_cpu(), -1, &handle));
  return Tensor::owned(handle);
}

static Tensor copy(const Tensor& x, c10::ScalarType dtype) {
  Tensor result = allocate(x.sizes(), dtype);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(result.handle(), x.handle(), false));
  return result;
}

Tensor converted(Tensor x, c10::ScalarType dtype) {
  return x.scalar_type() == dtype ? std::move(x) : copy(x, dtype);
}

Tensor contiguous(const Tensor& x, c10::ScalarType dtype) {
  if (x.scalar_type() == dtype && x.is_contiguous()) return Tensor::borrowed(x.handle());
  return copy(x, dtype);
}

Tensor expand(const Tensor& x, Sizes sizes) {
  if (std::ranges::equal(x.sizes(), sizes)) return Tensor::borrowed(x.handle());
  Dims strides;
  for (int64_t i = 0; i < x.dim(); i++) {
    TORCH_CHECK(x.size(i) == sizes[i] || x.size(i) == 1, "a dimension of ", x.size(i),
                " where there should be ", sizes[i]);
    strides.push_back(x.size(i) == sizes[i] ? x.stride(i) : 0);
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.handle(), x.dim(), sizes.data(),
                                                        strides.data(), 0, &handle));
  return Tensor::owned(handle);
}

}  // namespace outrider
