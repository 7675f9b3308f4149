#include "train/safetensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "train/json.h"

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

constexpr uint64_t kLargestHeader = 100'000'000;  // as in other libraries

// Where a tensor lies in the file's data, as the header says.
struct Entry {
  std::string name;
  torch::ScalarType type = at::kFloat;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;
};

// Throws with the file's path and what is wrong with it.
template <typename... Why>
void check(bool good, const std::string& path, const Why&... why) {
  TORCH_CHECK_VALUE(good, "'", path, "' is damaged: ", why...);
}

// A list of whole numbers, each 0 or more.
std::vector<int64_t> whole_numbers(
    const nlohmann::json& entry, const char* key, const std::string& name,
    const std::string& path) {
  const bool is_list = entry.is_object() && entry.contains(key) && entry[key].is_array();
  check(is_list, path, name, " has no ", key, " of whole numbers");
  std::vector<int64_t> numbers;
  for (const auto& item : entry[key]) {
    check(
        item.is_number_unsigned() && item.get<uint64_t>() <= INT64_MAX, path, name, " has no ", key,
        " of whole numbers");
    numbers.push_back(item.get<int64_t>());
  }
  return numbers;
}

Entry entry_of(const std::string& name, const nlohmann::json& json, const std::string& path) {
  const auto shape = whole_numbers(json, "shape", name, path);
  const auto offsets = whole_numbers(json, "data_offsets", name, path);
  check(
      offsets.size() == 2 && offsets.front() <= offsets.back(), path, name,
      " has no begin and end in the file");
  check(json.contains("dtype") && json["dtype"].is_string(), path, name, " has no type");
  const auto type = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& known) {
    return json["dtype"].get_ref<const std::string&>() == known.name;
  });
  TORCH_CHECK_VALUE(
      type != std::end(kTypes), "'", path, "': ", name, " has the type ",
      json["dtype"].get<std::string>(), ", which is not supported");
  int64_t bytes = static_cast<int64_t>(c10::elementSize(type->type));
  bool fits = true;
  for (const int64_t length : shape) fits = !__builtin_mul_overflow(bytes, length, &bytes) && fits;
  check(
      fits && bytes == offsets.back() - offsets.front(), path, name,
      " has a size that does not match its shape");
  return {
      name, type->type, shape, static_cast<uint64_t>(offsets.front()),
      static_cast<uint64_t>(offsets.back())};
}

// The header's entries in the order of their data, which must fill the `bytes` after the header without gap or overlap.
std::vector<Entry> entries_of(
    const nlohmann::json& header, uint64_t bytes, const std::string& path) {
  std::vector<Entry> entries;
  for (const auto& [name, json] : header.items()) {
    if (name != "__metadata__") entries.push_back(entry_of(name, json, path));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const auto& entry : entries) {
    check(
        entry.begin == end, path, entry.name,
        entry.begin < end ? " overlaps another tensor" : " begins after a gap");
    end = entry.end;
  }
  check(end <= bytes, path, "it ends before its tensors do");
  check(end == bytes, path, bytes - end, " bytes at its end belong to no tensor");
  return entries;
}

// A file whose header has been read. The tensors' data comes next.
struct OpenFile {
  gpt::InputFile file;
  nlohmann::json header;
  uint64_t bytes;  // after the header
};

OpenFile opened(const std::string& path) {
  TORCH_CHECK_VALUE(!std::filesystem::is_directory(path), "'", path, "' is a folder, not a file");
  gpt::InputFile file(path);
  const auto file_size = static_cast<uint64_t>(file.stamp().bytes);
  uint64_t header_size = 0;
  check(file_size >= sizeof header_size, path, "it is too short");
  file.read(&header_size, sizeof header_size);
  check(header_size <= file_size - sizeof header_size, path, "it is shorter than its header says");
  check(header_size <= kLargestHeader, path, "its header of ", header_size, " bytes is too large");
  std::string text(header_size, '\0');
  file.read(text.data(), header_size);
  auto header = parse_json(text).value_or(nlohmann::json());
  check(header.is_object(), path, "its header is not a valid JSON object");
  return {std::move(file), std::move(header), file_size - sizeof header_size - header_size};
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
  auto [file, header, bytes] = opened(path);
  std::map<std::string, Tensor> tensors;
  for (const auto& entry : entries_of(header, bytes, path)) {
    const Tensor tensor = at::empty(entry.shape, entry.type);
    const size_t got = file.read(tensor.data_ptr(), tensor.nbytes());
    check(got == tensor.nbytes(), path, "it ends within ", entry.name);
    tensors.emplace(entry.name, tensor);
  }
  return tensors;
}

std::map<std::string, std::string> load_metadata(const std::string& path) {
  std::map<std::string, std::string> metadata;
  const auto header = opened(path).header;
  const auto found = header.find("__metadata__");
  if (found == header.end() || !found->is_object()) return metadata;
  for (const auto& [name, value] : found->items()) {
    if (value.is_string()) metadata.emplace(name, value.get<std::string>());
  }
  return metadata;
}

}  // namespace train
