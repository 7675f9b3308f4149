// Layouts: their text, and that their groups cover a weight exactly once.

#include "group_muon/layout.h"

#include "harness.h"

using namespace group_muon;

namespace {

// Counts how often each row is in a head, which must be once.
void check_cover(const Layout& layout, int64_t length) {
  std::vector<int> covered(static_cast<size_t>(length));
  for (const auto& segment : layout.segments) {
    for (const int64_t start : segment.head_starts) {
      for (int64_t row = start; row < start + segment.head_rows; ++row) ++covered.at(row);
    }
  }
  for (const int count : covered) fuzz::require(count == 1, "a row is not in exactly one head");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const int64_t rows = 1 + input.number(9999), columns = 1 + input.number(9999);
  const std::string text = input.rest();
  Layout layout;
  if (!fuzz::accepted(input, [&] { layout = parse_layout(text); })) return 0;
  fuzz::require(parse_layout(to_string(layout)) == layout, "another layout is read again");
  const auto check = [&] { layout = checked(layout, {rows, columns}, "weight"); };
  if (!fuzz::accepted(input, check, "'weight'") || layout.segments.empty()) return 0;
  check_cover(layout, layout.axis == Axis::kRows ? rows : columns);
  fuzz::require(
      fuzz::accepted(input, [&] { checked(parse_layout(to_string(layout)), {rows, columns}, ""); }),
      "a checked layout is refused");
  return 0;
}
