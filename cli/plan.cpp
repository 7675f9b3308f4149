// group-muon plan: what the optimizer of a model costs per step on any number of processes, on paper.

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "group_muon/cost.h"
#include "study/text.h"
#include "train/files.h"
#include "train/machine.h"
#include "train/shapes.h"

namespace cli {
namespace {

using group_muon::ProcessCost;
using group_muon::StepCost;
using group_muon::StepSharing;
using study::format;
using Json = nlohmann::ordered_json;

constexpr double kGiga = 1e9, kTera = 1e12;

struct PlanArguments {
  std::string model = "gpt2-small", json;
  train::Options sizes;
  std::string qkv = "split", qk_group, k_group, v_group;
  std::string sharing = "local", weights = "float32";
  int processes = 1;
  double bandwidth = 12.5, flops = 0, memory = 0, tokens = 524288;
  group_muon::GroupMuonOptions muon;
  int64_t threads = 0;
};

struct NamedSharing {
  StepSharing sharing;
  const char* name;
  const char* title;
};
constexpr std::array kSharings = {
    NamedSharing{StepSharing::kLocal, "local", "gradients to owners, new values back"},
    NamedSharing{StepSharing::kAveraged, "averaged", "DDP, and new values from owners"},
    NamedSharing{StepSharing::kSharded, "fsdp", "FSDP2, only blocks that cross shards move"},
    NamedSharing{StepSharing::kGathered, "gathered", "FSDP2, every process gathers all matrices"},
    NamedSharing{StepSharing::kRedundant, "redundant", "DDP, every process computes everything"},
};

const NamedSharing& sharing_of(const std::string& name) {
  return *std::find_if(
      kSharings.begin(), kSharings.end(), [&](const auto& known) { return known.name == name; });
}

// A number with a prefix: 1.23 G
std::string amount(double value, const char* unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E", "Z"};
  size_t prefix = 0;
  while (value >= 999.5 && prefix + 1 < std::size(kPrefixes)) {
    value /= 1000;
    ++prefix;
  }
  const int digits = value >= 99.95 || value == 0 ? 0 : value >= 9.995 ? 1 : 2;
  return format("%.*f %s%s", digits, value, kPrefixes[prefix], unit);
}

std::string time_text(double seconds) {
  return seconds >= 100 ? format("%.0f s", seconds)
         : seconds >= 1 ? format("%.3g s", seconds)
                        : format("%.3g ms", 1e3 * seconds);
}

// A line of a table.
struct Row {
  std::string name, title;
  StepCost cost;
  double seconds = 0;  // of the optimizer
  double share = 0;    // of the step
};

// What all rows are computed with.
struct Setting {
  train::PlannedModel model;
  group_muon::OrthogonalizeOptions iteration;
  group_muon::Speed speed;
  int processes = 1;
  double tokens = 0;
  double model_flops = 0;    // forward and backward of a step, all processes
  double model_seconds = 0;  // of each process
};

Row make_row(
    const Setting& setting, const std::string& name, const std::string& title,
    const std::vector<group_muon::SharedWeight>& weights, StepSharing sharing) {
  Row row{name, title, step_cost(weights, setting.processes, sharing, setting.iteration)};
  row.seconds = group_muon::seconds_of(row.cost, setting.speed);
  row.share = row.seconds / (row.seconds + setting.model_seconds);
  return row;
}

group_muon::GroupingSchedule schedule_of(const char* flag, const std::string& text) {
  try {
    return group_muon::parse_schedule(text);
  } catch (const c10::Error& error) {
    std::string why = error.what_without_backtrace();
    const std::string library = "group_muon: ";
    if (why.starts_with(library)) why.erase(0, library.size());
    TORCH_CHECK_VALUE(false, flag, " = ", text, ": ", why);
  }
}

// The groups that the flags ask for, and a name for them. None: a file of weights says it all.
std::pair<std::optional<train::HeadGroups>, std::string> groups_of(
    const PlanArguments& arguments, const train::PlannedModel& model) {
  const bool asked =
      !arguments.qk_group.empty() || !arguments.k_group.empty() || !arguments.v_group.empty();
  TORCH_CHECK_VALUE(
      arguments.qkv == "split" || !asked,
      "qkv = packed has no head groups; remove qk-group, k-group and v-group");
  train::HeadGroups groups;
  if (arguments.qkv == "packed") {
    groups.packed = true;
    return {groups, "packed"};
  }
  if (!model.sizes && !asked) return {std::nullopt, "as in the file"};
  const std::string usual = c10::str(train::usual_group_size(model), ":random");
  const std::string& q = arguments.qk_group.empty() ? usual : arguments.qk_group;
  const std::string& k = arguments.k_group.empty() ? q : arguments.k_group;
  const std::string v = arguments.v_group.empty() ? "all" : arguments.v_group;
  groups.q = schedule_of("qk-group", q);
  groups.k = schedule_of("k-group", k);
  groups.v = schedule_of("v-group", v);
  return {
      groups, q == k ? c10::str("Q, K ", q, ", V ", v) : c10::str("Q ", q, ", K ", k, ", V ", v)};
}

train::HeadGroups same_groups(const char* text) {
  const auto schedule = group_muon::parse_schedule(text);
  return {.q = schedule, .k = schedule, .v = schedule};
}

Setting setting_of(const PlanArguments& arguments) {
  Setting setting;
  setting.model = train::find_model(arguments.model, arguments.sizes);
  const auto dtype = arguments.weights == "bfloat16" ? at::kBFloat16 : at::kFloat;
  for (auto& weight : setting.model.weights) weight.dtype = dtype;
  if (arguments.threads > 0) at::set_num_threads(static_cast<int>(arguments.threads));
  setting.iteration =
      group_muon::resolved(group_muon::step_options(arguments.muon).orthogonalize, at::kCPU);
  const auto& [engine, precision] =
      std::pair{setting.iteration.engine, setting.iteration.precision};
  setting.speed.flops =
      arguments.flops > 0 ? arguments.flops * kTera : train::gemm_peak(engine, precision, at::kCPU);
  setting.speed.memory = arguments.memory > 0 ? arguments.memory * kGiga : train::copy_bandwidth();
  setting.speed.network = arguments.bandwidth * kGiga;
  setting.processes = arguments.processes;
  setting.tokens = arguments.tokens;
  setting.model_flops = arguments.tokens * train::training_flops_per_token(setting.model);
  setting.model_seconds = setting.model_flops / arguments.processes / setting.speed.flops;
  return setting;
}

void describe(const Setting& setting, const PlanArguments& arguments) {
  const auto& [model, iteration, speed, processes, tokens, flops, seconds] = setting;
  double elements = 0, matrices = 0;
  for (const auto& weight : model.weights) {
    double own = 1;
    for (const auto size : weight.sizes) own *= static_cast<double>(size);
    elements += own;
    if (!weight.adamw) matrices += own;
  }
  say(c10::str(
      model.name, " (", model.source, "): ", amount(elements, " weights"), ", ",
      amount(matrices, " of them in Muon's matrices")));
  say(c10::str(
      processes,
      processes == 1 ? " process: " : " processes, each with: ", amount(speed.flops, "FLOP/s"),
      arguments.flops > 0 ? "" : " (measured here)", ", memory ", amount(speed.memory, "B/s"),
      arguments.memory > 0 ? "" : " (measured here)", ", network ", amount(speed.network, "B/s")));
  say(c10::str(
      "orthogonalization: ", group_muon::method_name(iteration.method), ", ",
      iteration.coefficients.size(), " iterations in ",
      group_muon::precision_name(iteration.precision), ", engine ",
      group_muon::to_string(iteration.engine)));
  say(c10::str(
      "forward and backward of ", amount(tokens, " tokens"), ": ", amount(flops, "FLOP"), ", ",
      time_text(seconds)));
}

void print_rows(const char* title, const std::vector<Row>& rows) {
  size_t width = std::string(title).size();
  for (const auto& row : rows) width = std::max(width, row.title.size());
  const char* pattern = "%-*s  %11s  %11s  %11s  %9s  %11s  %8s";
  const auto columns = static_cast<int>(width);
  say("");
  say(format(pattern, columns, title, "arithmetic", "sent", "state", "busiest", "time", "of step"));
  for (const auto& row : rows) {
    const double mean = group_muon::mean(row.cost, &ProcessCost::flops);
    const double busiest = group_muon::largest(row.cost, &ProcessCost::flops);
    const double sent = group_muon::mean(row.cost, &ProcessCost::sent) + row.cost.framework_sent;
    say(format(
        pattern, columns, row.title.c_str(), amount(mean, "FLOP").c_str(),
        amount(sent, "B").c_str(),
        amount(group_muon::largest(row.cost, &ProcessCost::state), "B").c_str(),
        mean == 0 ? "-" : format("%.2f x", busiest / mean).c_str(), time_text(row.seconds).c_str(),
        format("%.1f%%", 100 * row.share).c_str()));
  }
}

Json json_of(const std::vector<Row>& rows) {
  Json list = Json::array();
  for (const auto& row : rows) {
    Json processes = Json::array();
    for (const auto& [flops, memory, sent, state] : row.cost.processes) {
      processes.push_back({{"flops", flops}, {"memory", memory}, {"sent", sent}, {"state", state}});
    }
    list.push_back(
        {{"name", row.name},
         {"title", row.title},
         {"seconds", row.seconds},
         {"share", row.share},
         {"framework_sent", row.cost.framework_sent},
         {"processes", std::move(processes)}});
  }
  return list;
}

void write_json(
    const std::string& path, const Setting& setting, const std::vector<Row>& optimizers,
    const std::vector<Row>& sharings) {
  const auto& [model, iteration, speed, processes, tokens, flops, seconds] = setting;
  const Json content = {
      {"model", model.name},
      {"processes", processes},
      {"method", group_muon::method_name(iteration.method)},
      {"precision", group_muon::precision_name(iteration.precision)},
      {"engine", group_muon::to_string(iteration.engine)},
      {"flops_per_second", speed.flops},
      {"memory_per_second", speed.memory},
      {"network_per_second", speed.network},
      {"tokens", tokens},
      {"model_flops", flops},
      {"model_seconds", seconds},
      {"optimizers", json_of(optimizers)},
      {"sharings", json_of(sharings)}};
  train::replace_file(path, content.dump(1) + "\n");
  say("wrote " + path);
}

void run(const PlanArguments& arguments) {
  if (!arguments.json.empty()) train::check_replaceable(arguments.json);
  const Setting setting = setting_of(arguments);
  const auto& model = setting.model;
  const auto& [groups, title] = groups_of(arguments, model);
  const auto own = train::with_groups(model, groups);
  const auto sharing = sharing_of(arguments.sharing).sharing;
  std::vector<Row> optimizers = {make_row(setting, "own", title, own, sharing)};
  const auto add = [&](const char* name, const char* of, const auto& weights) {
    optimizers.push_back(make_row(setting, name, of, weights, sharing));
  };
  add("three-way", "three-way", train::with_groups(model, same_groups("all")));
  add("packed", "packed, whole matrices", train::with_groups(model, train::HeadGroups{true}));
  add("head-wise", "head-wise", train::with_groups(model, same_groups("1")));
  add("adamw", "AdamW", train::with_adamw(model));
  std::vector<Row> sharings;
  for (const auto& known : kSharings) {
    sharings.push_back(make_row(setting, known.name, known.title, own, known.sharing));
  }
  describe(setting, arguments);
  print_rows("optimizer", optimizers);
  if (arguments.processes > 1) print_rows("way to share it", sharings);
  say("");
  say("Arithmetic and bytes are those of one process, in the mean; state is the largest of any.");
  say("Busiest: the most arithmetic of a process over the mean. Time: nothing overlaps.");
  if (!arguments.json.empty()) write_json(arguments.json, setting, optimizers, sharings);
}

std::string names_of_models() {
  std::string names;
  for (const auto& model : train::named_models()) {
    names += c10::str(names.empty() ? "" : "; ", model.name, ": ", model.source);
  }
  return names;
}

std::vector<std::string> names_of_sharings() {
  std::vector<std::string> names;
  for (const auto& known : kSharings) names.emplace_back(known.name);
  return names;
}

void add_model_flags(CLI::App& command, PlanArguments& arguments) {
  command
      .add_option(
          "--model", arguments.model,
          "A model by name, or a TOML file: a configuration of train, sizes in [sizes], or weights "
          "in [[weight]]. Names and where their sizes are from: " +
              names_of_models())
      ->group("model")
      ->capture_default_str();
  for (const auto& key : train::size_keys()) {
    auto* option = command
                       .add_option_function<std::string>(
                           c10::str("--", key.name),
                           [&arguments, name = std::string(key.name)](const std::string& text) {
                             arguments.sizes.emplace_back(name, text);
                           },
                           key.help)
                       ->group("model")
                       ->type_name(key.most == 1 ? "[true|false]" : "[NUMBER]");
    if (key.most == 1) option->expected(0, 1);
  }
}

void add_groups_flags(CLI::App& command, PlanArguments& arguments) {
  const auto add = [&](const char* name, std::string& value, const char* help) {
    return command.add_option(name, value, help)->group("groups of heads")->type_name("GROUPS");
  };
  add("--qkv", arguments.qkv,
      "split: Q, K and V separately, in groups of heads; packed: one matrix")
      ->check(one_of({"split", "packed"}))
      ->type_name("")
      ->capture_default_str();
  add("--qk-group", arguments.qk_group,
      "Groups of Q and K, as for train; default: up to 6 at random, as many as divide the heads");
  add("--k-group", arguments.k_group, "Groups of K if different");
  add("--v-group", arguments.v_group, "Groups of V; default: all");
}

void add_machine_flags(CLI::App& command, PlanArguments& arguments) {
  const auto number = [&](const char* name, double& value, const char* help) {
    return command.add_option(name, value, help)->check(number_above_zero())->group("processes");
  };
  command.add_option("--processes", arguments.processes, "Number of processes that share a step")
      ->check(whole_number(1, 65536))
      ->group("processes")
      ->capture_default_str();
  command
      .add_option(
          "--sharing", arguments.sharing,
          "How they share it: local (gradients are reduced by Group Muon), averaged (by DDP), "
          "fsdp, "
          "gathered, redundant")
      ->check(one_of(names_of_sharings()))
      ->group("processes")
      ->capture_default_str();
  number("--bandwidth", arguments.bandwidth, "GB/s (10^9 bytes) that a process sends")
      ->capture_default_str();
  number(
      "--flops", arguments.flops,
      "TFLOP/s of a process in matrix products; default: measured here, on all threads");
  number(
      "--memory-bandwidth", arguments.memory,
      "GB/s of memory that a process reads and writes; default: measured here");
  number("--tokens", arguments.tokens, "Tokens per step, of all processes together")
      ->capture_default_str();
  command.add_option("--weights", arguments.weights, "Type of weights, gradients and state")
      ->check(one_of({"float32", "bfloat16"}))
      ->group("processes")
      ->capture_default_str();
  command.add_option("--threads", arguments.threads, "Threads for what is measured here")
      ->check(whole_number(1, 1024))
      ->group("processes");
}

void add_iteration_flags(CLI::App& command, PlanArguments& arguments) {
  const auto add = [&](const char* name, std::string& value, const char* help) {
    command.add_option(name, value, help)->group("orthogonalization")->capture_default_str();
  };
  add("--method", arguments.muon.method(),
      "newton_schulz, gram, accurate_gram or auto, as for train");
  add("--precision", arguments.muon.precision(), "bfloat16, float32 or auto: as this CPU has it");
  add("--engine", arguments.muon.engine(),
      "portable (libtorch), one of our own that runs here, or auto: the best here");
  command.add_option("--iterations", arguments.muon.steps(), "Number of iterations")
      ->check(whole_number(1, 100))
      ->group("orthogonalization")
      ->capture_default_str();
}

}  // namespace

void add_plan(CLI::App& app) {
  auto arguments = std::make_shared<PlanArguments>();
  auto* command = app.add_subcommand(
      "plan",
      "Estimate what the optimizer of a model costs per step, on any number of processes: "
      "arithmetic, bytes sent, state and time");
  add_model_flags(*command, *arguments);
  add_groups_flags(*command, *arguments);
  add_machine_flags(*command, *arguments);
  add_iteration_flags(*command, *arguments);
  command->add_option("--json", arguments->json, "Also write all numbers to this file")
      ->type_name("FILE");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace cli
