#pragma once
// Names of the files in a run's folder and in its checkpoints, to be appended to the folder's path.

namespace train {

constexpr const char* kConfigFile = "/config.toml";
constexpr const char* kMachineFile = "/machine.jsonl";
constexpr const char* kMetricsFile = "/metrics.jsonl";
constexpr const char* kDiagnosticsFile = "/diagnostics.jsonl";
constexpr const char* kCheckpointsFolder = "/checkpoints";

// In a checkpoint.
constexpr const char* kModelFile = "/model.safetensors";
constexpr const char* kOptimizerFile = "/optimizer.safetensors";
constexpr const char* kStateFile = "/state.json";

}  // namespace train
