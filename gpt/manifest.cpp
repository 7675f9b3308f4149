#include "gpt/manifest.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "gpt/files.h"
#include "gpt/json.h"
#include "gpt/tokenizer.h"

namespace gpt {
namespace {

using Json = nlohmann::json;

constexpr int kFormat = 1;
constexpr size_t kLargest = size_t{256} << 20;
constexpr int64_t kGpt2Vocabulary = 50257;

std::string path_in(const std::string& folder, const char* name) { return folder + "/" + name; }

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error("'" + path + "' " + what + remedy());
}

std::string to_text(const std::vector<uint32_t>& crcs) {
  std::string text;
  for (const uint32_t crc : crcs) {
    char hex[16];
    std::snprintf(hex, sizeof hex, "%s%08x", text.empty() ? "" : " ", crc);
    text += hex;
  }
  return text;
}

std::vector<uint32_t> from_text(const std::string& text) {
  std::vector<uint32_t> crcs;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    crcs.push_back(static_cast<uint32_t>(std::strtoul(word.c_str(), nullptr, 16)));
  }
  return crcs;
}

// The checksum of everything else in the file.
std::string own_checksum(const Json& json) {
  const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return to_text({crc32c(0, text.data(), text.size())});
}

Json parse(const std::string& text, const std::string& path) {
  auto json = parse_json(text);
  if (!json) fail(path, "is damaged");
  return std::move(*json);
}

int64_t checked(std::optional<int64_t> number) {
  if (!number) throw std::out_of_range("a number");
  return *number;
}

Manifest from_json(const Json& json) {
  Manifest manifest;
  manifest.vocabulary = checked(whole_number(json.at("vocabulary").at("entries")));
  manifest.vocabulary_crc = from_text(json.at("vocabulary").at("crc32c")).at(0);
  for (const auto& entry : json.at("shards")) {
    const int64_t tokens = checked(whole_number(entry.at("tokens"), 0, INT32_MAX));
    manifest.shards.push_back({entry.at("name"), tokens, from_text(entry.at("crc32c"))});
    const auto blocks = static_cast<int64_t>(manifest.shards.back().crcs.size());
    if (blocks != (tokens + kBlockTokens - 1) / kBlockTokens) throw std::out_of_range("a shard");
  }
  manifest.made_from = json.at("made_from").dump();
  return manifest;
}

}  // namespace

std::string remedy() {
  return "; restore the folder from a copy, or make it again with 'group-muon tokenize "
         "--overwrite'";
}

void write_manifest(const std::string& folder, const Manifest& manifest) {
  Json json = {
      {"format", kFormat},
      {"vocabulary",
       {{"entries", manifest.vocabulary}, {"crc32c", to_text({manifest.vocabulary_crc})}}},
      {"tokens_per_crc32c", kBlockTokens},
      {"shards", Json::array()},
      {"made_from", Json::parse(manifest.made_from)}};
  for (const auto& [name, tokens, crcs] : manifest.shards) {
    json["shards"].push_back({{"name", name}, {"tokens", tokens}, {"crc32c", to_text(crcs)}});
  }
  json["crc32c_of_the_rest"] = own_checksum(json);
  OutputFile file(path_in(folder, kManifestFile));
  file.write(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  file.close();
}

std::optional<Manifest> read_manifest(const std::string& folder) {
  const std::string path = path_in(folder, kManifestFile);
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) return std::nullopt;
  Json json = parse(read_whole(path, kLargest), path);
  Manifest manifest;
  try {
    if (json.at("format") != kFormat) {
      throw std::runtime_error(
          "'" + path + "' has format " + json.at("format").dump() +
          ", but this program only knows " + std::to_string(kFormat) + "; use a newer group-muon");
    }
    const std::string expected = json.at("crc32c_of_the_rest");
    json.erase("crc32c_of_the_rest");
    if (own_checksum(json) != expected) fail(path, "is damaged");
    manifest = from_json(json);
  } catch (const Json::exception&) {
    fail(path, "is damaged");
  } catch (const std::out_of_range&) {
    fail(path, "is damaged");
  }
  const std::string vocabulary = path_in(folder, kVocabularyFile);
  const std::string text = read_whole(vocabulary, kLargest);
  if (crc32c(0, text.data(), text.size()) != manifest.vocabulary_crc) {
    fail(vocabulary, "is not the vocabulary that the shards were made with");
  }
  return manifest;
}

int64_t vocabulary_of_data(const std::string& folder) {
  if (const auto manifest = read_manifest(folder)) return manifest->vocabulary;
  const std::string vocabulary = path_in(folder, kVocabularyFile);
  std::error_code error;
  return std::filesystem::exists(vocabulary, error) ? Vocabulary::from_tiktoken(vocabulary).size()
                                                    : kGpt2Vocabulary;
}

}  // namespace gpt
