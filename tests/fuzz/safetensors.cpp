// Files of tensors.

#include "train/safetensors.h"

#include <ATen/ATen.h>

#include <cstring>

#include "harness.h"

namespace {

std::string with_length(const std::string& header, const std::string& tensors) {
  const uint64_t length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + tensors;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

void check_again(const std::string& folder, const std::string& path) {
  const auto tensors = train::load_tensors(path);
  const auto metadata = train::load_metadata(path);
  const std::string copy = folder + "/copy";
  {
    train::OutputFile file(copy);
    train::save_tensors(file, {tensors.begin(), tensors.end()}, metadata);
  }
  const auto again = train::load_tensors(copy);
  fuzz::require(again.size() == tensors.size(), "another number of tensors is read again");
  for (const auto& [name, tensor] : tensors) {
    fuzz::require(same(again.at(name), tensor), "another tensor is read again");
  }
  fuzz::require(train::load_metadata(copy) == metadata, "other metadata is read again");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const bool raw = input.number(1) == 0;
  const std::string start = raw ? "" : input.part(), rest = input.rest();
  const std::string folder = fuzz::empty_folder();
  const auto path = fuzz::write(folder, "weights", raw ? rest : with_length(start, rest));
  fuzz::accepted(input, [&] { check_again(folder, path); }, path);
  return 0;
}
