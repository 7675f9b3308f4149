#include "gpt/corpus.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <thread>

#include "gpt/shards.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEndOfText = "<|endoftext|>";
constexpr size_t kBatchBytes = size_t{32} << 20;  // text encoded at a time
constexpr size_t kChunkBytes = size_t{1} << 19;   // text per thread at a time

std::vector<std::string> files_of(const std::vector<std::string>& inputs) {
  std::vector<std::string> files;
  for (const auto& input : inputs) {
    if (input == "-" || fs::is_regular_file(input)) {
      files.push_back(input);
    } else if (fs::is_directory(input)) {
      const size_t first = files.size();
      for (const auto& entry : fs::recursive_directory_iterator(input)) {
        if (entry.is_regular_file() && entry.path().extension() == ".txt") {
          files.push_back(entry.path().string());
        }
      }
      if (files.size() == first) throw std::runtime_error("'" + input + "' contains no .txt files");
      std::sort(files.begin() + static_cast<std::ptrdiff_t>(first), files.end());
    } else {
      throw std::runtime_error("'" + input + "' is neither a file nor a folder");
    }
  }
  return files;
}

std::string read_file(const std::string& path) {
  const auto all = [](std::istream& stream) {
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  if (path == "-") return all(std::cin);
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("'" + path + "' cannot be read");
  return all(file);
}

// The next position, at or after `at`, where a document can be cut without changing its pieces: before a space
// between two letters, which always starts a piece.
size_t safe_cut(std::string_view text, size_t at) {
  for (; at + 1 < text.size(); ++at) {
    if (text[at] == ' ' && std::isalpha(static_cast<unsigned char>(text[at - 1])) != 0 &&
        std::isalpha(static_cast<unsigned char>(text[at + 1])) != 0) {
      return at;
    }
  }
  return text.size();
}

// Runs work(i, thread) for i in [0, count) in parallel and rethrows the first exception.
void in_parallel(size_t count, int threads, const std::function<void(size_t, int)>& work) {
  std::atomic<size_t> next = 0;
  std::exception_ptr error;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  const auto run = [&](int thread) {
    try {
      for (size_t i; (i = next++) < count;) work(i, thread);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> pool;
  for (int thread = 1; thread < threads; ++thread) pool.emplace_back(run, thread);
  run(0);
  for (auto& thread : pool) thread.join();
  if (error) std::rethrow_exception(error);
}

// A batch of documents, cut into chunks that threads encode in parallel.
struct Batch {
  std::string text;
  struct Chunk {
    size_t begin, end;
    bool starts_document, validation;
  };
  std::vector<Chunk> chunks;

  void add(std::string_view document, bool validation) {
    const size_t offset = text.size();
    text += document;
    for (size_t begin = 0; begin < document.size();) {
      const size_t end = begin + kChunkBytes < document.size()
                             ? safe_cut(document, begin + kChunkBytes)
                             : document.size();
      chunks.push_back({offset + begin, offset + end, begin == 0, validation});
      begin = end;
    }
  }
  std::string_view view(const Chunk& chunk) const {
    return std::string_view(text).substr(chunk.begin, chunk.end - chunk.begin);
  }
};

// Where the last `fraction` of a text begins: after a nearby line end, or else after a nearby space.
size_t tail_start(std::string_view text, double fraction) {
  const auto wanted = static_cast<size_t>(static_cast<double>(text.size()) * (1 - fraction));
  for (const char separator : {'\n', ' '}) {
    const size_t at = text.find(separator, wanted);
    if (at != std::string_view::npos && at + 1 < text.size() && at < wanted + 10000) return at + 1;
  }
  return text.size();
}

// Passes all documents to take(batch), each marked as training or validation.
void for_each_batch(const CorpusOptions& options, const std::function<void(const Batch&)>& take) {
  Batch batch;
  const auto flush = [&] {
    if (!batch.chunks.empty()) take(batch);
    batch = {};
  };
  const auto add = [&](std::string_view document, bool validation) {
    batch.add(document, validation);
    if (batch.text.size() >= kBatchBytes) flush();
  };
  const double fraction = options.validation_inputs.empty() ? options.validation_fraction : 0;
  const auto stride = fraction > 0 ? std::max<int64_t>(2, std::llround(1 / fraction)) : int64_t{0};
  // The second of every `stride` documents goes to validation. The first document is held back until a second
  // arrives; if there is only one, it is cut in two.
  std::string first;
  int64_t count = 0;
  for_each_document(options.inputs, [&](std::string_view document) {
    if (count == 1) add(first, false);
    if (count == 0) {
      first = document;
    } else {
      add(document, stride > 0 && count % stride == 1);
    }
    ++count;
  });
  if (count == 1) {
    const size_t cut = fraction > 0 ? tail_start(first, fraction) : first.size();
    add(std::string_view(first).substr(0, cut), false);
    if (cut < first.size()) add(std::string_view(first).substr(cut), true);
  }
  for_each_document(
      options.validation_inputs, [&](std::string_view document) { add(document, true); });
  flush();
}

int64_t total_bytes(const CorpusOptions& options) {
  int64_t bytes = 0;
  for (const auto* inputs : {&options.inputs, &options.validation_inputs}) {
    for (const auto& file : files_of(*inputs)) {
      if (file != "-") bytes += static_cast<int64_t>(fs::file_size(file));
    }
  }
  return std::max<int64_t>(bytes, 1);
}

Vocabulary learn(const CorpusOptions& options, const CorpusProgress& progress, double all_bytes) {
  std::vector<PieceCounts> counts(options.threads);
  double done = 0;
  for_each_batch(options, [&](const Batch& batch) {
    in_parallel(batch.chunks.size(), options.threads, [&](size_t i, int thread) {
      if (!batch.chunks[i].validation) count_pieces(batch.view(batch.chunks[i]), counts[thread]);
    });
    done += static_cast<double>(batch.text.size());
    progress("counting", std::min(1.0, done / all_bytes));
  });
  for (size_t i = 1; i < counts.size(); ++i) {
    for (const auto& [piece, count] : counts[i]) counts[0][piece] += count;
  }
  return learn_vocabulary(counts[0], options.learn_size, [&](int64_t entries) {
    progress("learning", static_cast<double>(entries) / static_cast<double>(options.learn_size));
  });
}

// The shards that ShardWriter names: train_000000.bin, val_000000.bin, …
std::vector<fs::path> shards_in(const std::string& folder) {
  std::vector<fs::path> shards;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.rfind("train_", 0) == 0 || name.rfind("val_", 0) == 0;
    if (ours && entry.path().extension() == ".bin") shards.push_back(entry.path());
  }
  return shards;
}

void check_size(int64_t vocabulary) {
  if (vocabulary <= 65536) return;
  throw std::runtime_error(
      "shards hold 16-bit tokens, so a vocabulary can have at most 65536 entries, not " +
      std::to_string(vocabulary));
}

}  // namespace

void for_each_document(
    const std::vector<std::string>& inputs, const std::function<void(std::string_view)>& take) {
  for (const auto& file : files_of(inputs)) {
    const std::string text = read_file(file);
    size_t begin = 0;
    const auto emit = [&](size_t end) {
      const auto document = std::string_view(text).substr(begin, end - begin);
      if (document.find_first_not_of(" \t\r\n") != std::string_view::npos) take(document);
    };
    for (size_t line = 0; line < text.size();) {
      const size_t end = std::min(text.find('\n', line), text.size());
      auto content = std::string_view(text).substr(line, end - line);
      if (content.ends_with('\r')) content.remove_suffix(1);
      if (content == kEndOfText) {
        emit(line);
        begin = std::min(end + 1, text.size());
      }
      line = end + 1;
    }
    emit(text.size());
  }
}

CorpusSummary tokenize_corpus(const CorpusOptions& options, const CorpusProgress& progress) {
  if (options.vocabulary.empty() == (options.learn_size == 0)) {
    throw std::runtime_error(
        "give exactly one of --vocabulary gpt2, --vocabulary FILE or --learn 4096");
  }
  if (!options.overwrite && !shards_in(options.folder).empty()) {
    throw std::runtime_error(
        "'" + options.folder +
        "' already contains shards; choose another --out or add --overwrite");
  }
  check_size(options.learn_size);
  const bool learning = options.vocabulary.empty();
  if (learning && std::count(options.inputs.begin(), options.inputs.end(), "-") > 0) {
    throw std::runtime_error(
        "--learn reads the text twice, so it cannot read standard input; give files instead");
  }
  const auto all_bytes = static_cast<double>(total_bytes(options));
  const Vocabulary vocabulary =
      learning ? learn(options, progress, all_bytes) : Vocabulary::from_file(options.vocabulary);
  check_size(vocabulary.size());
  fs::create_directories(options.folder);
  for (const auto& shard : shards_in(options.folder)) fs::remove(shard);
  ShardWriter writers[] = {
      {options.folder, "train", options.shard_tokens},
      {options.folder, "val", options.shard_tokens}};
  CorpusSummary summary;
  CorpusCounts* counts[] = {&summary.training, &summary.validation};
  std::vector<Encoder> encoders(options.threads, Encoder(vocabulary));
  double done = 0;
  for_each_batch(options, [&](const Batch& batch) {
    std::vector<std::vector<uint32_t>> ids(batch.chunks.size());
    in_parallel(batch.chunks.size(), options.threads, [&](size_t i, int thread) {
      if (batch.chunks[i].starts_document) ids[i].push_back(vocabulary.end_of_text());
      encoders[thread].encode(batch.view(batch.chunks[i]), ids[i]);
    });
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto& chunk = batch.chunks[i];
      writers[chunk.validation].write(ids[i]);
      counts[chunk.validation]->documents += chunk.starts_document ? 1 : 0;
      counts[chunk.validation]->bytes += static_cast<int64_t>(chunk.end - chunk.begin);
    }
    done += static_cast<double>(batch.text.size());
    progress("encoding", std::min(1.0, done / all_bytes));
  });
  summary.vocabulary = vocabulary.size();
  summary.training.tokens = writers[0].finish();
  summary.validation.tokens = writers[1].finish();
  vocabulary.save_tiktoken(options.folder + "/vocabulary.tiktoken");
  return summary;
}

}  // namespace gpt
