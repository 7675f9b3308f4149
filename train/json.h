#pragma once
// Reads JSON files that may be damaged or hostile.

#include <string>

#include "gpt/json.h"

namespace train {

using gpt::parse_json;
using gpt::whole_number;

/// The object in a file of at most 16 MB. Errors name the file.
nlohmann::json read_json(const std::string& path);

}  // namespace train
