#pragma once
// What several test files share.

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

/// The message of the error that `action` throws; fails the test if it throws none.
template <typename Error = c10::Error, typename Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

#define EXPECT_ERROR_SAYS(action, words) \
  EXPECT_NE(error_of([&] { action; }).find(words), std::string::npos) << error_of([&] { action; })
