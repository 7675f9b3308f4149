#include "gpt/json.h"

#include <string>
#include <unordered_set>
#include <vector>

namespace gpt {
namespace {

constexpr size_t kDeepest = 64;

// Reads a text without building anything. Stops at what is not JSON, nests too deeply or names something twice. (The
// library would use the stack for each level, and take the last of two values.)
class Checker : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override { return names_.back().insert(name).second; }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
  bool open() {
    names_.emplace_back();
    return names_.size() <= kDeepest;
  }
  bool close() {
    names_.pop_back();
    return true;
  }
  std::vector<std::unordered_set<std::string>> names_;  // of the values around the current place
};

}  // namespace

std::optional<nlohmann::json> parse_json(std::string_view text) {
  // The library takes a zero byte for the end of the text, and would ignore the rest.
  if (text.find('\0') != std::string_view::npos) return std::nullopt;
  Checker checker;
  if (!nlohmann::json::sax_parse(text, &checker)) return std::nullopt;
  return nlohmann::json::parse(text);
}

std::optional<int64_t> whole_number(const nlohmann::json& value, int64_t least, int64_t most) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX) return std::nullopt;
  const auto number = value.get<int64_t>();
  return number >= least && number <= most ? std::optional(number) : std::nullopt;
}

}  // namespace gpt
