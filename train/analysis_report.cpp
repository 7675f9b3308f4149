#include "train/analysis_report.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "train/attention.h"

namespace train {
namespace {

using Json = nlohmann::ordered_json;

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

// Columns as wide as their widest cell, the first two to the left.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  const auto width = [](const std::string& text) {  // β and ‖ are one wide
    return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
      return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    }));
  };
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - width(row[i]), ' ');
      line.append(i == 0 ? "" : "  ").append(i == 0 ? row[i] + space : space + row[i]);
    }
    text.append(line.substr(0, line.find_last_not_of(' ') + 1)).append("\n");
  }
  return text;
}

// The best, or "a tie" with those within the noise of it.
std::string name_of_best(const MatrixResult& matrix, size_t best, bool held_out, double noise) {
  const auto decrease = [&](const CandidateResult& candidate) {
    const auto& step = find_step(candidate, 1, false);
    return held_out ? step.held_out_decrease : step.decrease;
  };
  const auto& candidates = matrix.candidates;
  const double most = decrease(candidates[best]);
  const auto ties = std::count_if(candidates.begin(), candidates.end(), [&](const auto& candidate) {
    return most - decrease(candidate) <= 2 * noise;
  });
  return candidates[best].candidate + (ties > 1 ? " (tie)" : "");
}

std::string by_matrix(const Analysis& analysis) {
  std::vector<std::vector<std::string>> rows = {
      {"matrix", "β along full", "criterion favours", "best, same batch", "best, held out",
       "agree"}};
  for (const auto& matrix : analysis.matrices) {
    rows.push_back(
        {matrix.name, format("%.3g", matrix.beta), matrix.candidates[matrix.favoured].candidate,
         name_of_best(matrix, matrix.best, false, analysis.noise),
         name_of_best(matrix, matrix.best_held_out, true, analysis.held_out_noise),
         matrix.favoured == matrix.best ? "yes" : "no"});
  }
  return table(rows);
}

std::string agreement(const Analysis& analysis) {
  const auto& all = analysis.matrices.back();
  const auto count = [&](auto&& agrees) {
    return static_cast<int>(
        std::count_if(analysis.matrices.begin(), analysis.matrices.end() - 1, agrees));
  };
  const int same = count([](const auto& m) { return m.favoured == m.best; });
  const int held_out = count([](const auto& m) { return m.favoured == m.best_held_out; });
  const auto matrices = static_cast<int>(analysis.matrices.size()) - 1;
  return format(
             "The criterion names the best of %d candidates for %d of %d matrices on the same "
             "batch, for "
             "%d on the held-out one\n(by chance about %.1f).",
             static_cast<int>(all.candidates.size()), same, matrices, held_out,
             static_cast<double>(matrices) / static_cast<double>(all.candidates.size())) +
         " All together it favours " + all.candidates[all.favoured].candidate + "; best was " +
         all.candidates[all.best].candidate + ", held out " +
         all.candidates[all.best_held_out].candidate + ".\n";
}

std::string by_candidate(const Analysis& analysis) {
  const auto& all = analysis.matrices.back();
  const auto& full = all.candidates[1];
  std::vector<std::vector<std::string>> rows = {
      {"grouping", "‖O‖²", "⟨G,O⟩", "gain", "pays against three-way, β"}};
  auto& head = rows.front();
  for (const auto& step : full.steps) head.push_back(format("decrease at %g lr", step.factor));
  head.insert(head.end(), {"held out", "same norm", "held out", "β"});
  for (const auto& candidate : all.candidates) {
    const auto comparison = group_muon::compare(candidate.momentum, full.momentum, analysis.lr);
    std::string pays = &candidate == &full ? "-" : to_string(comparison.break_even);
    const std::string words = "as long as β ";
    if (pays.rfind(words, 0) == 0) pays = pays.substr(words.size());
    std::vector<std::string> row = {
        candidate.candidate, format("%.1f", candidate.momentum.squared_norm),
        format("%.4g", candidate.momentum.first_order),
        comparison.gain ? format("%.4g", *comparison.gain) : "", pays};
    for (const auto& step : full.steps) {
      row.push_back(format("%.3e", find_step(candidate, step.factor, false).decrease));
    }
    const auto& plain = find_step(candidate, 1, false);
    const auto& rescaled = &candidate == &full ? plain : find_step(candidate, 1, true);
    row.insert(
        row.end(), {format("%.3e", plain.held_out_decrease), format("%.3e", rescaled.decrease),
                    format("%.3e", rescaled.held_out_decrease), format("%.3g", plain.curvature)});
    rows.push_back(row);
  }
  return table(rows);
}

Json to_json(const MatrixResult& matrix) {
  Json json{
      {"matrix", matrix.name},
      {"beta", matrix.beta},
      {"favoured", matrix.candidates[matrix.favoured].candidate},
      {"best", matrix.candidates[matrix.best].candidate},
      {"best_held_out", matrix.candidates[matrix.best_held_out].candidate}};
  for (const auto& candidate : matrix.candidates) {
    Json steps = Json::array();
    for (const auto& step : candidate.steps) {
      steps.push_back(
          {{"factor", step.factor},
           {"rescaled", step.rescaled},
           {"norm", step.norm},
           {"first_order", step.first_order},
           {"decrease", step.decrease},
           {"held_out_decrease", step.held_out_decrease},
           {"curvature", step.curvature}});
    }
    json["candidates"].push_back(
        {{"grouping", candidate.candidate},
         {"guaranteed_decrease", candidate.guaranteed},
         {"momentum", whitening_json(candidate.momentum)},
         {"gradient", whitening_json(candidate.gradient)},
         {"steps", steps}});
  }
  return json;
}

}  // namespace

std::string to_text(const Analysis& analysis) {
  return format(
             "step %lld, lr %.4g. Loss on the batch %.6f, held out %.6f; one rounding error of the "
             "weights moves them "
             "by %.1e and %.1e.\n\n",
             static_cast<long long>(analysis.step), analysis.lr, analysis.loss,
             analysis.held_out_loss, analysis.noise, analysis.held_out_noise) +
         by_matrix(analysis) + "\n" + agreement(analysis) + "\nAll matrices together:\n\n" +
         by_candidate(analysis);
}

std::string to_json(const Analysis& analysis) {
  Json json{
      {"checkpoint", analysis.checkpoint},
      {"step", analysis.step},
      {"lr", analysis.lr},
      {"loss", analysis.loss},
      {"held_out_loss", analysis.held_out_loss},
      {"noise", analysis.noise},
      {"held_out_noise", analysis.held_out_noise}};
  for (const auto& matrix : analysis.matrices) json["matrices"].push_back(to_json(matrix));
  return json.dump(1) + "\n";
}

}  // namespace train
