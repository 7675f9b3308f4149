#pragma once
// Parses JSON that may be damaged or hostile. All JSON that is read from files comes in through here.

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace gpt {

/// The value of a text. Nothing if it is not valid JSON, nests deeper than 64 levels or gives a name twice. Takes time
/// in proportion to the text.
std::optional<nlohmann::json> parse_json(std::string_view text);

}  // namespace gpt
