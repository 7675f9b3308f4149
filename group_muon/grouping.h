#pragma once
// Head groups: which attention heads are orthogonalized together (the paper's g and S).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace group_muon {

enum class GroupingRule { kAdjacent, kInterval, kRandom, kGiven };

/// Key of a random partition. The draw is a pure function of these numbers: nothing has to be
/// saved to repeat it, and every process draws the same partition.
struct RandomKey {
  uint64_t seed = 0;
  int64_t step = 0;
  uint64_t parameter = 0;  // parameter_key(name)
  int64_t stream = 0;      // the segment's stream (layout.h)
  int64_t shard = 0;       // of the grouping's shards
};

/// Hash of a parameter's name, the same on every machine.
uint64_t parameter_key(std::string_view name);

/// A uniformly random permutation of 0 … n-1, drawn for `key`.
std::vector<int64_t> random_permutation(int64_t n, const RandomKey& key);

/// An entry of a schedule: how the heads of a segment are grouped, from when on, and how fast they learn meanwhile.
struct Grouping {
  int64_t group_size = 0;  // g, heads per group; 0: all heads
  GroupingRule rule = GroupingRule::kAdjacent;
  std::vector<int64_t> order = {};  // kGiven only: order of the heads; each run of g is one group
  int64_t from_step = 0;
  /// kRandom only: the heads form this many shards of equal size, and groups are drawn within a shard. Processes that
  /// hold whole shards then need nothing from each other.
  int64_t shards = 1;
  /// Instead of a step: the entry holds while the learning rate is at least this fraction of the full one.
  double from_lr = 0;
  double lr_factor = 1;  // on the learning rate while this grouping is used; not on weight decay
  /// 2 or more: a periodic entry. It belongs to the entry before it, begins with it, and replaces it at steps that are
  /// multiples of this number.
  int64_t every = 1;

  bool operator==(const Grouping&) const = default;
};

/// Groupings with increasing `from_step`, or with increasing `from_lr`; the first starts at 0. Usually there is only one.
using GroupingSchedule = std::vector<Grouping>;

/// The order in which heads are gathered; each run of g heads is one group. For 12 heads and g = 3:
/// adjacent 0 1 2 | 3 4 5 | …    interval 0 4 8 | 1 5 9 | …    random: a new draw for every key
std::vector<int64_t> head_order(int64_t num_heads, const Grouping& grouping, const RandomKey& key);

/// The smallest sets of heads that no grouping of the schedule ever joins: what processes can own separately. Each set
/// is sorted; sets are ordered by their first head.
std::vector<std::vector<int64_t>> separable_heads(
    int64_t num_heads, const GroupingSchedule& schedule);

/// The grouping used at `step`, when the learning rate is `lr_fraction` of the full one.
const Grouping& grouping_at(const GroupingSchedule& schedule, int64_t step, double lr_fraction);

/// The schedule with the learning-rate factors of all its entries multiplied by `factor`.
GroupingSchedule with_lr_factor(GroupingSchedule schedule, double factor);

/// Checks the schedule and replaces "all" by the number of heads. Errors start with `where`.
GroupingSchedule checked(GroupingSchedule schedule, int64_t num_heads, const std::string& where);

/// Conversion from and to text: `6:random`, `all`, `3:7-2-10-0-5-9-1-4-11-3-6-8` (an explicit order),
/// `3:random:4` (within 4 shards), `6:random*0.5` (at half the learning rate), `6:random~all*1.5/5` (random groups of 6,
/// but all heads at one and a half times the learning rate at every fifth step), `1:adjacent@0,6:random@2000` (a
/// schedule by step), `1,6:random@0.5lr` (a schedule by learning rate). The default rule is adjacent.
GroupingSchedule parse_schedule(std::string_view text);
std::string to_string(const GroupingSchedule& schedule);
std::string to_string(GroupingRule rule);

}  // namespace group_muon
