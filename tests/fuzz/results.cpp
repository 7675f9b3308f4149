// The files of a study's run: result.json, metrics.jsonl, machine.jsonl and diagnostics.jsonl.

#include "study/results.h"

#include <cmath>

#include "harness.h"

namespace {

const study::Folder& planned() {
  static const study::Folder folder = [] {
    study::Study study;
    study.settings = {"packed"};
    study.options = {{"layers", "1"},      {"heads", "2"},       {"width", "8"},
                     {"context", "8"},     {"batch", "2"},       {"steps", "2"},
                     {"warmdown", "0"},    {"vocabulary", "64"}, {"engine", "portable"},
                     {"precision", "fp32"}};
    return study::planned_folder(study, fuzz::empty_folder());
  }();
  return folder;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto& study = planned();
  const auto& run = study.plan.front();
  fuzz::empty_folder();
  const std::string folder = study::folder_of(study, run);
  static const std::string config = train::to_toml(study::config_of(study, run));
  fuzz::write(folder, "config.toml", config);
  for (const char* name : {"result.json", "metrics.jsonl", "machine.jsonl", "diagnostics.jsonl"}) {
    const std::string text = input.part();
    if (!text.empty()) fuzz::write(folder, name, text + "\n");
  }
  const auto status = study::status_of(study, run);
  if (status.state == study::RunState::kFailed) fuzz::check_words(input, status.error);
  const auto results = study::read_results(study);
  for (const auto& problem : results.problems) fuzz::check_words(input, problem);
  const auto& result = results.runs.front();
  if (result.counts()) {
    fuzz::require(std::isfinite(result.loss), "a loss that is no number counts");
    fuzz::require(result.curve.at(2) == result.loss, "the loss is not that of the last step");
  }
  return 0;
}
