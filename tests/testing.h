#pragma once
// Helpers for several test files.

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

/// A new folder, deleted with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "group_muon_XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// The message of the error that `action` throws. Fails the test if it throws none.
template <typename Error = c10::Error, typename Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    if constexpr (std::is_base_of_v<c10::Error, Error>) {
      return error.what_without_backtrace();
    } else {
      return error.what();
    }
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

#define EXPECT_ERROR_SAYS(action, words) \
  EXPECT_NE(error_of([&] { action; }).find(words), std::string::npos) << error_of([&] { action; })
