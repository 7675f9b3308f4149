#pragma once
// Parses JSON that may be damaged or hostile. All JSON that is read from files comes in through here.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace gpt {

/// The value of a text. Nothing if it is not valid JSON, nests deeper than 64 levels or gives a name twice. Takes time
/// in proportion to the text.
std::optional<nlohmann::json> parse_json(std::string_view text);

/// A whole number from `least` to `most`. Nothing for all other values; the library would round them or cut them off.
std::optional<int64_t> whole_number(
    const nlohmann::json& value, int64_t least = 0, int64_t most = INT64_MAX);

}  // namespace gpt
