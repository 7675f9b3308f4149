// Configuration files of training runs.

#include "train/config.h"

#include "harness.h"
#include "train/recipe.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const std::string folder = fuzz::empty_folder();
  const std::string path = fuzz::write(folder, "config.toml", input.rest());
  train::Config config;
  const auto read = [&] { config = train::configure(train::read_options(path)); };
  if (!fuzz::accepted(input, read, path)) return 0;
  if (!fuzz::accepted(input, [&] { train::check(config); })) return 0;
  std::string text;
  if (!fuzz::accepted(input, [&] { text = train::to_toml(config); })) return 0;
  const auto again = train::configure(train::read_options(fuzz::write(folder, "again", text)));
  fuzz::require(again == config, "another config is read again");
  fuzz::require(train::to_toml(again) == text, "it is written otherwise the second time");
  return 0;
}
