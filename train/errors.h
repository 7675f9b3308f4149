#pragma once
// Error messages.

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace train {

/// The error's message; for torch errors without the stack trace.
inline std::string message_of(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  return own != nullptr ? own->what_without_backtrace() : error.what();
}

}  // namespace train
