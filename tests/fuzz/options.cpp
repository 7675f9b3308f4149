// The text of options that the operators take.

#include "group_muon/options.h"

#include "harness.h"

using namespace group_muon;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto part = static_cast<Part>(input.number(2));
  const std::string text = input.rest();
  GroupMuonOptions options;
  if (!fuzz::accepted(input, [&] { options = parse_options(text, part); })) return 0;
  GroupMuonOptions again;
  for (const auto& option : option_list()) option.set(again, option.get(options), option.name);
  for (const auto& option : option_list()) {
    fuzz::require(option.get(again) == option.get(options), "another value is read again");
  }
  fuzz::accepted(input, [&] { step_options(options); });
  return 0;
}
