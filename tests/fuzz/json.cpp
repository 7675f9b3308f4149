// JSON: what is read, compared with the library that reads it.

#include "gpt/json.h"

#include "harness.h"
#include "train/json.h"

namespace {

using Json = nlohmann::json;

size_t depth_of(std::string_view text) {
  size_t depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_string && text[i] == '\\')
      ++i;
    else if (text[i] == '"')
      in_string = !in_string;
    else if (!in_string && (text[i] == '[' || text[i] == '{'))
      deepest = std::max(deepest, ++depth);
    else if (!in_string && (text[i] == ']' || text[i] == '}'))
      --depth;
  }
  return deepest;
}

size_t names_in(const Json& json) {
  size_t count = json.is_object() ? json.size() : 0;
  for (const auto& item : json) {
    if (item.is_structured()) count += names_in(item);
  }
  return count;
}

// Whether an object of a valid text gives a name twice: then the library keeps fewer names than it reads.
bool names_something_twice(const std::string& text) {
  size_t read = 0;
  const auto json = Json::parse(text, [&](int, Json::parse_event_t event, Json&) {
    read += event == Json::parse_event_t::key ? 1 : 0;
    return true;
  });
  return read != names_in(json);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const std::string text = input.rest();
  const auto json = gpt::parse_json(text);
  // The library takes a zero byte for the end.
  const bool valid = Json::accept(text) && text.find('\0') == std::string::npos;
  const bool too_deep = valid && depth_of(text) > 64;
  fuzz::require(
      json.has_value() == (valid && !too_deep && !names_something_twice(text)),
      "the text is valid and refused, or the reverse");
  if (json) fuzz::require(gpt::parse_json(json->dump()) == json, "another value is read again");
  const std::string path = fuzz::write(fuzz::empty_folder(), "file.json", text);
  const bool read = fuzz::accepted(
      input,
      [&] { fuzz::require(train::read_json(path) == *json, "the file holds another value"); },
      path);
  fuzz::require(read == (json && json->is_object()), "a file is refused, or the reverse");
  return 0;
}
