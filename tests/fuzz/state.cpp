// state.json of a checkpoint, also with the checksum that it should have.

#include <nlohmann/json.hpp>

#include "gpt/json.h"
#include "harness.h"
#include "train/checkpoint.h"
#include "train/files.h"
#include "train/safetensors.h"

namespace {

std::string vouched_for(const std::string& text) {
  auto json = gpt::parse_json(text);
  if (!json || !json->is_object()) return text;
  json->erase("crc32c");
  const std::string rest = json->dump();
  (*json)["crc32c"] = gpt::crc32c(0, rest.data(), rest.size());
  return json->dump();
}

void write_tensors(const std::string& path) {
  train::OutputFile file(path);
  train::save_tensors(file, {}, {{"step", "4"}});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const bool honest = input.number(1) == 1;
  const std::string text = input.rest();
  const std::string checkpoint = fuzz::empty_folder() + "/checkpoints/step-000004";
  fuzz::write(checkpoint, "state.json", honest ? vouched_for(text) : text);
  write_tensors(checkpoint + "/model.safetensors");
  write_tensors(checkpoint + "/optimizer.safetensors");
  const std::string why = train::damage(checkpoint);
  if (!why.empty()) {
    fuzz::check_words(input, why);
    return 0;
  }
  const auto state = train::read_state(checkpoint);
  fuzz::require(state.step == 4, "a checkpoint of another step is accepted");
  fuzz::require(train::damage(checkpoint, /*weights_only=*/true).empty(), "its weights are not");
  return 0;
}
