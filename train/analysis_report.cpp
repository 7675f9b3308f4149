#include "train/analysis_report.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "train/candidates.h"

namespace train {
namespace {

using Json = nlohmann::ordered_json;

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

// Columns as wide as their widest cell. The first is left-aligned, the others right-aligned.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  const auto width = [](const std::string& text) {  // in characters, not bytes
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

// Q, K and V of each layer, without their sums.
std::vector<const MatrixResult*> single_matrices(const CheckpointAnalysis& analysis) {
  std::vector<const MatrixResult*> matrices;
  for (const auto& matrix : analysis.matrices) {
    const bool is_sum = matrix.name == "all" || matrix.name.find(".qkv") != std::string::npos;
    if (!is_sum) matrices.push_back(&matrix);
  }
  return matrices;
}

std::string by_matrix(const CheckpointAnalysis& analysis) {
  std::vector<std::vector<std::string>> rows = {
      {"matrix", "β along three-way", "2nd/1st order", "criterion favours", "best, same batch",
       "best, held out", "agrees, same batch"}};
  for (const auto& matrix : analysis.matrices) {
    const auto& check = check_at(matrix, 1);
    const auto& full = find_step(matrix.candidates[kThreeWay], 1, false);
    const double ratio = matrix.beta / 2 * full.norm * full.norm / full.first_order;
    rows.push_back(
        {matrix.name, format("%.2g ± %.1g", matrix.beta, matrix.beta_noise), format("%.1e", ratio),
         matrix.candidates[check.favoured].candidate, matrix.candidates[check.best].candidate,
         matrix.candidates[check.best_held_out].candidate, check.agrees ? "yes" : "no"});
  }
  return table(rows);
}

std::string agreement(const CheckpointAnalysis& analysis) {
  const auto matrices = single_matrices(analysis);
  const auto candidates = analysis.matrices.front().candidates.size();
  std::string text = format(
      "How often the criterion picks the best of %d candidates, or one within noise of it, over %d "
      "matrices\n(about %.1f by chance), and how often the first-order term ⟨G, sO⟩ alone "
      "does:\n\n",
      static_cast<int>(candidates), static_cast<int>(matrices.size()),
      static_cast<double>(matrices.size()) / static_cast<double>(candidates));
  std::vector<std::vector<std::string>> rows = {
      {"step", "same batch", "⟨G, sO⟩ alone", "held out", "all: favoured", "best",
       "best, held out"}};
  const auto& all = analysis.matrices.back();
  for (const auto& check : all.checks) {
    const auto count = [&](auto&& agrees) {
      return std::to_string(
          std::count_if(matrices.begin(), matrices.end(), [&](const auto* matrix) {
            return agrees(check_at(*matrix, check.factor));
          }));
    };
    rows.push_back(
        {format("%g lr", check.factor), count([](const CriterionCheck& v) { return v.agrees; }),
         count([](const CriterionCheck& v) { return v.first_order_agrees; }),
         count([](const CriterionCheck& v) { return v.agrees_held_out; }),
         all.candidates[check.favoured].candidate, all.candidates[check.best].candidate,
         all.candidates[check.best_held_out].candidate});
  }
  return text + table(rows);
}

// "< 12.3", "always", …
std::string when_it_pays(const CandidateResult& candidate, const CandidateResult& full, double lr) {
  if (candidate.candidate == full.candidate) return "-";
  const auto text =
      to_string(group_muon::compare(candidate.momentum, full.momentum, lr).break_even);
  const std::string words = "as long as β ";
  return text.rfind(words, 0) == 0 ? text.substr(words.size()) : text;
}

std::string gains_and_costs(const CheckpointAnalysis& analysis) {
  const auto& all = analysis.matrices.back();
  std::vector<std::vector<std::string>> rows = {
      {"grouping", "‖G‖_*", "rank at 0.01", "‖O‖²", "⟨G, sO⟩", "‖sO‖²", "pays against packed: β",
       "against three-way: β"}};
  for (const auto& candidate : all.candidates) {
    const auto spectra = candidate.gradient.of_blocks.value_or(group_muon::no_spectra());
    rows.push_back(
        {candidate.candidate, format("%.4g", spectra.nuclear_norm),
         format("%.0f", spectra.ranks[1]), format("%.1f", candidate.momentum.squared_norm),
         format("%.4g", candidate.momentum.first_order),
         format("%.4g", candidate.momentum.step_squared_norm),
         when_it_pays(candidate, all.candidates[kPacked], analysis.lr),
         when_it_pays(candidate, all.candidates[kThreeWay], analysis.lr)});
  }
  return table(rows);
}

std::string decreases(const CheckpointAnalysis& analysis, bool held_out) {
  const auto& all = analysis.matrices.back();
  std::vector<std::vector<std::string>> rows = {{"grouping"}};
  for (const auto& check : all.checks) rows[0].push_back(format("%g lr", check.factor));
  for (const auto& check : all.checks) {
    rows[0].push_back(format("%g lr, same norm", check.factor));
  }
  if (!held_out) rows[0].emplace_back("β at 1 lr");
  for (size_t c = 0; c < all.candidates.size(); ++c) {
    const auto& candidate = all.candidates[c];
    auto& row = rows.emplace_back();
    row.push_back(candidate.candidate);
    for (const bool rescaled : {false, true}) {
      for (const auto& check : all.checks) {
        const auto& step = find_step(candidate, check.factor, rescaled && c != kThreeWay);
        row.push_back(format("%.3e", held_out ? step.held_out_decrease : step.decrease));
      }
    }
    if (!held_out) row.push_back(format("%.3g", find_step(candidate, 1, false).curvature));
  }
  return table(rows);
}

Json to_json(const MatrixResult& matrix, double lr) {
  Json json{{"matrix", matrix.name}, {"beta", matrix.beta}, {"beta_noise", matrix.beta_noise}};
  const auto name = [&](size_t candidate) { return matrix.candidates[candidate].candidate; };
  for (const auto& check : matrix.checks) {
    json["verdicts"].push_back(
        {{"factor", check.factor},
         {"favoured", name(check.favoured)},
         {"first_order", name(check.first_order)},
         {"best", name(check.best)},
         {"best_held_out", name(check.best_held_out)},
         {"agrees", check.agrees},
         {"first_order_agrees", check.first_order_agrees},
         {"agrees_held_out", check.agrees_held_out}});
  }
  const auto& packed = matrix.candidates[kPacked];
  const auto& three_way = matrix.candidates[kThreeWay];
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
         {"momentum", train::to_json(candidate.momentum, packed.momentum, three_way.momentum, lr)},
         {"gradient", train::to_json(candidate.gradient, packed.gradient, three_way.gradient, lr)},
         {"steps", steps}});
  }
  return json;
}

}  // namespace

std::string to_text(const CheckpointAnalysis& analysis) {
  return format(
             "step %lld, lr %.4g. Loss on the batch %.6f, held out %.6f; one rounding error in the "
             "weights changes them by %.1e and %.1e.\n\n",
             static_cast<long long>(analysis.step), analysis.lr, analysis.loss,
             analysis.held_out_loss, analysis.noise, analysis.held_out_noise) +
         by_matrix(analysis) + "\n" + agreement(analysis) +
         "\nGains and costs of all matrices together (‖G‖_* and rank from the gradient, O from the "
         "momentum):\n\n" +
         gains_and_costs(analysis) + "\nDecrease of the loss on the same batch:\n\n" +
         decreases(analysis, false) + "\nDecrease of the loss on the held-out batch:\n\n" +
         decreases(analysis, true);
}

std::string to_json(const CheckpointAnalysis& analysis) {
  Json json{
      {"checkpoint", analysis.checkpoint},
      {"step", analysis.step},
      {"lr", analysis.lr},
      {"loss", analysis.loss},
      {"held_out_loss", analysis.held_out_loss},
      {"noise", analysis.noise},
      {"held_out_noise", analysis.held_out_noise}};
  for (const auto& matrix : analysis.matrices)
    json["matrices"].push_back(to_json(matrix, analysis.lr));
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace train
