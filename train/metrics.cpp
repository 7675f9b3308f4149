#include "train/metrics.h"

#include <filesystem>
#include <sstream>

#include "train/json.h"
#include "train/run_files.h"

namespace train {

namespace {

namespace fs = std::filesystem;

// Keeps a copy of a file with this text under a name that is free. Returns the name.
std::string keep_copy(const std::string& path, const std::string& text) {
  std::string copy = path + ".damaged";
  for (int i = 2; fs::exists(copy); ++i) copy = path + ".damaged-" + std::to_string(i);
  replace_file(copy, text);
  return fs::path(copy).filename().string();
}

// cut_back() for metrics. Also notes if lines of steps up to `step` are missing.
std::vector<std::string> cut_back_metrics(const std::string& path, int64_t step, bool validated) {
  int64_t steps = 0;
  auto notes = cut_back(path, [&](int64_t of_line, bool validation) {
    const bool kept = of_line < step || (of_line == step && (validated || !validation));
    steps += kept && !validation ? 1 : 0;
    return kept;
  });
  if (steps < step) {
    notes.push_back(
        fs::path(path).filename().string() + " has only " + std::to_string(steps) + " of the " +
        std::to_string(step) + " steps that were done: the others are missing from the record");
  }
  return notes;
}

}  // namespace

std::vector<std::string> cut_back(
    const std::string& path, const std::function<bool(int64_t, bool)>& keep) {
  if (!fs::exists(path)) return {};
  const std::string text = read_text(path);
  std::istringstream lines(text);
  std::string kept;
  int64_t unreadable = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto entry = parse_json(line);
    if (entry && entry->is_object() && entry->contains("step") &&
        (*entry)["step"].is_number_integer()) {
      if (keep((*entry)["step"], entry->contains("validation_loss"))) {
        kept.append(line).append("\n");
      }
    } else if (!lines.eof()) {  // a last line without its end was cut off by a kill
      ++unreadable;
    }
  }
  std::vector<std::string> notes;
  if (unreadable > 0) {
    notes.push_back(
        fs::path(path).filename().string() + " has " + std::to_string(unreadable) +
        " lines that cannot be read; the file as it was is kept as " + keep_copy(path, text));
  }
  if (kept != text) replace_file(path, kept);
  return notes;
}

MetricsLog::MetricsLog(const std::string& folder, int64_t step, bool validated)
    : notes_(cut_back_metrics(folder + kMetricsFile, step, validated)),
      lines_(folder + kMetricsFile, /*append=*/true),
      events_(folder, step) {}

void MetricsLog::write(
    int64_t step, const std::vector<std::pair<std::string, double>>& values,
    const std::vector<std::pair<std::string, std::string>>& words) {
  nlohmann::ordered_json line{{"step", step}};
  for (const auto& [name, value] : values) line[name] = value;
  for (const auto& [name, word] : words) line[name] = word;
  lines_.write(line.dump() + "\n");
  events_.scalars(step, values);
}

}  // namespace train
