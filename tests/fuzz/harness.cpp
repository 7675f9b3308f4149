#include "harness.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <typeinfo>

// Options of the sanitizers, for every target. libtorch is not compiled with them: it keeps memory until the end, and
// its own copies of inline functions are no error.
extern "C" const char* __asan_default_options() {
  return "detect_odr_violation=0:detect_leaks=0:allocator_may_return_null=0";
}
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }

namespace fuzz {
namespace {

namespace fs = std::filesystem;

// As in tests/python/test_words.py.
constexpr const char* kLeaks[] = {
    "json.exception",
    "filesystem error",
    "basic_",
    "std::",
    "c10::",
    "at::",
    "CLI::",
    "iostream",
    "bad_alloc",
    "stoi",
    "stol",
    "stod",
    "vector::",
    "map::at",
    "Storage size",
    "cannot be converted to type",
    "probability tensor",
    "Could not convert",
    "not in range",
    "required but received",
    "nvalid argument",
    "Traceback",
    "INTERNAL ASSERT",
    "Expected ",
    "__cxa",
};

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "fuzz: %s\n", why.c_str());
  std::abort();
}

// The words as characters, so that libFuzzer does not see what is compared and offer it as input.
bool contains(std::string_view text, std::string_view word) {
  return std::search(text.begin(), text.end(), word.begin(), word.end()) != text.end();
}

// The message of an exception of ours. All others end the process.
std::string words_of(const std::exception& error) {
  if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) {
    return torch->what_without_backtrace();
  }
  if (typeid(error) == typeid(std::runtime_error)) return error.what();
  stop(std::string("an exception of type ") + typeid(error).name() + ": " + error.what());
}

std::string make_folder() {
  std::string name = (fs::temp_directory_path() / "fuzz-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) stop("cannot make " + name);
  static std::string made;
  made = name;
  std::atexit([] {
    std::error_code ignored;
    fs::remove_all(made, ignored);
  });
  return name;
}

}  // namespace

std::string_view Input::take(std::string_view separator) {
  const size_t end = std::min(all_.find(separator, at_), all_.size());
  const auto taken = all_.substr(at_, end - at_);
  at_ = std::min(end + separator.size(), all_.size());
  return taken;
}

int64_t Input::number(int64_t most) {
  uint64_t value = 0;
  for (const char c : take("\n")) {
    if (c >= '0' && c <= '9') value = 10 * value + static_cast<uint64_t>(c - '0');
  }
  return static_cast<int64_t>(value % (static_cast<uint64_t>(most) + 1));
}

std::string Input::part() { return std::string(take("\n---\n")); }

std::string Input::rest() {
  const auto text = all_.substr(at_);
  at_ = all_.size();
  return std::string(text);
}

std::vector<std::string> Input::lines() {
  std::vector<std::string> lines;
  while (at_ < all_.size()) lines.emplace_back(take("\n"));
  return lines;
}

bool accepted(const Input& input, const std::function<void()>& action, const std::string& names) {
  try {
    action();
    return true;
  } catch (const std::exception& error) {
    const std::string message = words_of(error);
    if (!contains(message, names)) stop("'" + names + "' is not named: " + message);
    check_words(input, message);
  }
  return false;
}

void check_words(const Input& input, const std::string& message) {
  if (message.empty()) stop("an error without words");
  std::string given(input.all());  // some readers leave blanks out
  std::erase(given, ' ');
  for (const char* word : kLeaks) {
    std::string bare(word);
    std::erase(bare, ' ');
    if (contains(message, word) && !contains(given, bare)) {
      stop(std::string("'") + word + "' is no word of ours: " + message);
    }
  }
}

void require(bool good, const char* what) {
  if (!good) stop(what);
}

const std::string& empty_folder() {
  static const std::string folder = make_folder();
  for (const auto& entry : fs::directory_iterator(folder)) fs::remove_all(entry.path());
  return folder;
}

std::string write(const std::string& folder, const std::string& name, std::string_view bytes) {
  const fs::path path = fs::path(folder) / name;
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<long>(bytes.size()));
  return path.string();
}

std::string read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace fuzz
