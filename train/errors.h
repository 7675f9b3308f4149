#pragma once
// Errors in words.

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace train {

/// What an error says, of torch's own without the stack.
inline std::string message_of(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  return own != nullptr ? own->what_without_backtrace() : error.what();
}

}  // namespace train
