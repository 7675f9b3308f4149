// metrics.jsonl as a resumed run cuts it back.

#include "train/metrics.h"

#include <set>

#include "harness.h"

namespace {

std::multiset<std::string> lines_of(const std::string& text) {
  const auto lines =
      fuzz::Input(reinterpret_cast<const uint8_t*>(text.data()), text.size()).lines();
  return {lines.begin(), lines.end()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const int64_t last = input.number(INT64_MAX - 1);
  const std::string text = input.rest();
  const std::string path = fuzz::write(fuzz::empty_folder(), "metrics.jsonl", text);
  const auto keep = [&](int64_t step, bool) { return step <= last; };
  for (const auto& note : train::cut_back(path, keep)) fuzz::check_words(input, note);
  const std::string kept = fuzz::read(path);
  auto before = lines_of(text);
  for (const auto& line : lines_of(kept)) {
    const auto found = before.find(line);
    fuzz::require(found != before.end(), "a line is new");
    before.erase(found);
  }
  fuzz::require(train::cut_back(path, keep).empty(), "what was kept has lines that are not");
  fuzz::require(fuzz::read(path) == kept, "a second time changes the file");
  return 0;
}
