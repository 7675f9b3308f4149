#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "tests/testing.h"
#include "train/checkpoint.h"
#include "train/files.h"
#include "train/metrics.h"
#include "train/safetensors.h"

namespace train {
namespace {

namespace fs = std::filesystem;
using torch::Tensor;

const gpt::ModelShape kTiny = {
    .layers = 2, .heads = 4, .kv_heads = 0, .width = 32, .context = 8, .vocabulary = 64};

void spoil(const std::string& path, int64_t at) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(at);
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(at);
  file.put(byte);
}

void save(const std::string& path, const NamedTensors& tensors) {
  OutputFile file(path);
  save_tensors(file, tensors, {{"format", "pt"}});
}

// A model with its optimizer.
struct Trained {
  gpt::Model model;
  group_muon::GroupMuon optimizer;

  explicit Trained(uint64_t seed)
      : model(kTiny, torch::kFloat32, seed), optimizer(group_muon::assemble(model)) {}
  void step() {
    const Tensor tokens = torch::arange(9).unsqueeze(0);
    optimizer.zero_grad();
    model.loss(tokens.slice(1, 0, 8), tokens.slice(1, 1, 9)).backward();
    optimizer.step();
  }
  bool operator==(const Trained& other) const {
    const auto ours = model.parameters(), theirs = other.model.parameters();
    for (size_t i = 0; i < ours.size(); ++i) {
      if (!ours[i].equal(theirs[i])) return false;
    }
    return true;
  }
};

TEST(FilesTest, ChecksumIsCrc32c) {
  EXPECT_EQ(crc32c(0, "123456789", 9), 0xe3069283);  // the check value in its definition
  EXPECT_EQ(crc32c(crc32c(0, "12345", 5), "6789", 4), 0xe3069283);
  const std::string zeros(32, '\0');
  EXPECT_EQ(crc32c(0, zeros.data(), zeros.size()), 0x8a9136aa);  // RFC 3720
}

TEST(FilesTest, ReplacingLeavesNothingBeside) {
  const TemporaryFolder folder;
  replace_file(folder / "a", "one");
  replace_file(folder / "a", "two");
  EXPECT_EQ(read_text(folder / "a"), "two");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
  EXPECT_NE(
      error_of<std::exception>([&] {
        replace_file(folder / "no/a", "x");
      }).find("cannot be written"),
      std::string::npos);
}

TEST(FilesTest, ALockOutlivesItsFileAndKnowsItsFolder) {
  const TemporaryFolder folder;
  make_folder(folder / "run");
  const FolderLock lock(folder / "run");
  EXPECT_THROW(FolderLock(folder / "run"), FolderBusy);
  fs::remove(folder / "run/lock");
  EXPECT_THROW(FolderLock(folder / "run"), FolderBusy);
  lock.require_folder();
  fs::rename(folder / "run", folder / "moved");
  const auto why = error_of<FolderGone>([&] { lock.require_folder(); });
  EXPECT_NE(why.find("moved to '" + (folder / "moved") + "'"), std::string::npos) << why;
  make_folder(folder / "run");
  const FolderLock other(folder / "run");  // another folder of that name
  EXPECT_THROW(lock.require_folder(), FolderGone);
  fs::remove_all(folder / "moved");
  EXPECT_NE(
      error_of<FolderGone>([&] { lock.require_folder(); }).find("was deleted"), std::string::npos);
}

TEST(SafetensorsTest, TensorsOfEveryTypeAndShapeComeBack) {
  const TemporaryFolder folder;
  const NamedTensors tensors = {
      {"float", torch::randn({3, 5})},
      {"transposed", torch::randn({4, 6}).t()},
      {"double", torch::randn({2}, torch::kFloat64)},
      {"bfloat", torch::randn({7}).to(torch::kBFloat16)},
      {"half", torch::randn({7}).to(torch::kHalf)},
      {"long \"quoted\" µ", torch::tensor({1, -2, 3}, torch::kLong)},
      {"scalar", torch::tensor(2.5F)},
      {"empty", torch::empty({0, 3})}};
  save(folder / "a", tensors);
  const auto back = load_tensors(folder / "a");
  ASSERT_EQ(back.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(back.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(back.at(name).equal(tensor)) << name;
  }
  EXPECT_ERROR_SAYS(save(folder / "b", {{"bool", torch::ones({2}, torch::kBool)}}), "Bool");
}

TEST(SafetensorsTest, DamagedFilesAreErrors) {
  const TemporaryFolder folder;
  const std::string path = folder / "a";
  const auto error_after = [&](auto&& harm) {
    save(path, {{"x", torch::ones({10})}});
    harm();
    return error_of([&] { load_tensors(path); });
  };
  for (const int64_t size : {0, 7, 20, 100}) {
    EXPECT_NE(error_after([&] { fs::resize_file(path, size); }).find("damaged"), std::string::npos);
  }
  EXPECT_NE(error_after([&] { spoil(path, 8); }).find("damaged"), std::string::npos);  // {
  EXPECT_NE(error_after([&] { spoil(path, 6); }).find("damaged"), std::string::npos);  // length
}

TEST(CheckpointTest, OptimizersGoOnAsIfNeverStopped) {
  const TemporaryFolder run;
  Trained a(1), b(2);
  a.step();
  a.step();
  const std::string path = save_checkpoint(
      run.path(), a.model, a.optimizer, {.step = 2, .seconds = 1.5, .validation_loss = 3.25});
  EXPECT_EQ(path, run / "checkpoints/step-000002");
  EXPECT_EQ(damage(path), "");
  const auto state = load_checkpoint(path, b.model, b.optimizer);
  EXPECT_EQ(state.step, 2);
  EXPECT_EQ(state.seconds, 1.5);
  EXPECT_EQ(state.validation_loss, 3.25);
  EXPECT_TRUE(a == b);
  a.step();
  b.step();
  EXPECT_TRUE(a == b);
}

TEST(CheckpointTest, BeforeTheFirstStepToo) {
  const TemporaryFolder run;
  Trained a(1), b(2);
  const auto path = save_checkpoint(run.path(), a.model, a.optimizer, {});
  load_checkpoint(path, b.model, b.optimizer);
  a.step();
  b.step();
  EXPECT_TRUE(a == b);
}

TEST(CheckpointTest, NewestAndBestAreKept) {
  const TemporaryFolder run;
  Trained a(1);
  const std::vector<double> losses = {5, 3, 4, 6, 7};
  for (size_t i = 0; i < losses.size(); ++i) {
    save_checkpoint(
        run.path(), a.model, a.optimizer,
        {.step = static_cast<int64_t>(i), .validation_loss = losses[i]});
    fs::create_directory(run / "checkpoints/writing-step-000099");  // from a killed process
    prune_checkpoints(run.path(), 2);
  }
  std::vector<std::string> kept;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) {
    kept.push_back(entry.path().filename());
  }
  std::sort(kept.begin(), kept.end());
  EXPECT_EQ(kept, (std::vector<std::string>{"step-000001", "step-000003", "step-000004"}));
  EXPECT_EQ(best_checkpoint(list_checkpoints(run.path())), run / "checkpoints/step-000001");
}

TEST(CheckpointTest, LaterOnesAreSetAsideAndOtherNamesLeftAlone) {
  const TemporaryFolder run;
  Trained a(1);
  for (const int64_t step : {1, 2, 3}) {
    save_checkpoint(run.path(), a.model, a.optimizer, {.step = step});
  }
  fs::create_directory(run / "checkpoints/step-000002-good");
  std::ofstream(run / "checkpoints/step-000009.tar") << "mine";
  std::ofstream(run / "checkpoints/step-000010") << "a file";
  set_aside_later(run.path(), 1);
  EXPECT_EQ(list_checkpoints(run.path()), std::vector{run / "checkpoints/step-000001"});
  prune_checkpoints(run.path(), 1);
  for (const char* name :
       {"set-aside-step-000002", "set-aside-step-000003", "step-000002-good", "step-000009.tar"}) {
    EXPECT_TRUE(fs::exists(run / (std::string("checkpoints/") + name))) << name;
  }
}

TEST(CheckpointTest, ADamagedOneIsNotTheBestAndNotTheNewestWhole) {
  const TemporaryFolder run;
  Trained a(1);
  const auto save_with = [&](int64_t step, double loss) {
    return save_checkpoint(
        run.path(), a.model, a.optimizer, {.step = step, .validation_loss = loss});
  };
  const std::string good = save_with(1, 5), bad = save_with(2, 3);
  std::ofstream(bad + "/state.json") << "{\"step\":";
  EXPECT_EQ(best_checkpoint({good, bad}), good);
  EXPECT_EQ(newest_whole({good, bad}), good);
  prune_checkpoints(run.path(), 1);
  EXPECT_TRUE(fs::exists(good));
  spoil(good + "/optimizer.safetensors", 100);
  EXPECT_EQ(newest_whole({good, bad}), "");
  EXPECT_EQ(newest_whole({good, bad}, /*weights_only=*/true), good);
}

TEST(CheckpointTest, OneOfTheSameStepIsReplacedWhole) {
  const TemporaryFolder run;
  Trained a(1);
  save_checkpoint(run.path(), a.model, a.optimizer, {.step = 1});
  a.step();
  const auto path =
      save_checkpoint(run.path(), a.model, a.optimizer, {.step = 1, .validation_loss = 2.0});
  EXPECT_EQ(damage(path), "");
  EXPECT_EQ(read_state(path).validation_loss, 2.0);
  EXPECT_EQ(std::distance(fs::directory_iterator(run / "checkpoints"), {}), 1);
}

TEST(CheckpointTest, AnySpoiltByteIsFound) {
  const TemporaryFolder run;
  Trained a(1);
  const auto fresh = [&] { return save_checkpoint(run.path(), a.model, a.optimizer, {.step = 1}); };
  for (const char* file : {"/model.safetensors", "/optimizer.safetensors"}) {
    const auto size = static_cast<int64_t>(fs::file_size(fresh() + file));
    for (const int64_t at : {int64_t{0}, int64_t{300}, size / 2, size - 1}) {
      const std::string path = fresh();
      spoil(path + file, at);
      EXPECT_NE(damage(path).find("checksum"), std::string::npos) << file << " at " << at;
    }
    fs::remove(fresh() + file);
    EXPECT_NE(damage(run / "checkpoints/step-000001").find("missing"), std::string::npos);
  }
  std::ofstream(fresh() + "/state.json") << "{\"step\": 1";
  EXPECT_NE(damage(run / "checkpoints/step-000001"), "");
}

TEST(CheckpointTest, AnyChangeOfItsStateIsFound) {
  const TemporaryFolder run;
  Trained a(1);
  const auto path = save_checkpoint(
      run.path(), a.model, a.optimizer,
      {.step = 1, .validation_loss = 2.5, .config = {{"steps", "40"}}});
  EXPECT_EQ(read_state(path).config, (Options{{"steps", "40"}}));
  const std::string whole = read_text(path + "/state.json");
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string text = whole;
    if (text[at] == '\n' || text[at] == ' ') continue;  // only its meaning counts
    text[at] = text[at] == '7' ? '8' : '7';
    std::ofstream(path + "/state.json") << text;
    EXPECT_NE(damage(path), "") << text;
  }
  std::ofstream(path + "/state.json") << whole;
  EXPECT_EQ(damage(path), "");
}

TEST(CheckpointTest, AnotherShapeIsRefusedByName) {
  const TemporaryFolder run;
  Trained a(1);
  const auto path = save_checkpoint(run.path(), a.model, a.optimizer, {.step = 1});
  gpt::ModelShape shape = kTiny;
  shape.layers = 3;
  gpt::Model deeper(shape, torch::kFloat32, 0);
  EXPECT_ERROR_SAYS(load_weights(path, deeper), "has no transformer.h.2.attn.c_attn.weight");
  shape = kTiny;
  shape.vocabulary = 65;
  gpt::Model wider(shape, torch::kFloat32, 0);
  EXPECT_ERROR_SAYS(load_weights(path, wider), "transformer.wte.weight should have the shape");
}

TEST(MetricsTest, AResumedLogDropsWhatCameAfterTheCheckpoint) {
  const TemporaryFolder run;
  {
    MetricsLog log(run.path());
    for (int64_t step = 1; step <= 5; ++step) log.write(step, {{"loss", 1.0 / step}});
  }
  std::ofstream(run / "metrics.jsonl", std::ios::app) << R"({"step":6,"lo)";  // cut off
  {
    MetricsLog log(run.path(), 3, true);
    log.write(4, {{"loss", 9}});
  }
  EXPECT_EQ(
      read_text(run / "metrics.jsonl"),
      "{\"step\":1,\"loss\":1.0}\n{\"step\":2,\"loss\":0.5}\n"
      "{\"step\":3,\"loss\":0.3333333333333333}\n{\"step\":4,\"loss\":9.0}\n");
}

TEST(MetricsTest, LinesThatCannotBeReadAreKeptAside) {
  const TemporaryFolder run;
  const std::string text =
      "{\"step\":1,\"loss\":1.0}\n{\"step\":[]}\n7\n{\"step\":3,\"loss\":1.0}\n";
  std::ofstream(run / "metrics.jsonl") << text;
  const MetricsLog log(run.path(), 3, true);
  ASSERT_EQ(log.notes().size(), 2);
  EXPECT_NE(log.notes()[0].find("2 lines that cannot be read"), std::string::npos);
  EXPECT_NE(log.notes()[1].find("only 2 of the 3 steps"), std::string::npos);
  EXPECT_EQ(read_text(run / "metrics.jsonl.damaged"), text);
  const MetricsLog again(run.path(), 3, true);
  EXPECT_EQ(again.notes().size(), 1);
  std::ofstream(run / "metrics.jsonl", std::ios::app) << "x\n";
  const MetricsLog third(run.path(), 3, true);
  EXPECT_EQ(read_text(run / "metrics.jsonl.damaged"), text);
  EXPECT_TRUE(fs::exists(run / "metrics.jsonl.damaged-2"));
}

TEST(MetricsTest, AValidationThatIsMadeAgainIsNotThereTwice) {
  const TemporaryFolder run;
  {
    MetricsLog log(run.path());
    log.write(0, {{"validation_loss", 4}});
    log.write(1, {{"loss", 3}});
    log.write(1, {{"validation_loss", 2}});
  }
  {
    const MetricsLog log(run.path(), 1, false);
  }
  EXPECT_EQ(
      read_text(run / "metrics.jsonl"),
      "{\"step\":0,\"validation_loss\":4.0}\n{\"step\":1,\"loss\":3.0}\n");
  {
    const MetricsLog log(run.path());
  }
  EXPECT_EQ(read_text(run / "metrics.jsonl"), "");
}

}  // namespace
}  // namespace train
