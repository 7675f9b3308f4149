// Learns a byte-level vocabulary by repeatedly merging the most frequent pair.

#include <algorithm>
#include <map>
#include <queue>
#include <stdexcept>

#include "gpt/tokenizer.h"

namespace gpt {
namespace {

using Pair = uint64_t;  // two ids, the left one in the high bits

Pair pair_of(uint32_t left, uint32_t right) { return static_cast<Pair>(left) << 32 | right; }

struct Word {
  std::vector<uint32_t> ids;
  int64_t count;
};

// Frequency of a pair, and the words that contain it or once did.
struct PairStatistics {
  int64_t count = 0;
  std::vector<uint32_t> words;
};

struct Candidate {
  int64_t count;
  Pair pair;
  bool operator<(const Candidate& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

class Learner {
 public:
  explicit Learner(const PieceCounts& counts) {
    for (int byte = 0; byte < 256; ++byte) add_token(std::string(1, static_cast<char>(byte)));
    // Sorted, so the result does not depend on the hash map's order.
    const std::map<std::string, int64_t> sorted(counts.begin(), counts.end());
    for (const auto& [piece, count] : sorted) {
      Word word{{}, count};
      for (const char byte : piece) word.ids.push_back(static_cast<unsigned char>(byte));
      words_.push_back(std::move(word));
      add_pairs(static_cast<uint32_t>(words_.size() - 1), +1);
    }
    for (const auto& [pair, statistics] : pairs_) queue_.push({statistics.count, pair});
  }

  /// Merges the most frequent pair; returns false if no pair is left.
  bool merge_best() {
    while (!queue_.empty()) {
      const auto [count, pair] = queue_.top();
      queue_.pop();
      auto& statistics = pairs_[pair];
      if (statistics.count != count || count == 0) continue;  // stale: a newer entry is queued
      const auto left = static_cast<uint32_t>(pair >> 32);
      const auto right = static_cast<uint32_t>(pair);
      replace(left, right, add_token(tokens_[left] + tokens_[right]), std::move(statistics.words));
      return true;
    }
    return false;
  }

  std::vector<std::string>& tokens() { return tokens_; }

 private:
  // Two pairs may give the same bytes; they share one token.
  uint32_t add_token(const std::string& bytes) {
    const auto [found, is_new] = id_of_.try_emplace(bytes, static_cast<uint32_t>(tokens_.size()));
    if (is_new) tokens_.push_back(bytes);
    return found->second;
  }

  void add_pairs(uint32_t index, int sign) {
    const auto& [ids, count] = words_[index];
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const Pair pair = pair_of(ids[i], ids[i + 1]);
      auto& statistics = pairs_[pair];
      statistics.count += sign * count;
      if (sign > 0 && (statistics.words.empty() || statistics.words.back() != index)) {
        statistics.words.push_back(index);
      }
      touched_.push_back(pair);
    }
  }

  // `where` is a copy: the pair's own list changes meanwhile. NOLINTNEXTLINE(performance-unnecessary-value-param)
  void replace(uint32_t left, uint32_t right, uint32_t merged, std::vector<uint32_t> where) {
    touched_.clear();
    for (const auto index : where) {
      auto& ids = words_[index].ids;
      std::vector<uint32_t> shorter;
      for (size_t i = 0; i < ids.size(); ++i) {
        const bool here = ids[i] == left && i + 1 < ids.size() && ids[i + 1] == right;
        shorter.push_back(here ? merged : ids[i]);
        i += here ? 1 : 0;
      }
      if (shorter.size() == ids.size()) continue;  // it no longer contains the pair
      add_pairs(index, -1);
      ids = std::move(shorter);
      add_pairs(index, +1);
    }
    std::sort(touched_.begin(), touched_.end());
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    for (const auto pair : touched_) queue_.push({pairs_[pair].count, pair});
  }

  std::vector<std::string> tokens_;
  std::unordered_map<std::string, uint32_t> id_of_;
  std::vector<Word> words_;
  std::unordered_map<Pair, PairStatistics> pairs_;
  std::priority_queue<Candidate> queue_;
  std::vector<Pair> touched_;
};

}  // namespace

void count_pieces(std::string_view text, PieceCounts& counts) {
  for (size_t at = 0; at < text.size();) {
    const auto piece = text.substr(at, piece_length(text, at));
    ++counts[std::string(piece)];
    at += piece.size();
  }
}

Vocabulary learn_vocabulary(
    const PieceCounts& counts, int64_t size, const std::function<void(int64_t)>& progress) {
  if (size < 257) {
    throw std::runtime_error(
        "a byte-level vocabulary needs at least 257 entries (256 bytes and end of text), not " +
        std::to_string(size));
  }
  Learner learner(counts);
  while (static_cast<int64_t>(learner.tokens().size()) + 1 < size) {
    if (!learner.merge_best()) {
      throw std::runtime_error(
          "the text only has enough pairs for a vocabulary of " +
          std::to_string(learner.tokens().size() + 1) + ", not " + std::to_string(size) +
          "; ask for fewer entries or give more text");
    }
    if (progress) progress(static_cast<int64_t>(learner.tokens().size()) + 1);
  }
  return Vocabulary(std::move(learner.tokens()));
}

}  // namespace gpt
