#include "train/candidates.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "group_muon/parallel.h"
#include "train/metrics.h"
#include "train/run_files.h"

namespace train {
namespace {

using group_muon::Whitening;
using Json = nlohmann::ordered_json;

constexpr const char* kAttentionWeight = "attn.c_attn.weight";

// Every g below `heads` that divides it.
std::string all_sizes(int64_t heads) {
  std::string list;
  for (int64_t g = 1; g < heads; ++g) {
    if (heads % g != 0) continue;
    list.append(list.empty() ? "" : ",").append(std::to_string(g)).append(g > 1 ? ":random" : "");
  }
  return list;
}

int64_t rows_of_qkv(const gpt::ModelShape& shape) {
  return (shape.heads + 2 * shape.key_heads()) * shape.head_dim();
}

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(' ');
  return first == std::string::npos ? ""
                                    : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// JSON has no NaN.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json to_json(const group_muon::Comparison& comparison) {
  Json json;
  if (comparison.gain && comparison.ideal_cost) {
    json["gain"] = number(*comparison.gain);
    json["ideal_cost"] = *comparison.ideal_cost;
  }
  json["norm_cost"] = number(comparison.norm_cost);
  json["first_order_gain"] = number(comparison.first_order_gain);
  json["pays"] = group_muon::to_string(comparison.break_even.pays);
  json["break_even"] = number(comparison.break_even.beta);
  return json;
}

// "6:random/all" means 6:random for Q and K, all for V. Without a slash the grouping applies to Q, K and V.
group_muon::QkvGrouping parse_candidate(
    const std::string& text, const gpt::ModelShape& shape, bool share_qk) {
  TORCH_CHECK_VALUE(!text.empty(), "a grouping is missing between two commas");
  const auto slash = text.find('/');
  const auto qk = group_muon::parse_schedule(text.substr(0, slash));
  const auto v =
      slash == std::string::npos ? qk : group_muon::parse_schedule(text.substr(slash + 1));
  const std::string where = c10::str("grouping '", text, "': ");
  group_muon::checked(qk, shape.heads, where);
  const auto or_whole = [&](const group_muon::GroupingSchedule& schedule) {
    if (shape.key_heads() == shape.heads) {
      group_muon::checked(schedule, shape.heads, where);
      return schedule;
    }
    const int64_t g = schedule.front().group_size;
    const bool fits = g > 0 && shape.key_heads() % g == 0 && schedule.front().order.empty();
    return fits ? schedule : group_muon::GroupingSchedule{{}};
  };
  return {.q = qk, .k = or_whole(qk), .v = or_whole(v), .share_qk = share_qk};
}

}  // namespace

Json to_json(
    const Whitening& part, const Whitening& packed, const Whitening& three_way, double lr) {
  Json json{{"rows", part.rows}, {"cols", part.cols}};
  if (part.of_blocks) {
    json["blocks"] = part.blocks;
    json["nuclear_norm"] = number(part.of_blocks->nuclear_norm);
    for (const double rank : part.of_blocks->ranks) json["ranks"].push_back(number(rank));
    json["stable_rank"] = number(part.of_blocks->stable_rank);
    json["effective_rank"] = number(part.of_blocks->effective_rank);
    for (const double sigma : part.of_blocks->quantiles) json["spectrum"].push_back(number(sigma));
  }
  json["first_order"] = number(part.first_order);
  json["squared_norm"] = number(part.squared_norm);
  json["step_squared_norm"] = number(part.step_squared_norm);
  if (!part.segment.empty()) {
    json["imbalance"] = number(group_muon::imbalance(part.head_norms));
    json["whitened_imbalance"] = number(group_muon::imbalance(part.whitened_head_norms));
  }
  json["against packed"] = to_json(group_muon::compare(part, packed, lr));
  json["against three-way"] = to_json(group_muon::compare(part, three_way, lr));
  return json;
}

group_muon::Layout packed_as_one(const gpt::ModelShape& shape, double qkv_lr) {
  if (qkv_lr == 1) return group_muon::plain();
  return group_muon::separate(
      1, rows_of_qkv(shape), {group_muon::Grouping{.lr_factor = qkv_lr}}, "qkv");
}

std::vector<Candidate> make_candidates(
    const gpt::ModelShape& shape, const std::string& groupings, bool share_qk, double qkv_lr) {
  const group_muon::AttentionShape attention{
      .heads = shape.heads, .head_dim = shape.head_dim(), .kv_heads = shape.key_heads()};
  const std::vector<int64_t> sizes = {rows_of_qkv(shape), shape.width};
  const auto layout_of = [&](group_muon::QkvGrouping grouping) {
    for (auto* schedule : {&grouping.q, &grouping.k, &grouping.v}) {
      *schedule = group_muon::with_lr_factor(*schedule, qkv_lr);
    }
    return group_muon::checked(group_muon::packed_qkv(attention, grouping), sizes, "QKV");
  };
  std::vector<Candidate> candidates = {
      {"packed", packed_as_one(shape, qkv_lr)}, {"three-way", layout_of({})}};
  std::istringstream list(groupings.empty() ? all_sizes(shape.heads) : groupings);
  for (std::string item; std::getline(list, item, ',');) {
    const std::string text = trimmed(item);
    const auto layout = layout_of(parse_candidate(text, shape, share_qk));
    for (const auto& other : candidates) {
      TORCH_CHECK_VALUE(
          other.layout != layout, "grouping '", text, "' is the same as ", other.name);
    }
    candidates.push_back({text, layout});
  }
  return candidates;
}

std::vector<AttentionWeight> attention_weights(group_muon::GroupMuon& muon, double clip) {
  std::vector<AttentionWeight> weights;
  for (const auto& [options, batch] : muon.weights_of_next_step()) {
    for (const auto& weight : batch) {
      const std::string_view name = weight.name, end = kAttentionWeight;
      if (name.size() >= end.size() && name.substr(name.size() - end.size()) == end) {
        weights.push_back({weight, options, clip == 1 ? weight.grad : weight.grad / clip});
      }
    }
  }
  return weights;
}

std::vector<std::vector<Measured>> measure_weights(
    const std::vector<AttentionWeight>& weights, const std::vector<Candidate>& candidates,
    group_muon::Accuracy accuracy) {
  std::vector<std::vector<Measured>> results;
  std::vector<std::vector<torch::Tensor>> directions;
  for (const auto& [weight, options, gradient] : weights) {
    auto& measured = results.emplace_back();
    for (const char* of : {"gradient", "momentum"}) {
      measured.push_back({of, std::vector<std::vector<Whitening>>(candidates.size())});
    }
    directions.push_back({gradient, group_muon::look_ahead(weight, options)});
  }
  // A decomposition of a small matrix uses only one thread, so run them in parallel.
  const auto tensors = static_cast<int64_t>(2 * weights.size());
  const auto count = tensors * static_cast<int64_t>(candidates.size());
  group_muon::share_out(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const size_t w = i % tensors / 2, t = i % 2, c = i / tensors;
      auto cut = weights[w].weight;
      cut.layout = candidates[c].layout;
      cut.grad = weights[w].gradient;
      results[w][t].by_candidate[c] = group_muon::measure(
          directions[w][t], cut, candidates[kThreeWay].layout, weights[w].options, accuracy);
    }
  });
  return results;
}

DiagnosticsLog::DiagnosticsLog(
    const std::string& folder, int64_t step, std::vector<Candidate> candidates,
    group_muon::Accuracy accuracy)
    : notes_(cut_back(
          folder + kDiagnosticsFile, [step](int64_t of_line, bool) { return of_line < step; })),
      lines_(folder + kDiagnosticsFile, /*append=*/true),
      candidates_(std::move(candidates)),
      accuracy_(accuracy) {}

void DiagnosticsLog::write(int64_t step, const std::vector<AttentionWeight>& weights) {
  const auto measured = measure_weights(weights, candidates_, accuracy_);
  std::string lines;
  for (size_t w = 0; w < weights.size(); ++w) {
    const auto& weight = weights[w].weight;
    for (const auto& [of, by_candidate] : measured[w]) {
      for (size_t i = 0; i < candidates_.size(); ++i) {
        for (size_t part = 0; part < by_candidate[i].size(); ++part) {
          const auto& whitening = by_candidate[i][part];
          Json line{{"step", step},
                    {"weight", weight.name},
                    {"part", part == 0 ? "qkv" : whitening.segment},
                    {"of", of},
                    {"grouping", candidates_[i].name},
                    {"lr", weight.lr}};
          line.update(to_json(
              whitening, by_candidate[kPacked][part], by_candidate[kThreeWay][part], weight.lr));
          lines.append(line.dump()).append("\n");
        }
      }
    }
  }
  lines_.write(lines);
}

}  // namespace train
