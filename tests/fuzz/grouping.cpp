// Groupings of heads: their text, and the partition they make of the heads.

#include "group_muon/grouping.h"

#include <algorithm>

#include "harness.h"

using namespace group_muon;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const int64_t heads = 1 + input.number(1023), step = input.number(INT64_MAX - 1);
  const double lr_fraction = static_cast<double>(step % 101) / 100;
  const std::string text = input.rest();
  GroupingSchedule schedule;
  const bool parsed = fuzz::accepted(input, [&] { schedule = parse_schedule(text); });
  if (!parsed) return 0;
  fuzz::require(parse_schedule(to_string(schedule)) == schedule, "another schedule is read again");
  if (!fuzz::accepted(
          input, [&] { schedule = checked(schedule, heads, "weight: "); }, "weight: ")) {
    return 0;
  }
  const Grouping& grouping = grouping_at(schedule, step, lr_fraction);
  fuzz::require(grouping.from_step <= step, "a grouping is used before its step");
  fuzz::require(grouping.from_lr <= lr_fraction, "a grouping is used below its learning rate");
  fuzz::require(step % grouping.every == 0, "a periodic grouping is used between its steps");
  fuzz::require(parse_schedule(to_string(schedule)) == schedule, "another schedule was checked");
  fuzz::require(heads % grouping.group_size == 0, "a group has too few heads");
  auto order = head_order(heads, grouping, {.seed = 1, .step = step, .parameter = 2, .stream = 3});
  std::sort(order.begin(), order.end());
  fuzz::require(static_cast<int64_t>(order.size()) == heads, "heads are missing");
  for (int64_t i = 0; i < heads; ++i) fuzz::require(order[i] == i, "a head is in two groups");
  return 0;
}
