#pragma once
// What the fuzz targets share. A target takes any bytes: a reader may accept them or refuse them in our own words.
// Everything else ends the process, so that libFuzzer keeps the bytes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fuzz {

/// The bytes of one attempt, taken from the front. Everything but raw data is text, so that inputs can be read.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : all_(reinterpret_cast<const char*>(data), size) {}
  /// The number in the next line, from 0 to `most`; 0 if there is none.
  int64_t number(int64_t most);
  /// Up to a line "---", or the rest.
  std::string part();
  std::string rest();
  /// The lines of the rest.
  std::vector<std::string> lines();
  std::string_view all() const { return all_; }

 private:
  std::string_view take(std::string_view separator);
  std::string_view all_;
  size_t at_ = 0;
};

/// Whether the action succeeds. If it throws, the exception must be one of ours. Its message must contain `names`, and
/// none of the words that only the inside of a library uses, unless the input contains them.
bool accepted(
    const Input& input, const std::function<void()>& action, const std::string& names = "");

/// Ends the process if a message has words of a library's inside. Words of the input are allowed.
void check_words(const Input& input, const std::string& message);

/// Ends the process unless `good`.
void require(bool good, const char* what);

/// An empty folder, the same for every attempt. What the last attempt left in it is deleted.
const std::string& empty_folder();

/// Writes FOLDER/NAME and returns its path. Missing folders are created.
std::string write(const std::string& folder, const std::string& name, std::string_view bytes);
std::string read(const std::string& path);

}  // namespace fuzz
