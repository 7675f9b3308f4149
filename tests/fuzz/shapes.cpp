// Files of shapes to plan with.

#include "train/shapes.h"

#include "harness.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const std::string path = fuzz::write(fuzz::empty_folder(), "shapes.toml", input.rest());
  train::PlannedModel model;
  if (!fuzz::accepted(input, [&] { model = train::find_model(path); })) return 0;
  fuzz::require(!model.weights.empty(), "the model has no weights");
  fuzz::require(model.active.size() == model.weights.size(), "a weight has no active part");
  fuzz::require(train::training_flops_per_token(model) >= 0, "the FLOPs are no number");
  const int64_t group = train::usual_group_size(model);
  fuzz::require(group >= 1 && group <= 6, "the usual groups have another size");
  fuzz::accepted(input, [&] { train::with_groups(model, train::HeadGroups{}); });
  return 0;
}
