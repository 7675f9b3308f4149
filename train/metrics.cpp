#include "train/metrics.h"

#include <filesystem>
#include <sstream>

#include "train/json.h"

namespace train {

std::string cut_back(const std::string& path, const std::function<bool(int64_t, bool)>& keep) {
  if (!std::filesystem::exists(path)) return path;
  std::istringstream lines(read_text(path));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    const auto entry = parse_json(line);
    if (!entry || !entry->is_object() || !entry->contains("step")) continue;
    const auto& step = (*entry)["step"];
    if (!step.is_number_integer()) continue;
    if (keep(step, entry->contains("validation_loss"))) kept.append(line).append("\n");
  }
  replace_file(path, kept);
  return path;
}

MetricsLog::MetricsLog(const std::string& folder, int64_t step, bool validated)
    : lines_(
          cut_back(
              folder + "/metrics.jsonl",
              [&](int64_t of_line, bool validation) {
                return of_line < step || (of_line == step && (validated || !validation));
              }),
          /*append=*/true),
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
