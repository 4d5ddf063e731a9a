#include "move_slots.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace outrider {

namespace {

// The slots of one row that do not stay where they are.
struct Move {
  std::vector<int64_t> from, to;
};

// Moves the slots of one row and head. `slot` is the distance between slots, `size` the bytes moved.
void move(char* data, int64_t slot, int64_t size, const Move& by, std::vector<char>& held) {
  held.resize(by.from.size() * size);
  for (size_t d = 0; d < by.from.size(); d++)
    std::memcpy(held.data() + d * size, data + by.from[d] * slot, size);
  for (size_t d = 0; d < by.to.size(); d++)
    std::memcpy(data + by.to[d] * slot, held.data() + d * size, size);
}

}  // namespace

void move_slots(Tensors buffers, Sizes lengths, const Tensor& index, int64_t first) {
  const int64_t B = index.size(0), D = index.size(1);
  TORCH_CHECK(static_cast<int64_t>(lengths.size()) == B, "as many lengths as rows of the index");
  const int64_t* index_BD = index.const_data_ptr<int64_t>();
  const int64_t row = index.stride(0), column = index.stride(1);
  int64_t last = 0;
  std::vector<Move> moves(B);
  for (int64_t b = 0; b < B; b++)
    for (int64_t d = 0; d < D; d++) {
      const int64_t from = lengths[b] + index_BD[b * row + d * column], to = lengths[b] + first + d;
      TORCH_CHECK(from >= 0 && to >= 0, "slot ", std::min(from, to), " of a KV buffer");
      last = std::max({last, from, to});
      if (from == to) continue;
      moves[b].from.push_back(from);
      moves[b].to.push_back(to);
    }
  std::vector<char> held;
  for (const Tensor& buffer : buffers) {
    TORCH_CHECK(buffer.size(0) >= B && buffer.size(2) > last && buffer.stride(3) == 1,
                "a KV buffer lacks rows or slots, or its vectors are not contiguous");
    const int64_t item = c10::elementSize(buffer.scalar_type()), size = buffer.size(3) * item;
    char* data = static_cast<char*>(buffer.data_ptr());
    for (int64_t b = 0; b < B; b++)
      if (!moves[b].from.empty())
        for (int64_t h = 0; h < buffer.size(1); h++)
          move(data + (b * buffer.stride(0) + h * buffer.stride(1)) * item,
               buffer.stride(2) * item, size, moves[b], held);
  }
}

}  // namespace outrider
