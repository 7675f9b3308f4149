#include "train/errors.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <system_error>

namespace train {
namespace {

using JsonError = nlohmann::detail::exception;

// What lies between the first two quotes.
std::string quoted_part(const std::string& text) {
  const size_t begin = text.find('\'');
  const size_t end = begin == std::string::npos ? begin : text.find('\'', begin + 1);
  return end == std::string::npos ? "" : text.substr(begin + 1, end - begin - 1);
}

std::string words_of(const JsonError& error) {
  constexpr int kNoSuchKey = 403;
  if (error.id == kNoSuchKey) return c10::str("'", quoted_part(error.what()), "' is missing");
  return "it has a missing or wrong value";
}

std::string words_of(const std::filesystem::filesystem_error& error) {
  const std::string path = error.path1().string();
  return c10::str("'", path, "' cannot be used: ", error.code().message());
}

}  // namespace

std::string message_of(const std::exception& error) {
  if (const auto* own = dynamic_cast<const c10::Error*>(&error))
    return own->what_without_backtrace();
  if (const auto* json = dynamic_cast<const JsonError*>(&error)) return words_of(*json);
  if (const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&error)) {
    return words_of(*file);
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "there is not enough memory";
  if (const auto* system = dynamic_cast<const std::system_error*>(&error)) {
    return "the system refused: " + system->code().message();
  }
  return error.what();
}

}  // namespace train
