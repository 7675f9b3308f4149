#include "study/tables.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "study/settings.h"
#include "study/text.h"

namespace study {
namespace {

std::string number(double value, const char* pattern = "%.4f") {
  return std::isfinite(value) ? format(pattern, value) : "–";
}

// Text from files, for Markdown: without HTML, links and emphasis, and within one cell of a table.
std::string markdown(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += ' ';
    } else if (c == '<' || c == '>' || c == '&') {
      out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : "&amp;";
    } else {
      if (std::strchr("\\`*_[]|~", c) != nullptr) out += '\\';
      out += c;
    }
  }
  return out;
}

// "`muon-lr = 0.001`"
std::string markdown(const train::Options::value_type& option) {
  const std::string text = option.first + " = " + option.second;
  return text.find_first_of("`\n\r") == std::string::npos ? "`" + text + "`" : markdown(text);
}

// A quoted field of a CSV file.
std::string csv(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) out.append(c == '"' ? 2 : 1, c);
  return out + "\"";
}

std::string latex(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (std::strchr("\\~^", c) != nullptr) {
      out += c == '\\'  ? "\\textbackslash{}"
             : c == '~' ? "\\textasciitilde{}"
                        : "\\textasciicircum{}";
    } else {
      if (std::strchr("{}$&#%_", c) != nullptr) out += '\\';
      out += c;
    }
  }
  return out;
}

std::string sign_of(Mark mark, bool exploratory) {
  switch (mark) {
    case Mark::kBetter:
      return exploratory ? " △" : " ▲";
    case Mark::kWorse:
      return exploratory ? " ▽" : " ▼";
    default:
      return "";
  }
}

// "4.7437 ± 0.0041 ▲"
std::string own_number(const SettingSummary& setting, bool bold) {
  std::string text = number(setting.loss.mean);
  if (bold) text = "**" + text + "**";
  if (setting.loss.count > 1) text += " ± " + number(setting.loss.deviation);
  if (setting.exploratory) text += "ᵉ";
  if (setting.failed > 0) text += c10::str(" ", setting.failed, " failed");
  const auto found = setting.against.find("packed");
  return found == setting.against.end()
             ? text
             : text + sign_of(found->second.mark, found->second.exploratory);
}

// The same with the paper's number: "4.7437 ± 0.0041 ▲ (3.2722)".
std::string markdown_cell(const VariantSummary& summary, size_t index) {
  const Cell& cell = table1_cells()[index];
  const std::string paper =
      format(is_papers_best_rule(index) ? "(**%.4f**)" : "(%.4f)", cell.paper);
  const auto* setting = summary.find(cell.setting);
  if (setting == nullptr || setting->loss.count == 0) return "– " + paper;
  return own_number(*setting, is_best_rule(summary, index)) + " " + paper;
}

std::string ends(double low, double high) {
  return c10::str("[", number(low, "%+.4f"), ", ", number(high, "%+.4f"), "]");
}

std::string interval(const Paired& paired) {
  if (paired.count == 0) return "";
  std::string text = number(paired.mean, "%+.4f");
  return paired.count > 1 ? text + " " + ends(paired.low, paired.high) : text;
}

void write_settings(std::ostream& out, const VariantSummary& summary) {
  out << "| setting | seeds | loss | sd |";
  for (const char* baseline : kBaselines) {
    out << " minus " << baseline << " | for all | p | Holm | |";
  }
  out << "\n|---|---:|---:|---:|---|---|---:|---:|---|---|---|---:|---:|---|\n";
  for (const auto& setting : summary.settings) {
    if (setting.loss.count == 0) continue;
    out << "| " << markdown(setting.title) << (setting.exploratory ? " ᵉ" : "") << " | "
        << setting.loss.count;
    if (setting.failed > 0) out << ", " << setting.failed << " failed";
    out << " | " << number(setting.loss.mean) << " | " << number(setting.loss.deviation) << " |";
    for (const char* baseline : kBaselines) {
      const auto found = setting.against.find(baseline);
      if (found == setting.against.end()) {
        out << " | | | | |";
        continue;
      }
      const auto& comparison = found->second;
      const bool tested = comparison.difference.count > 1;
      out << " " << interval(comparison.difference) << " | "
          << (tested ? ends(
                           comparison.difference.simultaneous_low,
                           comparison.difference.simultaneous_high)
                     : "")
          << " | " << (tested ? number(comparison.difference.p, "%.3g") : "") << " | "
          << (tested ? number(comparison.holm, "%.3g") : "") << " |"
          << sign_of(comparison.mark, comparison.exploratory) << " |";
    }
    out << "\n";
  }
  out << "\n";
}

// An interval of fractions from one of differences to 1.
std::string fractions(double low, double high) {
  return std::isfinite(low) ? c10::str("[", number(1 + low), ", ", number(1 + high), "]") : "";
}

bool has_steps(const VariantSummary& summary) {
  for (const auto& setting : summary.settings) {
    for (const auto& [baseline, comparison] : setting.against) {
      if (comparison.steps.seeds > 0) return true;
    }
  }
  return false;
}

void write_steps(std::ostream& out, const VariantSummary& summary) {
  out << "| setting |";
  for (const char* baseline : kBaselines) {
    out << " seeds | steps to " << baseline << "'s loss | for all | p | Holm | |";
  }
  out << "\n|---|---:|---|---|---:|---:|---|---:|---|---|---:|---:|---|\n";
  for (const auto& setting : summary.settings) {
    if (setting.against.empty()) continue;
    out << "| " << markdown(setting.title) << (setting.exploratory ? " ᵉ" : "") << " |";
    for (const char* baseline : kBaselines) {
      const auto found = setting.against.find(baseline);
      if (found == setting.against.end() || found->second.steps.seeds == 0) {
        out << " | | | | | |";
        continue;
      }
      const auto& steps = found->second.steps;
      const bool tested = steps.less && steps.less->count > 1;
      out << " " << steps.seeds << " | " << words_of(steps) << " | "
          << (tested ? fractions(steps.less->simultaneous_low, steps.less->simultaneous_high) : "")
          << " | " << (tested ? number(steps.less->p, "%.3g") : "") << " | "
          << (tested ? number(steps.holm, "%.3g") : "") << " |"
          << sign_of(steps.mark, found->second.exploratory) << " |";
    }
    out << "\n";
  }
  out << "\n";
}

double value_of(const ValueChoice::Tried& tried) {
  return std::strtod(tried.value.c_str(), nullptr);
}

// What a value's losses are, in one cell.
std::string cell_of(const ValueChoice::Tried& tried, bool best) {
  std::string text = number(tried.loss.mean);
  if (best) text = "**" + text + "**";
  if (tried.loss.count > 1) text += " ± " + number(tried.loss.deviation);
  if (tried.failed > 0) text += c10::str(", ", tried.failed, " failed");
  return text;
}

void write_best_values(std::ostream& out, const BestValues& values) {
  std::map<double, std::string> columns;
  for (const auto& setting : values.settings) {
    for (const auto& tried : setting.tried) columns[value_of(tried)] = tried.value;
  }
  out << "# The best " << values.key << " of each setting\n\nMean ± standard deviation of the loss "
      << "on the seeds that all values of a setting have. An edge is the smallest or largest value "
      << "with results: a better one may lie beyond it.\n\n| setting | seeds |";
  for (const auto& [number, value] : columns) out << " " << value << " |";
  out << " best | |\n|---|---:|";
  for (size_t i = 0; i < columns.size(); ++i) out << "---|";
  out << "---:|---|\n";
  for (const auto& setting : values.settings) {
    int64_t seeds = 0;
    for (const auto& tried : setting.tried) seeds = std::max(seeds, tried.loss.count);
    out << "| " << markdown(setting.title) << " | " << seeds << " |";
    for (const auto& [number, value] : columns) {
      const auto tried = std::find_if(
          setting.tried.begin(), setting.tried.end(),
          [&, wanted = number](const auto& one) { return value_of(one) == wanted; });
      out << " "
          << (tried == setting.tried.end() ? "" : cell_of(*tried, tried->value == setting.best))
          << " |";
    }
    out << " " << setting.best << " |" << (setting.at_edge ? " edge" : "") << " |\n";
  }
  out << "\n";
}

// Columns as wide as their widest cell; the first is aligned left, the others right.
std::string aligned(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      line += i == 0 ? row[i] + pad : "  " + pad + row[i];
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

bool has_results(const VariantSummary& summary) {
  for (const auto& setting : summary.settings) {
    if (setting.loss.count > 0) return true;
  }
  return false;
}

// Cells of one row and rule, by g.
struct TableRow {
  std::string row, rule;
  std::vector<size_t> cells;
};

std::vector<TableRow> grouped_rows() {
  std::vector<TableRow> rows;
  const auto& cells = table1_cells();
  for (size_t i = 0; i < cells.size(); ++i) {
    if (cells[i].group_size == 0) continue;
    if (rows.empty() || rows.back().row != cells[i].row || rows.back().rule != cells[i].rule) {
      rows.push_back({cells[i].row, cells[i].rule, {}});
    }
    rows.back().cells.push_back(i);
  }
  return rows;
}

// What is missing where some seeds never get to the loss.
constexpr Paired kNoPairs = {0, kUnknown, kUnknown, kUnknown, kUnknown, kUnknown, kUnknown};

void write_csv_rows(std::ostream& out, const VariantSummary& summary) {
  const auto plain = [](double value) { return std::isfinite(value) ? format("%.9g", value) : ""; };
  for (const auto& setting : summary.settings) {
    if (setting.loss.count == 0) continue;
    out << summary.name << "," << setting.name << "," << csv(setting.title) << ","
        << setting.loss.count << "," << setting.failed << ","
        << (setting.exploratory ? "yes" : "no") << "," << plain(setting.loss.mean) << ","
        << plain(setting.loss.deviation);
    for (const char* baseline : kBaselines) {
      const auto found = setting.against.find(baseline);
      if (found == setting.against.end()) {
        out << std::string(19, ',');
        continue;
      }
      const auto& [difference, exploratory, family, holm, mark, steps] = found->second;
      out << "," << difference.count << "," << plain(difference.mean) << ","
          << plain(difference.low) << "," << plain(difference.high) << ","
          << plain(difference.simultaneous_low) << "," << plain(difference.simultaneous_high) << ","
          << plain(difference.p) << "," << plain(holm) << "," << to_string(mark);
      const auto less = steps.less.value_or(kNoPairs);
      out << "," << steps.seeds << "," << steps.reached << "," << plain(steps.median) << ","
          << plain(1 + less.mean) << "," << plain(1 + less.low) << "," << plain(1 + less.high)
          << "," << plain(1 + less.simultaneous_low) << "," << plain(1 + less.simultaneous_high)
          << "," << plain(less.p) << "," << plain(steps.holm);
    }
    out << "\n";
  }
}

// Standard deviation, seeds, and e for exploratory.
std::string latex_spread(const SettingSummary& setting) {
  const std::string spread =
      setting.loss.count > 1 ? c10::str("$\\pm$", number(setting.loss.deviation), ", ") : "";
  const std::string failed =
      setting.failed > 0 ? c10::str(", ", setting.failed, " failed") : std::string();
  return c10::str(
      "{\\tiny ", spread, "$n=", setting.loss.count, setting.exploratory ? "^e" : "", "$", failed,
      "}");
}

std::string latex_number(const VariantSummary& summary, size_t index) {
  const Cell& cell = table1_cells()[index];
  const auto* setting = summary.find(cell.setting);
  std::string own =
      setting == nullptr || setting->loss.count == 0 ? "--" : number(setting->loss.mean);
  if (is_best_rule(summary, index)) own = "\\textbf{" + own + "}";
  if (setting != nullptr && setting->loss.count > 0) own += latex_spread(*setting);
  const std::string paper =
      format(is_papers_best_rule(index) ? "\\textbf{%.4f}" : "%.4f", cell.paper);
  return own + " {\\scriptsize(" + paper + ")}";
}

// How many runs are finished, and what is wrong with the others.
void write_state(std::ostream& out, const Results& results) {
  const auto counting = std::count_if(
      results.runs.begin(), results.runs.end(), [](const auto& r) { return r.counts(); });
  out << counting << " of " << results.runs.size() << " runs are finished.\n";
  for (const auto& result : results.runs) {
    if (result.state == RunState::kFailed && result.readable) {
      out << markdown(result.run.name + " failed: " + result.error) << "\n";
    }
  }
  for (const auto& problem : results.problems) out << markdown(problem) << "\n";
  out << "\n";
}

void write_table1(std::ostream& out, const Folder& folder, const VariantSummary& summary) {
  const auto config = train::configure(folder.study.options);
  out << "# Table 1\n\nValidation loss after " << config.steps << " steps of "
      << config.batch * config.context << " tokens: mean ± standard deviation over seeds. "
      << "The paper's loss, for another model and text, is in parentheses. "
      << "Where the numbers of seeds differ, losses and differences to a baseline come from "
         "different seeds; the order above uses only the seeds that all have. "
         "g = 1 is one result for all rules. "
         "Bold: the best rule of a row at that g, on the seeds that all rules have. "
      << "▲ ▼: better or worse than packed Full-QKV Muon, by the interval that holds at once for "
         "all settings with enough seeds. "
      << "ᵉ △ ▽: exploratory (fewer than " << kEnoughSeeds
      << " seeds, or failed runs), by the interval that holds at once for all exploratory "
         "settings.\n\n"
      << "| baseline | validation loss |\n|---|---|\n";
  const auto& cells = table1_cells();
  for (size_t i = 0; i < cells.size() && cells[i].group_size == 0; ++i) {
    out << "| " << cells[i].row << " | " << markdown_cell(summary, i) << " |\n";
  }
  if (const auto* ours = summary.find("three-way"); ours != nullptr && ours->loss.count > 0) {
    out << "| Full-QKV Muon, three-way (not in the paper) | " << own_number(*ours, false) << " |\n";
  }
  out << "\n| | rule | g = 1 | g = 2 | g = 3 | g = 4 | g = 6 |\n|---|---|---|---|---|---|---|\n";
  for (const auto& row : grouped_rows()) {
    out << "| " << row.row << " | " << row.rule << " |";
    for (const size_t cell : row.cells) out << " " << markdown_cell(summary, cell) << " |";
    out << "\n";
  }
}

}  // namespace

bool is_papers_best_rule(size_t cell) {
  return table1_cells()[cell].row == "QK" && table1_cells()[cell].rule == "rand.";
}

bool is_best_rule(const VariantSummary& summary, size_t cell) {
  const auto& cells = table1_cells();
  if (cells[cell].group_size < 2) return false;
  std::vector<const SettingSummary*> rivals;
  std::vector<std::map<int64_t, double>> losses;
  const SettingSummary* own = summary.find(cells[cell].setting);
  for (const auto& other : cells) {
    if (other.row != cells[cell].row || other.group_size != cells[cell].group_size) continue;
    const auto* setting = summary.find(other.setting);
    if (setting == nullptr) return false;
    losses.push_back(setting->losses);
    if (setting != own) rivals.push_back(setting);
  }
  // Seeds differ more than rules do, so rules are compared only on seeds that all of them have.
  const auto seeds = common_seeds(losses);
  const auto mean = [&](const SettingSummary* setting) {
    double sum = 0;
    for (const int64_t seed : seeds) sum += setting->losses.at(seed);
    return sum;
  };
  return !seeds.empty() && std::all_of(rivals.begin(), rivals.end(), [&](const auto* rival) {
    return mean(own) < mean(rival);
  });
}

std::string words_of(const StepsToLoss& steps) {
  if (steps.less) {
    const std::string ends = fractions(steps.less->low, steps.less->high);
    return number(1 + steps.less->mean) + (ends.empty() ? "" : " " + ends);
  }
  if (steps.reached == 0) return "never";
  const std::string median =
      std::isfinite(steps.median) ? "median " + number(steps.median) : "no median";
  return c10::str("reached by ", steps.reached, " of ", steps.seeds, ", ", median);
}

std::string to_markdown(
    const Folder& folder, const Results& results, const Analysis& analysis,
    const std::vector<Claim>& claims) {
  std::ostringstream out;
  write_state(out, results);
  for (const auto& line : conclusions(analysis)) out << line << "\n";
  out << "\n";
  write_table1(out, folder, analysis.main);
  out << "\n# Every setting\n\nDifferences are taken seed by seed, with two 95% intervals: one for "
      << "a single comparison, and one \"for all\" comparisons with that baseline at once, either "
         "of all settings with enough seeds or of all exploratory ones. The second decides ▲ and "
         "▼. "
      << "p is two-sided, from sign flips; the Holm column has it with Holm's correction. "
      << "With n seeds p cannot be below 2^(1-n), however large the effect.\n\n";
  write_settings(out, analysis.main);
  if (has_steps(analysis.main)) {
    out << "# Steps to a baseline's final loss\n\nThe first step at which a setting's validation "
           "loss "
        << "is at or below the final loss of the baseline with the same seed, as a fraction of the "
           "baseline's steps; validation losses are joined by lines. Below 1 is better. Intervals, "
           "p-values and marks are as for losses. Where some seeds never get there, there is no "
           "mean "
           "and no interval, since the seeds that do are the lucky ones; the median counts the "
           "others "
           "as last. Such a setting still counts in the corrections.\n\n";
    write_steps(out, analysis.main);
  }
  for (const auto& setting : folder.study.own_settings) {
    out << markdown(setting.name) << ", defined by this study:";
    for (const auto& option : setting.options) out << " " << markdown(option);
    out << "\n\n";
  }
  if (analysis.noise) {
    const auto& noise = *analysis.noise;
    out << "Noise: " << noise.setting
        << " from weights moved by one rounding error minus itself: " << interval(noise.difference)
        << ", " << noise.difference.count << (noise.difference.count == 1 ? " seed" : " seeds")
        << "; standard deviation " << number(noise.deviation) << ", largest "
        << number(noise.largest) << ".\n\n";
  }
  for (const auto& variant : analysis.variants) {
    if (!has_results(variant)) continue;
    out << "# " << markdown(variant.name) << "\n\n";
    for (const auto& option : variant.options) out << markdown(option) << " ";
    out << "\n\n";
    write_settings(out, variant);
    if (has_steps(variant)) write_steps(out, variant);
  }
  for (const auto& values : analysis.best_values) write_best_values(out, values);
  out << "# Claims of the paper\n\nFor this model, text and length of training only.\n\n| | claim "
         "| "
         "verdict | evidence |\n|---:|---|---|---|\n";
  for (const auto& claim : claims) {
    out << "| " << claim.number << " | " << claim.text << " | " << words_of(claim) << " | ";
    for (size_t i = 0; i < claim.evidence.size(); ++i) {
      out << (i == 0 ? "" : "<br>") << claim.evidence[i];
    }
    out << " |\n";
  }
  return out.str();
}

std::string to_text(const Analysis& analysis) {
  std::vector<std::vector<std::string>> rows = {{"setting", "seeds", "validation loss"}};
  for (const char* baseline : kBaselines) rows[0].push_back(c10::str("minus ", baseline));
  bool exploratory = false;
  for (const auto& setting : analysis.main.settings) {
    if (setting.loss.count == 0) continue;
    rows.push_back({setting.title, std::to_string(setting.loss.count), number(setting.loss.mean)});
    for (const char* baseline : kBaselines) {
      const auto found = setting.against.find(baseline);
      rows.back().push_back(
          found == setting.against.end() ? "" : interval(found->second.difference));
    }
    exploratory = exploratory || setting.exploratory;
  }
  if (rows.size() == 1) return "no run is finished yet\n";
  const std::string note = c10::str(
      "Fewer than ", kEnoughSeeds, " seeds (or failed runs): a first impression, not evidence.\n");
  return aligned(rows) + (exploratory ? note : "");
}

std::string to_csv(const Analysis& analysis) {
  std::ostringstream out;
  out << "variant,setting,title,seeds,failed,exploratory,loss,sd";
  for (const std::string baseline : kBaselines) {
    for (const char* column :
         {"seeds", "difference", "low", "high", "simultaneous_low", "simultaneous_high", "p",
          "holm_p", "mark", "steps_seeds", "steps_reached", "steps_median", "steps_mean",
          "steps_low", "steps_high", "steps_simultaneous_low", "steps_simultaneous_high", "steps_p",
          "steps_holm_p"}) {
      out << "," << baseline << "_" << column;
    }
  }
  out << "\n";
  write_csv_rows(out, analysis.main);
  for (const auto& variant : analysis.variants) write_csv_rows(out, variant);
  return out.str();
}

std::string differences_csv(const Analysis& analysis) {
  std::ostringstream out;
  out << "variant,setting,baseline,step,seeds,difference,low,high\n";
  const auto plain = [](double value) { return std::isfinite(value) ? format("%.9g", value) : ""; };
  const auto write = [&](const VariantSummary& summary) {
    for (const auto& setting : summary.settings) {
      for (const auto& [baseline, band] : setting.differences) {
        for (size_t i = 0; i < band.steps.size(); ++i) {
          out << summary.name << "," << setting.name << "," << baseline << "," << band.steps[i]
              << "," << band.count << "," << plain(band.mean[i]) << "," << plain(band.low[i]) << ","
              << plain(band.high[i]) << "\n";
        }
      }
    }
  };
  write(analysis.main);
  for (const auto& variant : analysis.variants) write(variant);
  return out.str();
}

std::string to_latex(const Analysis& analysis) {
  std::ostringstream out;
  const auto& cells = table1_cells();
  out << "% Needs booktabs and multirow. Mean and standard deviation over n seeds; e: "
         "exploratory.\n"
      << "% The paper's numbers, for another model and text, are in parentheses. Bold: the best "
         "rule of\n"
      << "% a row at that g, on the seeds that all rules have. Paired differences decide whether "
         "settings\n"
      << "% differ: see table.md.\n"
      << "\\begin{tabular}{llccccc}\n\\toprule\n"
      << "\\multicolumn{2}{l}{Baselines} & \\multicolumn{5}{c}{Validation loss} \\\\\n\\midrule\n";
  for (size_t i = 0; i < cells.size() && cells[i].group_size == 0; ++i) {
    out << "\\multicolumn{2}{l}{" << cells[i].row << "} & \\multicolumn{5}{c}{"
        << latex_number(analysis.main, i) << "} \\\\\n";
  }
  if (const auto* ours = analysis.main.find("three-way"); ours != nullptr && ours->loss.count > 0) {
    out << "\\multicolumn{2}{l}{Full-QKV Muon, three-way (not in the paper)} & \\multicolumn{5}{c}{"
        << number(ours->loss.mean) << latex_spread(*ours) << "} \\\\\n";
  }
  for (const auto& setting : analysis.main.settings) {
    if (setting.own.empty() || setting.loss.count == 0) continue;
    out << "\\multicolumn{2}{l}{" << latex(setting.title)
        << " (this study's own)} & \\multicolumn{5}{c}{" << number(setting.loss.mean)
        << latex_spread(setting) << "} \\\\\n";
  }
  out << "\\midrule\nGroupMuon & Rule & $g=1$ & $g=2$ & $g=3$ & $g=4$ & $g=6$ \\\\\n";
  const auto rows = grouped_rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool first = i == 0 || rows[i - 1].row != rows[i].row;
    if (first) {
      size_t height = 1;
      while (i + height < rows.size() && rows[i + height].row == rows[i].row) ++height;
      out << "\\midrule\n\\multirow{" << height << "}{*}{" << rows[i].row << "}\n";
    }
    out << "& " << rows[i].rule;
    for (const size_t cell : rows[i].cells) out << " & " << latex_number(analysis.main, cell);
    out << " \\\\\n";
  }
  out << "\\bottomrule\n\\end{tabular}\n";
  return out.str();
}

}  // namespace study
