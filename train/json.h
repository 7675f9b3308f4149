#pragma once
// Reads JSON that may be damaged or hostile. All JSON of our files comes in through here.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace train {

/// The value of a text. Nothing if it is not valid JSON, nests deeper than 64 levels or gives a name twice. Takes time
/// in proportion to the text.
std::optional<nlohmann::json> parse_json(std::string_view text);

/// The object in a file of at most 16 MB. Errors name the file.
nlohmann::json read_json(const std::string& path);

}  // namespace train
