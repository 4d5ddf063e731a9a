// Before a unit of a compiled program for a CPU: lets torch's header tell the name of its device without
// a regular expression, whose templates take the compiler longer than the rest of most units.

#pragma once

#include <regex>
#include <string>

namespace std {  // where the header looks for them

struct outrider_pattern {
  explicit outrider_pattern(const char*) {}
};

// The parts of a name: 1 is the device, 3 its number, which a CPU has none of.
struct outrider_parts {
  struct Part {
    std::string text;
    bool matched = false;
    std::string str() const { return text; }
  };
  Part parts[4];
  const Part& operator[](int i) const { return parts[i]; }
};

inline bool outrider_match(const std::string& name, outrider_parts& parts,
                           const outrider_pattern&) {
  parts.parts[1].text = name;
  return name == "cpu";
}

}  // namespace std

#define regex outrider_pattern
#define smatch outrider_parts
#define regex_match outrider_match
#include <torch/csrc/inductor/aoti_runtime/model_base.h>
#undef regex
#undef smatch
#undef regex_match
