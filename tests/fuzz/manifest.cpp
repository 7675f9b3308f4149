// manifest.json, also with the checksum that it should have: else nothing behind the checksum would be tried.

#include "gpt/manifest.h"

#include "gpt/files.h"
#include "gpt/json.h"
#include "harness.h"

namespace {

std::string hex(const std::string& text) {
  char digits[16];
  std::snprintf(digits, sizeof digits, "%08x", gpt::crc32c(0, text.data(), text.size()));
  return digits;
}

// The text with the checksums of itself and of the vocabulary.
std::string vouched_for(const std::string& text, const std::string& vocabulary) {
  auto json = gpt::parse_json(text);
  if (!json || !json->is_object()) return text;
  json->erase("crc32c_of_the_rest");
  if (json->contains("vocabulary") && (*json)["vocabulary"].is_object()) {
    (*json)["vocabulary"]["crc32c"] = hex(vocabulary);
  }
  (*json)["crc32c_of_the_rest"] = hex(json->dump());
  return json->dump();
}

bool same(const gpt::Manifest& a, const gpt::Manifest& b) {
  bool equal = a.vocabulary == b.vocabulary && a.vocabulary_crc == b.vocabulary_crc &&
               a.made_from == b.made_from && a.shards.size() == b.shards.size();
  for (size_t i = 0; equal && i < a.shards.size(); ++i) {
    const auto &one = a.shards[i], &other = b.shards[i];
    equal = one.name == other.name && one.tokens == other.tokens && one.crcs == other.crcs;
  }
  return equal;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const bool honest = input.number(1) == 1;
  const std::string text = input.rest(), vocabulary = "any text";
  const std::string folder = fuzz::empty_folder();
  fuzz::write(folder, gpt::kManifestFile, honest ? vouched_for(text, vocabulary) : text);
  fuzz::write(folder, gpt::kVocabularyFile, vocabulary);
  const auto check = [&] {
    const auto manifest = gpt::read_manifest(folder);
    fuzz::require(manifest.has_value(), "a manifest is overlooked");
    gpt::write_manifest(folder, *manifest);
    fuzz::require(same(*gpt::read_manifest(folder), *manifest), "another manifest is read again");
  };
  fuzz::accepted(input, check, folder);
  return 0;
}
