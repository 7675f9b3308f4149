#pragma once
// Error messages.

#include <exception>
#include <string>

namespace train {

/// The error's message in words for users: torch's without the stack trace, those of other libraries translated.
std::string message_of(const std::exception& error);

}  // namespace train
