#include "train/checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string_view>

#include "train/errors.h"
#include "train/files.h"
#include "train/json.h"
#include "train/safetensors.h"

namespace train {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using torch::Tensor;
using torch::optim::AdamWParamState;

constexpr const char* kModelFile = "/model.safetensors";
constexpr const char* kOptimizerFile = "/optimizer.safetensors";
constexpr const char* kStateFile = "/state.json";
constexpr const char* kTiedHead = "lm_head.weight";
constexpr const char* kEmbedding = "transformer.wte.weight";

// The head is the embedding. Both names are written, for programs that load strictly.
NamedTensors weights_of(const gpt::Model& model) {
  NamedTensors weights;
  for (const auto& item : model.named_parameters()) weights.emplace_back(item.key(), item.value());
  weights.emplace_back(kTiedHead, model.named_parameters()[kEmbedding]);
  return weights;
}

// Calls visit(name of the tensor in the file, tensor) for all optimizer state of the model's weights. Creates missing
// state.
template <typename Visit>
void for_each_buffer(const gpt::Model& model, group_muon::Optimizers& optimizers, Visit&& visit) {
  const auto fresh = [](const Tensor& parameter) { return at::zeros_like(parameter); };
  for (const auto& item : model.named_parameters()) {
    const auto& [name, parameter] = item.pair();
    void* identity = parameter.unsafeGetTensorImpl();
    const auto owned_by = [&](torch::optim::Optimizer& optimizer) {
      for (const auto& group : optimizer.param_groups()) {
        for (const auto& owned : group.params()) {
          if (owned.unsafeGetTensorImpl() == identity) return true;
        }
      }
      return false;
    };
    if (owned_by(optimizers.adamw)) {
      auto& slot = optimizers.adamw.state()[identity];
      if (!slot) {
        auto state = std::make_unique<AdamWParamState>();
        state->step(0);
        state->exp_avg(fresh(parameter));
        state->exp_avg_sq(fresh(parameter));
        slot = std::move(state);
      }
      auto& state = static_cast<AdamWParamState&>(*slot);
      visit("adamw.exp_avg." + name, state.exp_avg());
      visit("adamw.exp_avg_sq." + name, state.exp_avg_sq());
    } else {
      auto& slot = optimizers.muon.state()[identity];
      if (!slot) {
        auto state = std::make_unique<group_muon::GroupMuonParamState>();
        state->momentum_buffer(fresh(parameter));
        slot = std::move(state);
      }
      visit(
          "muon.momentum." + name,
          static_cast<group_muon::GroupMuonParamState&>(*slot).momentum_buffer());
    }
  }
}

void set_steps(group_muon::Optimizers& optimizers, int64_t step) {
  for (auto& [identity, state] : optimizers.adamw.state()) {
    static_cast<AdamWParamState&>(*state).step(step);
  }
  for (auto& [identity, state] : optimizers.muon.state()) {
    static_cast<group_muon::GroupMuonParamState&>(*state).step(step);
  }
}

void copy_into(
    const Tensor& to, const std::map<std::string, Tensor>& from, const std::string& name,
    const std::string& path) {
  const auto found = from.find(name);
  TORCH_CHECK_VALUE(found != from.end(), "'", path, "' has no ", name);
  TORCH_CHECK_VALUE(
      found->second.sizes() == to.sizes(), "'", path, "': ", name, " should have the shape ",
      to.sizes(), ", not ", found->second.sizes());
  const torch::NoGradGuard no_grad;
  to.copy_(found->second);
}

ordered_json shape_json(const gpt::ModelShape& shape) {
  return {{"layers", shape.layers}, {"heads", shape.heads},     {"kv_heads", shape.key_heads()},
          {"width", shape.width},   {"context", shape.context}, {"vocabulary", shape.vocabulary}};
}

// The step in a checkpoint's name, "step-" followed by at least six digits; -1 for other names.
int64_t step_of(const fs::path& path) {
  constexpr std::string_view kPrefix = "step-";
  const std::string name = path.filename().string();
  if (name.rfind(kPrefix, 0) != 0 || name.size() < kPrefix.size() + 6) return -1;
  int64_t step = -1;
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && rest == end && step >= 0 ? step : -1;
}

// Checks more than tensor shapes: the same shape can mean different heads.
void require_same_model(const std::string& checkpoint, const gpt::ModelShape& shape) {
  const auto json = read_json(checkpoint + kStateFile);
  if (!json.contains("model")) return;  // from a version that did not record the model
  const auto& found = json["model"];
  const nlohmann::json wanted = shape_json(shape);
  for (const auto& [name, value] : wanted.items()) {
    if (!found.is_object() || !found.contains(name)) continue;
    TORCH_CHECK_VALUE(
        found[name] == value, "checkpoint '", checkpoint, "' is from a different model: ", name,
        " = ", found[name].dump(), ", not ", value.dump());
  }
}

}  // namespace

std::string save_checkpoint(
    const std::string& run, const gpt::Model& model, group_muon::Optimizers& optimizers,
    const TrainerState& state) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(state.step));
  const std::string folder = run + "/checkpoints";
  const std::string path = folder + "/" + name, temporary = folder + "/writing-" + name;
  if (!fs::exists(folder)) {
    make_folder(folder);
    sync_folder(run);
  }
  fs::remove_all(temporary);
  try {
    make_folder(temporary);
    ordered_json files;
    const auto write = [&](const char* file_name, const NamedTensors& tensors) {
      OutputFile file(temporary + file_name);
      save_tensors(file, tensors, {{"format", "pt"}, {"step", std::to_string(state.step)}});
      file.sync();
      files[file_name + 1] = {{"bytes", file.bytes()}, {"crc32c", file.crc()}};
    };
    write(kModelFile, weights_of(model));
    NamedTensors buffers;
    for_each_buffer(model, optimizers, [&](const std::string& buffer, const Tensor& tensor) {
      buffers.emplace_back(buffer, tensor);
    });
    write(kOptimizerFile, buffers);
    ordered_json json = {
        {"version", 1},
        {"step", state.step},
        {"seconds", state.seconds},
        {"validation_loss", nullptr},
        {"training_tokens", state.training_tokens},
        {"data_crc32c", state.data_crc},
        {"model", shape_json(model.shape())},
        {"files", files}};
    if (state.validation_loss) json["validation_loss"] = *state.validation_loss;
    replace_file(temporary + kStateFile, json.dump(2) + "\n");
    sync_folder(temporary);
    replace_folder(temporary, path);
    sync_folder(folder);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  return path;
}

Place locate(const std::string& path) {
  fs::path place = normal_path(path);
  if (fs::exists(place / "config.toml")) return {place.string(), ""};
  // RUN/checkpoints/step-000125, possibly relative to a folder inside the run
  if (!place.empty() && !place.parent_path().has_parent_path()) place = fs::absolute(place);
  const fs::path run = place.parent_path().parent_path();
  const bool in_run =
      place.parent_path().filename() == "checkpoints" && fs::exists(run / "config.toml");
  TORCH_CHECK_VALUE(
      in_run || fs::exists(place), "there is no folder '", path,
      "'; give the folder of a run or of one of its checkpoints");
  TORCH_CHECK_VALUE(in_run, "'", path, "' contains no run (there is no config.toml)");
  TORCH_CHECK_VALUE(
      fs::is_directory(place) && step_of(place) >= 0, "there is no checkpoint '", path, "'");
  return {run.string(), place.string()};
}

std::vector<std::string> list_checkpoints(const std::string& run) {
  std::vector<std::pair<int64_t, std::string>> found;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(run + "/checkpoints", missing)) {
    const int64_t step = step_of(entry.path());
    if (step >= 0 && entry.is_directory()) found.emplace_back(step, entry.path().string());
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::string best_checkpoint(const std::vector<std::string>& checkpoints) {
  std::string best;
  double lowest = INFINITY;
  for (const auto& path : checkpoints) {
    try {
      const auto loss = read_state(path).validation_loss;
      if (!loss || *loss >= lowest) continue;
      lowest = *loss;
      best = path;
    } catch (const std::exception&) {
      continue;  // skip a damaged one
    }
  }
  return best;
}

void prune_checkpoints(const std::string& run, int64_t keep) {
  const auto all = list_checkpoints(run);
  const std::string best = best_checkpoint(all);
  for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i) {
    if (all[i] != best) delete_folder(all[i]);
  }
  std::vector<fs::path> unfinished;  // left by a killed process
  for (const auto& entry : fs::directory_iterator(run + "/checkpoints")) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("writing-", 0) == 0 || name.rfind("deleting-", 0) == 0) {
      unfinished.push_back(entry);
    }
  }
  for (const auto& path : unfinished) fs::remove_all(path);
}

void set_aside_later(const std::string& run, int64_t step) {
  for (const auto& path : list_checkpoints(run)) {
    if (step_of(path) <= step) continue;
    const fs::path place(path);
    const auto aside = place.parent_path() / ("set-aside-" + place.filename().string());
    fs::remove_all(aside);
    fs::rename(place, aside);
  }
}

std::string newest_whole(const std::vector<std::string>& checkpoints, bool weights_only) {
  const auto found = std::find_if(
      checkpoints.rbegin(), checkpoints.rend(),
      [&](const std::string& path) { return damage(path, weights_only).empty(); });
  return found == checkpoints.rend() ? "" : *found;
}

void require_whole(
    const std::string& checkpoint, const std::vector<std::string>& others, bool weights_only,
    const char* offer) {
  const std::string why = damage(checkpoint, weights_only);
  if (why.empty()) return;
  const std::string whole = newest_whole(others, weights_only);
  TORCH_CHECK_VALUE(
      false, "checkpoint '", checkpoint, "' is damaged (", why, "); ",
      whole.empty() ? "no other is intact" : c10::str("another is intact: ", offer, whole));
}

std::string damage(const std::string& checkpoint, bool weights_only) {
  try {
    const auto json = read_json(checkpoint + kStateFile);
    for (const auto& [name, facts] : json.at("files").items()) {
      if (weights_only && name != kModelFile + 1) continue;
      const std::string path = (fs::path(checkpoint) / name).string();
      if (!fs::exists(path)) return name + " is missing";
      if (fs::file_size(path) != facts.at("bytes").get<uint64_t>())
        return name + " has the wrong size";
      if (crc32c_of_file(path) != facts.at("crc32c").get<uint32_t>()) {
        return name + " has the wrong checksum";
      }
    }
    read_state(checkpoint);
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "";
}

TrainerState read_state(const std::string& checkpoint) {
  const auto json = read_json(checkpoint + kStateFile);
  TORCH_CHECK_VALUE(
      json.at("version") == 1, "'", checkpoint, "' was written by a newer version of group-muon");
  TrainerState state;
  json.at("step").get_to(state.step);
  json.at("seconds").get_to(state.seconds);
  if (!json.at("validation_loss").is_null()) {
    state.validation_loss = json.at("validation_loss").get<double>();
  }
  json.at("training_tokens").get_to(state.training_tokens);
  json.at("data_crc32c").get_to(state.data_crc);
  return state;
}

void load_weights(const std::string& path, gpt::Model& model) {
  std::string file = path;
  if (fs::is_directory(path)) {
    const std::string own = path + kModelFile;
    const std::string newest = newest_whole(list_checkpoints(path), /*weights_only=*/true);
    TORCH_CHECK_VALUE(
        fs::exists(own) || !newest.empty(), "'", path,
        "' has no weights: it is neither a checkpoint ", "nor a run with one");
    file = fs::exists(own) ? own : newest + kModelFile;
  }
  const auto tensors = load_tensors(file);
  for (const auto& item : model.named_parameters()) {
    copy_into(item.value(), tensors, item.key(), file);
  }
}

TrainerState load_checkpoint(
    const std::string& checkpoint, gpt::Model& model, group_muon::Optimizers& optimizers) {
  const auto state = read_state(checkpoint);
  require_same_model(checkpoint, model.shape());
  load_weights(checkpoint, model);
  const auto tensors = load_tensors(checkpoint + kOptimizerFile);
  for_each_buffer(model, optimizers, [&](const std::string& name, const Tensor& tensor) {
    copy_into(tensor, tensors, name, checkpoint + kOptimizerFile);
  });
  set_steps(optimizers, state.step);
  return state;
}

}  // namespace train
