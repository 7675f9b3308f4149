// Loss and gradients of gpt::Model for weights and tokens from safetensors files, for tests that compare them with
// plain PyTorch: model_door CONFIG WEIGHTS TOKENS OUT

#include <cstdio>

#include "train/checkpoint.h"
#include "train/recipe.h"
#include "train/safetensors.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: model_door CONFIG WEIGHTS TOKENS OUT\n");
    return 2;
  }
  const auto config = train::with_engine(train::configure(train::read_options(argv[1])));
  gpt::Model model(
      train::model_shape(config), train::matmul_precision(config.precision), /*seed=*/0);
  train::load_weights(argv[2], model);
  const auto tokens = train::load_tensors(argv[3]).at("tokens");
  model.set_engine(group_muon::parse_engine(config.engine));
  const int64_t length = tokens.size(1) - 1;
  const double loss =
      model.add_gradients(tokens.narrow(1, 0, length), tokens.narrow(1, 1, length), /*share=*/1);
  train::NamedTensors out = {{"loss", at::scalar_tensor(loss)}};
  for (const auto& item : model.named_parameters()) {
    out.emplace_back(item.key(), item.value().grad());
  }
  train::OutputFile file(argv[4]);
  train::save_tensors(file, out, {});
  return 0;
}
