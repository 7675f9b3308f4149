// Memory: of the machine, of cgroups of both versions, and of what cannot fit.

#include <filesystem>
#include <fstream>

#include "testing.h"
#include "train/memory.h"

namespace train {
namespace {

constexpr int64_t kGiga = int64_t{1} << 30;

// A root folder with the files of a machine that has 8 GB free.
class Machine {
 public:
  Machine() { put("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"); }
  void put(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void put(const std::string& path, int64_t number) { put(path, std::to_string(number) + "\n"); }
  int64_t available() const { return available_memory(root_.path()).value(); }

 private:
  TemporaryFolder root_;
};

TEST(MemoryTest, WithoutCgroupsItIsTheMachines) {
  Machine machine;
  EXPECT_EQ(machine.available(), 8 * kGiga);
  machine.put("proc/meminfo", "MemAvailable: 1048576 kB\nSwapFree: 1048576 kB\n");
  EXPECT_EQ(machine.available(), 2 * kGiga);
  EXPECT_FALSE(available_memory("/nowhere").has_value());
  EXPECT_GT(available_memory().value(), 0);
}

TEST(MemoryTest, ACgroupOfVersion2Limits) {
  Machine machine;
  machine.put("proc/self/cgroup", "0::/slice/job\n");
  machine.put("sys/fs/cgroup/slice/job/memory.max", "max\n");
  machine.put("sys/fs/cgroup/slice/job/memory.current", 1 * kGiga);
  EXPECT_EQ(machine.available(), 8 * kGiga);
  machine.put("sys/fs/cgroup/slice/job/memory.max", 6 * kGiga);
  EXPECT_EQ(machine.available(), 5 * kGiga);
  machine.put("sys/fs/cgroup/slice/memory.max", 4 * kGiga);  // also counts: it is around the job's
  machine.put("sys/fs/cgroup/slice/memory.current", 3 * kGiga);
  EXPECT_EQ(machine.available(), 1 * kGiga);
  machine.put(
      "sys/fs/cgroup/slice/memory.stat",
      "anon 5\ninactive_file " + std::to_string(kGiga) + "\nactive_file 7\n");
  EXPECT_EQ(machine.available(), 2 * kGiga + 7) << "files in memory give way";
}

TEST(MemoryTest, AContainerSeesOnlyItsOwnPart) {
  Machine machine;  // the group's path is the host's, but the mount begins at the group
  machine.put("proc/self/cgroup", "0::/docker/0123456789\n");
  machine.put("sys/fs/cgroup/memory.max", 2 * kGiga);
  machine.put("sys/fs/cgroup/memory.current", 3 * kGiga);
  EXPECT_EQ(machine.available(), 0);
  machine.put("sys/fs/cgroup/memory.current", kGiga / 2);
  EXPECT_EQ(machine.available(), 3 * kGiga / 2);
}

TEST(MemoryTest, ACgroupOfVersion1Limits) {
  Machine machine;
  machine.put("proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n");
  machine.put("sys/fs/cgroup/memory/memory.limit_in_bytes", INT64_MAX - 4095);  // no limit
  machine.put("sys/fs/cgroup/memory/memory.usage_in_bytes", 9 * kGiga);
  machine.put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 3 * kGiga);
  machine.put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", 2 * kGiga);
  machine.put(
      "sys/fs/cgroup/memory/job/memory.stat",
      "inactive_file 1\ntotal_inactive_file " + std::to_string(kGiga) + "\n");
  EXPECT_EQ(machine.available(), 2 * kGiga);
}

TEST(MemoryTest, TheLeastIsBelowWhatIsUsedAndGrowsWithTheModel) {
  Config config = configure({{"vocabulary", "50257"}, {"micro-batch", "4"}});
  // GPT-2 Small: 123.5 million weights, of which 38.6 in the embedding.
  EXPECT_NEAR(block_weights(config) + embedding_weights(config), 123.5e6, 0.1e6);
  EXPECT_NEAR(least_model_memory(config), 4 * 123.5e6, 1e6);
  EXPECT_GT(least_training_memory(config), 1.6e9);
  EXPECT_LT(least_training_memory(config), 2.5e9);
  require_training_memory(config);
  for (const char* key : {"layers", "width", "context"}) {
    const auto huge = configure({{key, "2147483648"}}, config);
    EXPECT_ERROR_SAYS(require_training_memory(huge), "training needs at least ");
    EXPECT_ERROR_SAYS(require_training_memory(huge), " GB are available here");
    EXPECT_ERROR_SAYS(require_model_memory(huge), std::string(key) + " = 2147483648");
  }
}

}  // namespace
}  // namespace train
