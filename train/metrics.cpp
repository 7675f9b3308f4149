#include "train/metrics.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

namespace train {
namespace {

// The file's path, after its lines beyond that point, and a last one that was cut off, are gone.
std::string cut_back(const std::string& folder, int64_t step, bool validated) {
  const std::string path = folder + "/metrics.jsonl";
  if (!std::filesystem::exists(path)) return path;
  std::istringstream lines(read_text(path));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    const auto entry = nlohmann::json::parse(line, nullptr, false);
    if (!entry.is_object() || entry.value("step", step + 1) > step) continue;
    if (!validated && entry["step"] == step && entry.contains("validation_loss")) continue;
    kept.append(line).append("\n");
  }
  replace_file(path, kept);
  return path;
}

}  // namespace

MetricsLog::MetricsLog(const std::string& folder, int64_t step, bool validated)
    : lines_(cut_back(folder, step, validated), /*append=*/true), events_(folder, step) {}

void MetricsLog::write(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  nlohmann::ordered_json line{{"step", step}};
  for (const auto& [name, value] : values) line[name] = value;
  lines_.write(line.dump() + "\n");
  events_.scalars(step, values);
}

}  // namespace train
