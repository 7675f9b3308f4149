#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "gpt/shards.h"
#include "tests/testing.h"
#include "train/checkpoint.h"
#include "train/files.h"
#include "train/safetensors.h"
#include "train/train.h"

namespace train {
namespace {

constexpr int64_t kVocabulary = 64;

// Tokens with something to learn: a random walk over the vocabulary.
void write_shards(const std::string& folder, int64_t tokens) {
  std::mt19937 random(1);
  for (const char* split : {"train", "val"}) {
    gpt::ShardWriter writer(folder, split, 3000);  // several shards
    std::vector<uint32_t> walk = {0};
    for (int64_t i = 1; i < tokens; ++i) {
      walk.push_back((walk.back() + random() % 3) % kVocabulary);
    }
    writer.write(walk);
    writer.finish();
  }
}

class TrainTest : public testing::Test {
 protected:
  TrainTest() { write_shards(folder_.path(), 8000); }

  Config config(const std::string& out, const Options& more = {}) const {
    Options settings = {
        {"data", folder_.path()},
        {"out", folder_ / out},
        {"vocabulary", "64"},
        {"layers", "2"},
        {"heads", "4"},
        {"width", "32"},
        {"context", "16"},
        {"batch", "8"},
        {"micro-batch", "3"},
        {"steps", "12"},
        {"warmdown", "4"},
        {"validation-interval", "5"},
        {"validation-tokens", "256"},
        {"checkpoint-interval", "4"},
        {"qk-group", "2:random"},
        {"muon-lr", "1e-3"},
        {"keep", "99"},
        {"threads", "1"}};
    settings.insert(settings.end(), more.begin(), more.end());
    return configure(settings);
  }

  // metrics.jsonl without times.
  static std::vector<std::string> curve(const std::string& run) {
    std::ifstream file(run + "/metrics.jsonl");
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
      auto json = nlohmann::ordered_json::parse(line);
      json.erase("seconds");
      json.erase("tokens_per_second");
      json.erase("optimizer_seconds");
      lines.push_back(json.dump());
    }
    return lines;
  }
  static std::vector<double> losses(const std::string& run, const char* name = "loss") {
    std::vector<double> values;
    for (const auto& line : curve(run)) {
      const auto json = nlohmann::json::parse(line);
      if (json.contains(name)) values.push_back(json[name]);
    }
    return values;
  }
  static std::string bytes_of(const std::string& checkpoint) {
    return read_text(checkpoint + "/model.safetensors") +
           read_text(checkpoint + "/optimizer.safetensors");
  }

  TemporaryFolder folder_;
};

TEST_F(TrainTest, LearnsAndLeavesARecord) {
  const auto outcome = train(config("run", {{"steps", "60"}, {"checkpoint-interval", "0"}}), {});
  EXPECT_EQ(outcome.step, 60);
  EXPECT_FALSE(outcome.stopped);
  const auto all = losses(folder_ / "run");
  ASSERT_EQ(all.size(), 60);
  EXPECT_NEAR(all[0], std::log(64), 0.4);
  EXPECT_LT(all.back(), 2.2);
  EXPECT_EQ(losses(folder_ / "run", "validation_loss").size(), 13);  // 0, 5, …, 60
  EXPECT_EQ(losses(folder_ / "run", "validation_loss").back(), outcome.validation_loss);
  EXPECT_EQ(list_checkpoints(folder_ / "run").size(), 1);
  // The resolved config can be read back and is complete.
  const auto saved = configure(read_options(folder_ / "run/config.toml"));
  EXPECT_EQ(saved.steps, 60);
  EXPECT_GT(saved.threads, 0);
  EXPECT_NE(read_text(folder_ / "run/machine.jsonl").find("\"commit\""), std::string::npos);
}

// config.toml of the first version, and nothing else. A key added to the config since must be known as a later one.
TEST_F(TrainTest, TheConfigOfTheFirstVersionIsRead) {
  make_folder(folder_ / "old");
  std::ofstream(folder_ / "old/config.toml") << R"(
[model]
layers = 2
heads = 4
kv-heads = 0
width = 32
context = 16
vocabulary = 64
precision = "bf16"
init = ""
[data]
data = "data"
batch = 8
micro-batch = 3
[muon]
qkv = "three-way"
qk-group = "2:random"
k-group = ""
v-group = "all"
share-qk = false
muon-lr = 0.001
momentum = 0.95
nesterov = true
average = false
muon-weight-decay = 0
method = "newton_schulz"
coefficients = "you"
iterations = 5
muon-precision = "bfloat16"
eps = 1e-07
relative-eps = true
base-scale = "sqrt_max"
transfer = "same"
reference = "segment"
[adamw]
adamw-lr = 0.0036
adamw-beta1 = 0.9
adamw-beta2 = 0.95
adamw-eps = 1e-08
adamw-weight-decay = 0
[schedule]
steps = 12
warmup = 0
warmdown = 4
clip = 0
seed = 7
[validation]
validation-interval = 5
validation-tokens = 256
validation-precision = "fp32"
[run]
out = "somewhere"
checkpoint-interval = 4
keep = 2
log-interval = 10
device = "cpu"
threads = 1
)";
  const auto config = config_of_run(folder_ / "old");
  EXPECT_EQ(config.seed, 7);
  EXPECT_EQ(config.qkv, "split");
  EXPECT_EQ(config.engine, "portable");
  EXPECT_EQ(config.muon.engine(), "portable");
  EXPECT_FALSE(config.shuffle);
  EXPECT_EQ(config.out, folder_ / "old");
}

TEST_F(TrainTest, ResumeIsBitIdenticalWhereverItWasCut) {
  for (const char* precision : {"bf16", "fp32"}) {
    const std::string whole = std::string("whole-") + precision;
    const Options more = {{"precision", precision}, {"validation-precision", precision}};
    train(config(whole, more), {});
    const auto expected = curve(folder_ / whole);
    const auto last = bytes_of(folder_ / (whole + "/checkpoints/step-000012"));
    // Cuts in the first step, between checkpoints, in a validation and in the last step.
    for (const int64_t cut : {1, 8, 20, 47, 53}) {
      const std::string run = c10::str(folder_.path(), "/cut-", cut, "-", precision);
      Config cut_config = config("x", more);
      cut_config.out = run;
      int64_t asked = 0;
      Listener listener;
      listener.stop_wanted = [&] { return ++asked > cut; };
      const auto outcome = train(cut_config, listener);
      EXPECT_TRUE(outcome.stopped);
      resume(open_run(run, {}), {});
      EXPECT_EQ(curve(run), expected) << "cut at " << cut;
      EXPECT_TRUE(bytes_of(run + "/checkpoints/step-000012") == last) << "cut at " << cut;
    }
  }
}

TEST_F(TrainTest, ResumeFromAnOlderCheckpointTakesTheSamePath) {
  train(config("run"), {});
  const auto expected = curve(folder_ / "run");
  const auto last = bytes_of(folder_ / "run/checkpoints/step-000012");
  const auto run = open_run(folder_ / "run/checkpoints/step-000004/", {});
  EXPECT_EQ(run.checkpoint, folder_ / "run/checkpoints/step-000004");
  resume(run, {});
  EXPECT_EQ(curve(folder_ / "run"), expected);
  EXPECT_TRUE(bytes_of(folder_ / "run/checkpoints/step-000012") == last);
  // The older checkpoints are still there, under another name.
  EXPECT_TRUE(bytes_of(folder_ / "run/checkpoints/set-aside-step-000012") == last);
}

TEST_F(TrainTest, NewestCheckpointsOfAnotherPathAreKept) {
  train(config("run"), {});
  for (const char* step : {"08", "12"}) {
    std::filesystem::resize_file(
        folder_ / (std::string("run/checkpoints/step-0000") + step + "/model.safetensors"), 9);
  }
  int64_t asked = 0;
  Listener listener;
  listener.stop_wanted = [&] { return ++asked > 8; };
  const Options few = {{"keep", "1"}, {"checkpoint-interval", "1"}};
  const auto outcome = resume(open_run(folder_ / "run/checkpoints/step-000004", few), listener);
  EXPECT_TRUE(outcome.stopped);
  EXPECT_EQ(list_checkpoints(folder_ / "run").back(), outcome.checkpoint);
  EXPECT_EQ(open_run(folder_ / "run", {}).checkpoint, outcome.checkpoint);
}

TEST_F(TrainTest, AValidationThatWasCutOffIsMadeUpForOnce) {
  int64_t asked = 0;
  Listener listener;
  listener.stop_wanted = [&] { return ++asked > 56; };  // in the last validation
  EXPECT_TRUE(train(config("run"), listener).stopped);
  EXPECT_EQ(read_state(folder_ / "run/checkpoints/step-000012").validation_loss, std::nullopt);
  const auto outcome = resume(open_run(folder_ / "run", {}), {});
  EXPECT_EQ(
      read_state(folder_ / "run/checkpoints/step-000012").validation_loss, outcome.validation_loss);
  const auto before = curve(folder_ / "run");
  resume(open_run(folder_ / "run", {}), {});  // finished: does nothing
  EXPECT_EQ(curve(folder_ / "run"), before);
}

TEST_F(TrainTest, ARunKilledBeforeItsFirstCheckpointBeginsAnew) {
  train(config("run"), {});
  const auto expected = curve(folder_ / "run");
  std::filesystem::remove_all(folder_ / "run/checkpoints");
  resume(open_run(folder_ / "run", {}), {});
  EXPECT_EQ(curve(folder_ / "run"), expected);
}

TEST_F(TrainTest, MicroBatchesGiveTheSameBatchesAndLosses) {
  const Options fp32 = {
      {"precision", "fp32"}, {"muon-precision", "float32"}, {"batch", "64"}, {"steps", "6"}};
  std::vector<std::vector<double>> curves;
  for (const char* size : {"1", "4", "7", "16", "64"}) {
    Options more = fp32;
    more.emplace_back("micro-batch", size);
    train(config(std::string("micro-") + size, more), {});
    curves.push_back(losses(folder_ / (std::string("micro-") + size)));
  }
  for (const auto& other : curves) {
    for (size_t step = 0; step < other.size(); ++step) {
      EXPECT_NEAR(other[step], curves[0][step], 2e-5) << "step " << step;
    }
  }
}

TEST_F(TrainTest, DataWrapsRoundInAnotherOrder) {
  // 64 windows of 16 tokens: 8 steps of 8 are an epoch. With learning rates of 0 the loss identifies the batch.
  const TemporaryFolder data;
  write_shards(data.path(), 64 * 16 + 1);
  train(
      config(
          "run", {{"data", data.path()},
                  {"steps", "24"},
                  {"muon-lr", "0"},
                  {"adamw-lr", "0"},
                  {"precision", "fp32"}}),
      {});
  const auto all = losses(folder_ / "run");
  std::vector<std::vector<double>> epochs;
  for (size_t epoch = 0; epoch < 3; ++epoch) {
    epochs.emplace_back(all.begin() + epoch * 8, all.begin() + (epoch + 1) * 8);
  }
  const auto mean = [](const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / values.size();
  };
  EXPECT_NEAR(mean(epochs[1]), mean(epochs[0]), 1e-5);  // the same windows
  EXPECT_NEAR(mean(epochs[2]), mean(epochs[0]), 1e-5);
  EXPECT_NE(epochs[1], epochs[0]);
  EXPECT_NE(epochs[2], epochs[1]);
}

TEST_F(TrainTest, ScheduleOfGroupsChangesTheRunFromThatStepOn) {
  train(config("constant", {{"qk-group", "1"}}), {});
  train(config("scheduled", {{"qk-group", "1@0,4@6"}}), {});
  const auto a = losses(folder_ / "constant"), b = losses(folder_ / "scheduled");
  for (size_t step = 0; step <= 6; ++step) EXPECT_EQ(a[step], b[step]) << step;
  EXPECT_NE(a[7], b[7]);
}

TEST_F(TrainTest, ClippingScalesAllGradientsToTheGivenNorm) {
  // After one step the momentum is the gradient, and Adam's mean is a tenth of it.
  const auto norm_after_one_step = [&](const char* out, const char* clip) {
    train(config(out, {{"clip", clip}, {"steps", "1"}, {"warmdown", "0"}}), {});
    double squares = 0;
    for (const auto& [name, tensor] : load_tensors(
             folder_ / (std::string(out) + "/checkpoints/step-000001/optimizer.safetensors"))) {
      if (name.find("exp_avg_sq") != std::string::npos) continue;
      const double factor = name.rfind("adamw", 0) == 0 ? 10 : 1;
      squares += std::pow(factor * tensor.norm().item<double>(), 2);
    }
    return std::sqrt(squares);
  };
  const double norm = norm_after_one_step("free", "0");
  EXPECT_NEAR(losses(folder_ / "free", "gradient_norm")[0], norm, 1e-4 * norm);
  EXPECT_NEAR(norm_after_one_step("above", "1000"), norm, 1e-4 * norm);
  EXPECT_NEAR(norm_after_one_step("clipped", "0.01"), 0.01, 1e-5);
  EXPECT_NEAR(losses(folder_ / "clipped", "gradient_norm")[0], norm, 1e-4 * norm);  // before it
}

TEST_F(TrainTest, BeginsWithGivenWeights) {
  train(config("first"), {});
  const std::string weights = folder_ / "first/checkpoints/step-000012/model.safetensors";
  train(config("second", {{"init", weights}, {"seed", "3"}}), {});
  EXPECT_EQ(
      losses(folder_ / "second", "validation_loss").front(),
      losses(folder_ / "first", "validation_loss").back());
}

TEST_F(TrainTest, ALossThatIsNoNumberStopsAndKeepsTheLastGoodCheckpoint) {
  // Weight decay that multiplies weights by -10⁶ per step.
  const auto diverging =
      config("run", {{"muon-weight-decay", "1e9"}, {"steps", "50"}, {"checkpoint-interval", "1"}});
  const auto message = error_of<std::runtime_error>([&] { train(diverging, {}); });
  EXPECT_NE(message.find("the run cannot continue"), std::string::npos) << message;
  EXPECT_NE(message.find("step "), std::string::npos);
  const auto all = list_checkpoints(folder_ / "run");
  ASSERT_FALSE(all.empty());
  EXPECT_NE(message.find(all.back()), std::string::npos) << message;
  EXPECT_EQ(damage(all.back()), "");
}

TEST_F(TrainTest, NothingThatIsNotFiniteIsSaved) {
  const auto diverging = config("run", {{"adamw-lr", "1e38"}, {"checkpoint-interval", "1"}});
  EXPECT_NE(
      error_of<std::runtime_error>([&] { train(diverging, {}); }).find("step 1"),
      std::string::npos);
  EXPECT_TRUE(list_checkpoints(folder_ / "run").empty());
}

TEST_F(TrainTest, ADamagedCheckpointIsNamedAndTheOneBeforeOffered) {
  train(config("run"), {});
  std::filesystem::resize_file(folder_ / "run/checkpoints/step-000012/optimizer.safetensors", 99);
  EXPECT_ERROR_SAYS(
      open_run(folder_ / "run", {}), "step-000012' is damaged (optimizer.safetensors");
  EXPECT_ERROR_SAYS(
      open_run(folder_ / "run", {}), "--resume " + (folder_ / "run/checkpoints/step-000008"));
  resume(open_run(folder_ / "run/checkpoints/step-000008", {}), {});
  EXPECT_EQ(damage(folder_ / "run/checkpoints/step-000012"), "");
}

TEST_F(TrainTest, WrongInputIsRefusedBeforeAnythingIsWritten) {
  const auto error = [&](const Options& more) {
    const auto message = error_of<std::exception>([&] { train(config("run", more), {}); });
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run")) << message;
    return message;
  };
  EXPECT_NE(error({{"data", folder_ / "nowhere"}}).find("cannot be read"), std::string::npos);
  EXPECT_NE(error({{"data", ""}}).find("--data"), std::string::npos);
  EXPECT_NE(error({{"vocabulary", "63"}}).find("63"), std::string::npos);
  EXPECT_NE(error({{"batch", "1000"}}).find("less than one batch"), std::string::npos);
  EXPECT_NE(error({{"device", "cuda"}}).find("CUDA"), std::string::npos);
  EXPECT_NE(error({{"device", "toaster"}}).find("toaster"), std::string::npos);
  EXPECT_NE(
      error({{"out", folder_.path()}}).find("should be different folders"), std::string::npos);
}

TEST_F(TrainTest, ARunIsNotOverwrittenAndNotMixedWithOtherData) {
  train(config("run"), {});
  const auto before = read_text(folder_ / "run/metrics.jsonl");
  EXPECT_ERROR_SAYS(train(config("run"), {}), "already contains a run");
  EXPECT_EQ(read_text(folder_ / "run/metrics.jsonl"), before);
  const TemporaryFolder other;
  write_shards(other.path(), 9000);
  const auto error_with = [&](const std::string& data) {
    const auto run = open_run(folder_ / "run/checkpoints/step-000004", {{"data", data}});
    return error_of<std::exception>([&] { resume(run, {}); });
  };
  EXPECT_NE(error_with(other.path()).find("not the data the run started with"), std::string::npos);
  // The same training data, but one token of the validation data changed.
  const TemporaryFolder changed;
  write_shards(changed.path(), 8000);
  std::fstream file(changed / "val_000000.bin", std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(1024 + 2 * 100);
  file.write("\x3f", 1);
  file.close();
  EXPECT_NE(
      error_with(changed.path()).find("not the data the run started with"), std::string::npos);
  EXPECT_EQ(read_text(folder_ / "run/metrics.jsonl"), before);
  EXPECT_ERROR_SAYS(open_run(folder_.path(), {}), "contains no run");
}

}  // namespace
}  // namespace train
