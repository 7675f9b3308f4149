#include "train/errors.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

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

// Errors from inside torch, by a part of their text, and what they mean here.
constexpr std::pair<const char*, const char*> kTorchErrors[] = {
    {"cannot be converted to type", "a number became too large; try a lower learning rate"},
    {"Storage size calculation overflowed", "a tensor would be too large for any memory"},
    {"DefaultCPUAllocator", "there is not enough memory"},
    {"probability tensor contains", "the model's output is not finite"}};

std::string without_torch_words(const std::string& text) {
  for (const auto& [part, words] : kTorchErrors) {
    if (text.find(part) != std::string::npos) return words;
  }
  return text;
}

}  // namespace

std::string message_of(const std::exception& error) {
  if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) {
    return without_torch_words(torch->what_without_backtrace());
  }
  if (const auto* json = dynamic_cast<const JsonError*>(&error)) return words_of(*json);
  if (const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&error)) {
    return words_of(*file);
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "there is not enough memory";
  if (const auto* system = dynamic_cast<const std::system_error*>(&error)) {
    return "the system refused: " + system->code().message();
  }
  return without_torch_words(error.what());
}

}  // namespace train
