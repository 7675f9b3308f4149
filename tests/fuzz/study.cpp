// Study files, and the runs that follow from them.

#include <set>

#include "harness.h"
#include "study/plan.h"

namespace {

void check_plan(const std::vector<study::PlannedRun>& plan) {
  std::set<std::string> names;
  for (const auto& run : plan) {
    fuzz::require(names.insert(run.name).second, "two runs have the same folder");
    fuzz::require(run.name.find("..") == std::string::npos, "a run is outside the study's folder");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const std::string folder = fuzz::empty_folder();
  fuzz::write(folder, "base.toml", input.part());
  const std::string path = fuzz::write(folder, "study.toml", input.rest());
  study::Study study;
  if (!fuzz::accepted(input, [&] { study = study::read_study(path); }, path)) return 0;
  const std::string text = study::to_toml(study);
  const auto again = study::read_study(fuzz::write(folder, "again.toml", text));
  fuzz::require(study::to_toml(again) == text, "another study is read again");
  std::vector<study::PlannedRun> plan;
  if (!fuzz::accepted(input, [&] { plan = study::make_plan(study); })) return 0;
  check_plan(plan);
  fuzz::require(study::make_plan(again).size() == plan.size(), "it has other runs the second time");
  return 0;
}
