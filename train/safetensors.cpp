#include "train/safetensors.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace train {
namespace {

using nlohmann::ordered_json;
using torch::Tensor;

struct TypeName {
  torch::ScalarType type;
  const char* name;
};
constexpr TypeName kTypes[] = {
    {at::kFloat, "F32"}, {at::kDouble, "F64"}, {at::kBFloat16, "BF16"},
    {at::kHalf, "F16"},  {at::kLong, "I64"},
};

const char* name_of(torch::ScalarType type) {
  for (const auto& entry : kTypes) {
    if (entry.type == type) return entry.name;
  }
  TORCH_CHECK_TYPE(false, "tensors of type ", type, " cannot be saved");
}

torch::ScalarType type_of(const std::string& name) {
  for (const auto& entry : kTypes) {
    if (name == entry.name) return entry.type;
  }
  TORCH_CHECK_TYPE(false, "type ", name, " is not supported");
}

}  // namespace

void save_tensors(
    OutputFile& file, const NamedTensors& tensors,
    const std::map<std::string, std::string>& metadata) {
  ordered_json header;
  header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t end = offset + tensor.nbytes();
    header[name] = {
        {"dtype", name_of(tensor.scalar_type())},
        {"shape", tensor.sizes().vec()},
        {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // aligns the data
  const uint64_t size = text.size();
  file.write(&size, sizeof size);
  file.write(text);
  for (const auto& [name, tensor] : tensors) {
    const Tensor flat = tensor.detach().cpu().contiguous();
    file.write(flat.const_data_ptr(), flat.nbytes());
  }
}

std::map<std::string, Tensor> load_tensors(const std::string& path) {
  const auto check = [&](bool good, const auto&... why) {
    TORCH_CHECK_VALUE(good, "'", path, "' is damaged: ", why...);
  };
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file, "'", path, "' cannot be read");
  const uint64_t file_size = std::filesystem::file_size(path);
  uint64_t header_size = 0;
  check(file_size >= sizeof header_size, "it is too short");
  file.read(reinterpret_cast<char*>(&header_size), sizeof header_size);
  check(header_size <= file_size - sizeof header_size, "it is shorter than its header says");
  std::string text(header_size, '\0');
  file.read(text.data(), static_cast<std::streamsize>(header_size));
  const auto header = ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  check(header.is_object(), "its header is not valid JSON");
  const uint64_t first = sizeof header_size + header_size;
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    std::vector<int64_t> shape;
    std::vector<uint64_t> offsets;
    torch::ScalarType type = at::kFloat;
    try {
      entry.at("shape").get_to(shape);
      entry.at("data_offsets").get_to(offsets);
      type = type_of(entry.at("dtype").get<std::string>());
    } catch (const std::exception&) {
      check(false, "the entry of ", name, " cannot be read");
    }
    check(
        offsets.size() == 2 && offsets[0] <= offsets[1] && offsets[1] <= file_size - first, name,
        " extends past the end of the file");
    uint64_t bytes = c10::elementSize(type);
    for (const int64_t length : shape) {
      check(length >= 0, name, " has a negative size");
      bytes *= static_cast<uint64_t>(length);
    }
    check(bytes == offsets[1] - offsets[0], name, " has a size that does not match its shape");
    const Tensor tensor = at::empty(shape, type);
    file.seekg(static_cast<std::streamoff>(first + offsets[0]));
    file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(bytes));
    check(static_cast<bool>(file), name, " cannot be read");
    tensors.emplace(name, tensor);
  }
  return tensors;
}

std::map<std::string, std::string> load_metadata(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  uint64_t size = 0;
  file.read(reinterpret_cast<char*>(&size), sizeof size);
  const bool fits = file && size <= std::filesystem::file_size(path) - sizeof size;
  std::string text(fits ? size : 0, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  const auto header = ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(header.is_object(), "'", path, "' is damaged: its header cannot be read");
  std::map<std::string, std::string> metadata;
  const auto entries = header.value("__metadata__", ordered_json());
  for (const auto& [name, value] : entries.items()) {
    if (value.is_string()) metadata.emplace(name, value.get<std::string>());
  }
  return metadata;
}

}  // namespace train
