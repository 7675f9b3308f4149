#include "group_muon/text.h"

#include <algorithm>
#include <numeric>

namespace group_muon {
namespace {

// Levenshtein distance.
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (a[i] == b[j] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  // The end of a name, such as lr for muon-lr, is nearer than any other spelling.
  const auto bare = name.substr(std::min(name.find_first_not_of('-'), name.size()));
  for (const auto& candidate : candidates) {
    const bool is_end = bare.size() > 1 && candidate.size() > bare.size() + 1 &&
                        candidate.ends_with(bare) &&
                        candidate[candidate.size() - bare.size() - 1] == '-';
    if (is_end) return candidate;
  }
  std::string best;
  size_t fewest = std::max<size_t>(2, name.size() / 2) + 1;
  for (const auto& candidate : candidates) {
    const size_t distance = edits(name, candidate);
    if (distance >= fewest) continue;
    fewest = distance;
    best = candidate;
  }
  return best;
}

}  // namespace group_muon
