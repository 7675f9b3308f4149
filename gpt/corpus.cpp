#include "gpt/corpus.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "gpt/documents.h"
#include "gpt/files.h"
#include "gpt/shards.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBatchBytes = size_t{2} << 20;  // text encoded at a time, per thread
constexpr size_t kBatchParts = 1 << 14;          // the same in parts
constexpr int kMostThreads = 256;
constexpr int64_t kTailSearch = 10000;  // how far to look for a line end, to cut a document there
constexpr const char* kCopyFile = "/copy-of-first-document";

// Runs work(i, thread) for i in [0, count) in parallel and rethrows the first exception. If the system does not give as
// many threads, fewer do the work.
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
  pool.reserve(threads);
  try {
    for (int thread = 1; thread < threads; ++thread) pool.emplace_back(run, thread);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // No more threads, or no memory for one: those that run do the work.
  }
  run(0);
  for (auto& thread : pool) thread.join();
  if (error) std::rethrow_exception(error);
}

// Parts of documents that threads encode in parallel.
struct Batch {
  std::string text;
  struct Part {
    size_t begin, end;
    bool starts_document, validation;
  };
  std::vector<Part> parts;

  void add(const TextPart& part, bool validation) {
    parts.push_back(
        {text.size(), text.size() + part.text.size(), part.starts_document, validation});
    text += part.text;
  }
  std::string_view view(const Part& part) const {
    return std::string_view(text).substr(part.begin, part.end - part.begin);
  }
};

// Where the last `fraction` of a document begins: after a nearby line end, or else after a nearby space.
int64_t tail_start(const std::string& path, int64_t offset, int64_t size, double fraction) {
  const auto wanted = static_cast<int64_t>(static_cast<double>(size) * (1 - fraction));
  std::string text(static_cast<size_t>(std::min(kTailSearch, size - wanted)), '\0');
  text.resize(InputFile(path).read_at(offset + wanted, text.data(), text.size()));
  for (const char separator : {'\n', ' '}) {
    const size_t at = text.find(separator);
    if (at == std::string::npos) continue;
    const int64_t start = wanted + static_cast<int64_t>(at) + 1;
    if (start < size) return start;
  }
  return size;
}

// The first document, set aside until it is known whether it is the only one. It is read again from its file. Standard
// input can be read only once and is copied to a file in `folder`.
class FirstDocument {
 public:
  explicit FirstDocument(std::string folder) : folder_(std::move(folder)) {}
  ~FirstDocument() {
    std::error_code ignored;
    if (copy_) fs::remove(folder_ + kCopyFile, ignored);
  }
  FirstDocument(const FirstDocument&) = delete;
  FirstDocument& operator=(const FirstDocument&) = delete;

  void add(const TextPart& part) {
    if (size_ == 0 && *part.file == "-") {
      copy_ = std::make_unique<OutputFile>(folder_ + kCopyFile);
      path_ = folder_ + kCopyFile;
    } else if (size_ == 0) {
      path_ = *part.file;
      offset_ = part.offset;
    }
    if (copy_) copy_->write(part.text);
    size_ += static_cast<int64_t>(part.text.size());
  }

  /// Passes it on: the last `tail` of it as validation.
  void release(double tail, const std::function<void(const TextPart&, bool validation)>& take) {
    if (size_ == 0) return;
    const int64_t cut = tail > 0 ? tail_start(path_, offset_, size_, tail) : size_;
    for_each_part(path_, offset_, cut, [&](const TextPart& part) { take(part, false); });
    if (cut == size_) return;
    for_each_part(
        path_, offset_ + cut, size_ - cut, [&](const TextPart& part) { take(part, true); });
  }

 private:
  std::string folder_, path_;
  int64_t offset_ = 0, size_ = 0;
  std::unique_ptr<OutputFile> copy_;
};

// Passes all documents to take(batch), each marked as training or validation. `folder` is for temporary files.
void for_each_batch(
    const CorpusOptions& options, const std::string& folder,
    const std::function<void(const Batch&)>& take) {
  Batch batch;
  const auto threads = static_cast<size_t>(options.threads);
  const auto flush = [&] {
    if (!batch.parts.empty()) take(batch);
    batch.text.clear();
    batch.parts.clear();
  };
  const auto add = [&](const TextPart& part, bool validation) {
    batch.add(part, validation);
    if (batch.text.size() >= kBatchBytes * threads || batch.parts.size() >= kBatchParts * threads) {
      flush();
    }
  };
  const double fraction = options.validation_inputs.empty() ? options.validation_fraction : 0;
  const auto stride = fraction > 0 ? std::max<int64_t>(2, std::llround(1 / fraction)) : int64_t{0};
  // The second of every `stride` documents goes to validation. If there is only one, it is cut in two.
  FirstDocument first(folder);
  int64_t count = 0;
  for (const auto& file : text_files(options.inputs)) {
    for_each_part(file, [&](const TextPart& part) {
      count += part.starts_document ? 1 : 0;
      if (stride > 0 && count == 1) return first.add(part);
      if (part.starts_document && count == 2) first.release(0, add);
      add(part, stride > 0 && count % stride == 2 % stride);
    });
  }
  if (count == 1) first.release(fraction, add);
  for (const auto& file : text_files(options.validation_inputs)) {
    for_each_part(file, [&](const TextPart& part) { add(part, true); });
  }
  flush();
}

int64_t total_bytes(const CorpusOptions& options) {
  int64_t bytes = 0;
  for (const auto* inputs : {&options.inputs, &options.validation_inputs}) {
    for (const auto& file : text_files(*inputs)) {
      if (file != "-") bytes += InputFile(file).stamp().bytes;
    }
  }
  return std::max<int64_t>(bytes, 1);
}

// Reads, encodes and writes a corpus into a folder that nobody else sees yet.
class Tokenizer {
 public:
  Tokenizer(const CorpusOptions& options, const CorpusProgress& progress, std::string folder)
      : options_(options),
        progress_(progress),
        folder_(std::move(folder)),
        all_bytes_(static_cast<double>(total_bytes(options))) {}
  CorpusSummary run();

 private:
  Vocabulary learn();
  CorpusSummary encode(const Vocabulary& vocabulary, Manifest& manifest);

  const CorpusOptions& options_;
  const CorpusProgress& progress_;
  std::string folder_;
  double all_bytes_;
};

Vocabulary Tokenizer::learn() {
  std::vector<PieceCounts> counts(options_.threads);
  double done = 0;
  for_each_batch(options_, folder_, [&](const Batch& batch) {
    in_parallel(batch.parts.size(), options_.threads, [&](size_t i, int thread) {
      if (!batch.parts[i].validation) count_pieces(batch.view(batch.parts[i]), counts[thread]);
    });
    done += static_cast<double>(batch.text.size());
    progress_("counting", std::min(1.0, done / all_bytes_));
  });
  for (size_t i = 1; i < counts.size(); ++i) {
    for (const auto& [piece, count] : counts[i]) counts[0][piece] += count;
    counts[i] = {};
  }
  if (counts[0].empty()) throw std::runtime_error("the inputs contain no text to learn from");
  return learn_vocabulary(counts[0], options_.learn_size, [&](int64_t entries) {
    progress_("learning", static_cast<double>(entries) / static_cast<double>(options_.learn_size));
  });
}

CorpusSummary Tokenizer::encode(const Vocabulary& vocabulary, Manifest& manifest) {
  ShardWriter writers[] = {
      {folder_, "train", options_.shard_tokens}, {folder_, "val", options_.shard_tokens}};
  CorpusSummary summary;
  CorpusCounts* counts[] = {&summary.training, &summary.validation};
  std::vector<Encoder> encoders(options_.threads, Encoder(vocabulary));
  std::vector<std::vector<uint32_t>> ids;
  double done = 0;
  for_each_batch(options_, folder_, [&](const Batch& batch) {
    if (ids.size() < batch.parts.size()) ids.resize(batch.parts.size());
    in_parallel(batch.parts.size(), options_.threads, [&](size_t i, int thread) {
      ids[i].clear();
      if (batch.parts[i].starts_document) ids[i].push_back(vocabulary.end_of_text());
      encoders[thread].encode(batch.view(batch.parts[i]), ids[i]);
    });
    for (size_t i = 0; i < batch.parts.size(); ++i) {
      const auto& part = batch.parts[i];
      writers[part.validation].write(ids[i]);
      counts[part.validation]->documents += part.starts_document ? 1 : 0;
      counts[part.validation]->bytes += static_cast<int64_t>(part.end - part.begin);
      counts[part.validation]->tokens += static_cast<int64_t>(ids[i].size());
    }
    done += static_cast<double>(batch.text.size());
    progress_("encoding", std::min(1.0, done / all_bytes_));
  });
  for (auto& writer : writers) {
    for (auto& record : writer.finish()) manifest.shards.push_back(std::move(record));
  }
  return summary;
}

std::string made_from(const CorpusOptions& options, const CorpusSummary& summary) {
  const auto json_of = [](const CorpusCounts& counts) {
    return nlohmann::json{
        {"documents", counts.documents}, {"bytes", counts.bytes}, {"tokens", counts.tokens}};
  };
  const nlohmann::json json = {
      {"program", options.program},
      {"command", "tokenize"},
      {"inputs", options.inputs},
      {"validation", options.validation_inputs},
      {"validation-fraction", options.validation_fraction},
      {"vocabulary", options.vocabulary},
      {"learn", options.learn_size},
      {"shard-tokens", options.shard_tokens},
      {"training_text", json_of(summary.training)},
      {"validation_text", json_of(summary.validation)}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

CorpusSummary Tokenizer::run() {
  const Vocabulary vocabulary =
      options_.vocabulary.empty() ? learn() : Vocabulary::from_file(options_.vocabulary);
  if (vocabulary.size() > 65536) {
    throw std::runtime_error(
        "shards hold 16-bit tokens, so a vocabulary can have at most 65536 entries, not " +
        std::to_string(vocabulary.size()));
  }
  Manifest manifest;
  CorpusSummary summary = encode(vocabulary, manifest);
  if (summary.training.tokens == 0) {
    throw std::runtime_error("the inputs contain no text, so there is nothing to write");
  }
  if (summary.validation.tokens == 0 && !options_.validation_inputs.empty()) {
    throw std::runtime_error("the inputs of --validation contain no text");
  }
  summary.vocabulary = manifest.vocabulary = vocabulary.size();
  OutputFile file(folder_ + "/" + kVocabularyFile);
  file.write(vocabulary.to_tiktoken());
  file.close();
  manifest.vocabulary_crc = file.crc();
  manifest.made_from = made_from(options_, summary);
  write_manifest(folder_, manifest);
  return summary;
}

// Whether tokenize, this one or an older one, writes files of this name.
bool is_ours(const std::string& name) {
  const bool shard = name.starts_with("train_") || name.starts_with("val_");
  return name == kManifestFile || name == kVocabularyFile ||
         (shard && (name.ends_with(".bin") || name.ends_with(".bin.tmp")));
}

// The folder to write, without symbolic links. Refuses one that cannot be replaced as a whole.
std::string place_for(const CorpusOptions& options) {
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error("'" + options.folder + "' " + why);
  };
  std::error_code error;
  fs::path place = fs::absolute(options.folder).lexically_normal();
  if (!place.has_filename()) place = place.parent_path();
  const auto type = fs::symlink_status(place, error).type();
  if (type == fs::file_type::not_found) return place.string();
  place = fs::canonical(place, error);
  if (error || !fs::is_directory(place, error)) refuse("is not a folder; choose another --out");
  struct stat own{}, parent{};
  const bool known =
      ::stat(place.c_str(), &own) == 0 && ::stat(place.parent_path().c_str(), &parent) == 0;
  if (!known) refuse(std::string("cannot be read: ") + std::strerror(errno));
  if (own.st_dev != parent.st_dev || place == place.root_path() ||
      fs::equivalent(place, ".", error)) {
    refuse("is the current folder or a mount point; set --out to a new folder inside it");
  }
  bool has_data = false;
  for (fs::directory_iterator entry(place, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!is_ours(name)) refuse("also contains '" + name + "'; set --out to a folder of its own");
    has_data = true;
  }
  if (error) refuse("cannot be read: " + error.message());
  if (has_data && !options.overwrite) {
    refuse("already contains shards; choose another --out or add --overwrite");
  }
  return place.string();
}

void check(const CorpusOptions& options) {
  if (options.vocabulary.empty() == (options.learn_size == 0)) {
    throw std::runtime_error(
        "give exactly one of --vocabulary gpt2, --vocabulary FILE or --learn 4096");
  }
  if (options.learn_size > 65536) {
    throw std::runtime_error(
        "shards hold 16-bit tokens, so --learn can be at most 65536, not " +
        std::to_string(options.learn_size));
  }
  const auto streams =
      std::count(options.inputs.begin(), options.inputs.end(), "-") +
      std::count(options.validation_inputs.begin(), options.validation_inputs.end(), "-");
  if (options.vocabulary.empty() && streams > 0) {
    throw std::runtime_error(
        "--learn reads the text twice, so it cannot read standard input; give files instead");
  }
  if (streams > 1) throw std::runtime_error("standard input, -, can be read only once");
}

}  // namespace

CorpusSummary tokenize_corpus(const CorpusOptions& given, const CorpusProgress& progress) {
  check(given);
  CorpusOptions options = given;
  options.threads = std::min(options.threads, kMostThreads);
  try {
    StagedFolder staged(place_for(options));
    const auto summary = Tokenizer(options, progress, staged.path()).run();
    staged.commit(options.overwrite);
    return summary;
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(
        "memory ran out with up to " + std::to_string(options.threads) +
        " threads; set fewer with --threads");
  }
}

}  // namespace gpt
