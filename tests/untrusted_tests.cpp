// Files that nobody vouches for: JSON and headers of safetensors files. None may crash, hang or be believed.

#include <fstream>
#include <nlohmann/json.hpp>

#include "testing.h"
#include "train/checkpoint.h"
#include "train/errors.h"
#include "train/files.h"
#include "train/json.h"
#include "train/metrics.h"
#include "train/safetensors.h"

namespace train {
namespace {

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

TEST(UntrustedJsonTest, DepthIsLimitedBeforeAnythingIsBuilt) {
  for (const char* open : {"[", "{\"a\":", "[{\"a\":"}) {
    for (const int depth : {65, 100'000, 3'000'000}) {
      EXPECT_FALSE(parse_json(repeated(open, depth)));
    }
  }
  EXPECT_FALSE(parse_json(repeated("[", 100'000) + repeated("]", 100'000)));
  EXPECT_TRUE(parse_json(repeated("[", 64) + repeated("]", 64)));
  const auto brackets = parse_json("\"" + repeated("[\\\"{", 1000) + "\"");
  EXPECT_EQ(brackets->get<std::string>(), repeated("[\"{", 1000))
      << "those in strings do not count";
}

TEST(UntrustedJsonTest, OnlyWholeTextsWithNamesGivenOnceAreTaken) {
  for (const char* text :
       {"", "{", "{\"a\":1", "{\"a\":1}}", "{\"a\":1,}", "nul", "{\"a\":1,\"a\":2}",
        "{\"b\":{\"a\":1,\"c\":0,\"a\":1}}", "\"\xff\"", "{\"a\":NaN}", "\\"}) {
    EXPECT_FALSE(parse_json(text)) << text;
  }
  EXPECT_FALSE(parse_json(std::string_view("{}\0", 3))) << "zeros, as after a power failure";
  EXPECT_TRUE(parse_json("{\"a\":{\"a\":1},\"b\":[{\"a\":1},{\"a\":2}]}"));
}

TEST(UntrustedJsonTest, WholeNumbersAreNeitherRoundedNorCutOff) {
  for (const char* text :
       {"1.0", "1.5", "1e3", "1e300", "-1", "9223372036854775808", "92233720368547758079", "\"1\"",
        "true", "null", "[1]"}) {
    EXPECT_FALSE(whole_number(*parse_json(text))) << text;
  }
  EXPECT_EQ(whole_number(*parse_json("9223372036854775807")), INT64_MAX);
  EXPECT_EQ(whole_number(*parse_json("-3"), -3), -3);
  EXPECT_FALSE(whole_number(*parse_json("8"), 0, 7));
}

TEST(UntrustedJsonTest, FilesAreNamedInErrors) {
  const TemporaryFolder folder;
  replace_file(folder / "deep", repeated("{\"a\":", 100'000));
  replace_file(folder / "list", "[]");
  for (const char* name : {"deep", "list"}) {
    EXPECT_ERROR_SAYS(read_json(folder / name), "'" + folder / name + "' is damaged");
  }
  std::filesystem::resize_file(folder / "list", 17 << 20);
  EXPECT_ERROR_SAYS(read_json(folder / "list"), "at most 16777216");
}

TEST(UntrustedJsonTest, WrongStatesAndMetricsAreWords) {
  const TemporaryFolder run;
  make_folder(run / "checkpoints/step-000001");
  const std::string state = run / "checkpoints/step-000001/state.json";
  const auto damage_with = [&](const std::string& text) {
    replace_file(state, text);
    return damage(run / "checkpoints/step-000001");
  };
  for (const char* text :
       {"{}", "{\"files\":3}", "{\"files\":{\"a\":3}}", "{\"files\":{},\"version\":\"1\"}",
        "{\"files\":{},\"version\":1,\"step\":\"x\"}", "[1]", "{\"files\":{\"state.json\":{}}}"}) {
    const auto why = damage_with(text);
    EXPECT_NE(why, "") << text;
    EXPECT_EQ(why.find("json.exception"), std::string::npos) << why;
  }
  EXPECT_NE(damage_with(repeated("[", 100'000)), "");
  replace_file(
      run / "metrics.jsonl",
      "{\"step\":1}\n{\"step\":\"two\"}\n{\"step\":2.5}\n" + repeated("[", 100'000) + "\n");
  cut_back(run / "metrics.jsonl", [](int64_t, bool) { return true; });
  EXPECT_EQ(read_text(run / "metrics.jsonl"), "{\"step\":1}\n");
}

// A safetensors file with this header and as many bytes of data.
std::string file_with(const TemporaryFolder& folder, const std::string& header, size_t bytes) {
  std::ofstream file(folder / "file", std::ios::binary);
  const uint64_t size = header.size();
  file.write(reinterpret_cast<const char*>(&size), sizeof size);
  file << header << std::string(bytes, '\0');
  return folder / "file";
}

std::string entry(const char* name, const char* shape, int begin, int end) {
  return c10::str(
      "\"", name, "\":{\"dtype\":\"F32\",\"shape\":", shape, ",\"data_offsets\":[", begin, ",", end,
      "]}");
}

TEST(UntrustedTensorsTest, HeadersThatDoNotDescribeTheFileAreRefused) {
  const TemporaryFolder folder;
  const auto why = [&](const std::string& entries, size_t bytes) {
    return error_of([&] { load_tensors(file_with(folder, "{" + entries + "}", bytes)); });
  };
  const std::string good = entry("a", "[2]", 0, 8) + "," + entry("b", "[1]", 8, 12);
  EXPECT_EQ(load_tensors(file_with(folder, "{" + good + "}", 12)).size(), 2);
  const struct {
    std::string entries;
    size_t bytes;
    const char* words;
  } cases[] = {
      {entry("a", "[2]", 0, 8) + "," + entry("b", "[1]", 4, 8), 8, "b overlaps another tensor"},
      {entry("a", "[2]", 0, 8) + "," + entry("b", "[2]", 0, 8), 8, "overlaps another tensor"},
      {entry("a", "[2]", 0, 8) + "," + entry("b", "[1]", 12, 16), 16, "b begins after a gap"},
      {entry("a", "[2]", 4, 12), 12, "a begins after a gap"},
      {good, 16, "4 bytes at its end belong to no tensor"},
      {good, 8, "it ends before its tensors do"},
      {entry("a", "[3]", 0, 8), 8, "a has a size that does not match its shape"},
      {entry("a", "[2.0]", 0, 8), 8, "a has no shape of whole numbers"},
      {entry("a", "[1.5]", 0, 6), 6, "a has no shape of whole numbers"},
      {entry("a", "[-2]", 0, 8), 8, "a has no shape of whole numbers"},
      {entry("a", "2", 0, 8), 8, "a has no shape of whole numbers"},
      {entry("a", "[4294967296,4294967296]", 0, 0), 0, "a has a size that does not match"},
      {entry("a", "[9223372036854775807,2]", 0, 8), 8, "a has a size that does not match"},
      {entry("a", "[2]", 8, 0), 8, "a has no begin and end"},
      {entry("a", "[2]", 0, 8) + "," + entry("a", "[2]", 0, 8), 8, "not a valid JSON object"},
      {"\"a\":3", 0, "a has no shape"},
      {"\"a\":{\"shape\":[],\"data_offsets\":[0,4]}", 4, "a has no type"},
      {"\"a\":{\"dtype\":\"F4\",\"shape\":[],\"data_offsets\":[0,4]}", 4,
       "the type F4, which is not"},
      {repeated("\"a\":{", 100'000), 0, "not a valid JSON object"}};
  for (const auto& [entries, bytes, words] : cases) {
    const auto said = why(entries, bytes);
    EXPECT_NE(said.find(words), std::string::npos) << said;
    EXPECT_NE(said.find(folder / "file"), std::string::npos) << said;
  }
  std::ofstream(folder / "large", std::ios::binary).write("\x01\xe1\xf5\x05\0\0\0\0{", 9);
  std::filesystem::resize_file(folder / "large", 200'000'000);
  EXPECT_ERROR_SAYS(load_tensors(folder / "large"), "its header of 100000001 bytes is too large");
  EXPECT_ERROR_SAYS(load_tensors(folder.path()), "is a folder");
}

TEST(UntrustedTensorsTest, ManyEntriesTakeSeconds) {
  constexpr int kEntries = 300'000;  // over an hour if each entry searched all others
  const TemporaryFolder folder;
  std::string header = "{";
  for (int i = 0; i < kEntries; ++i) {
    if (i > 0) header += ',';
    header += entry(c10::str("weight.", i).c_str(), "[1]", 4 * i, 4 * i + 4);
  }
  EXPECT_EQ(load_tensors(file_with(folder, header + "}", 4 * kEntries)).size(), kEntries);
}

TEST(ErrorsTest, NoLibrarySpeaksForItself) {
  const auto words_after = [](auto&& action) {
    try {
      action();
    } catch (const std::exception& error) {
      return message_of(error);
    }
    return std::string();
  };
  EXPECT_EQ(words_after([] { (void)nlohmann::json::object().at("step"); }), "'step' is missing");
  EXPECT_EQ(
      words_after([] { (void)nlohmann::json("x").get<int>(); }), "it has a missing or wrong value");
  EXPECT_EQ(
      words_after([] { std::filesystem::create_directory("/nowhere/file"); }),
      "'/nowhere/file' cannot be used: No such file or directory");
  EXPECT_EQ(
      words_after([] { torch::ones({1}).add_(torch::ones({1}), 1e308); }),
      "a number became too large; try a lower learning rate");
  EXPECT_EQ(
      words_after([] { torch::empty({int64_t{1} << 40, int64_t{1} << 40}); }),
      "a tensor would be too large for any memory");
  EXPECT_EQ(words_after([] { throw std::bad_alloc(); }), "there is not enough memory");
  EXPECT_EQ(
      words_after([] { TORCH_CHECK_VALUE(false, "steps should be 1 or more"); }),
      "steps should be 1 or more");
}

}  // namespace
}  // namespace train
