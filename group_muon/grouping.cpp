#include "group_muon/grouping.h"

#include <ATen/core/PhiloxRNGEngine.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "group_muon/text.h"

namespace group_muon {
namespace {

// Each (seed, step, parameter, stream) owns 2^20 consecutive counter values of the Philox generator.
constexpr int kDrawBits = 20;

// A uniform number in [0, bound). Draws again for values that would cause modulo bias.
uint32_t uniform_below(uint32_t bound, at::Philox4_32& generator) {
  const uint32_t reject_below = -bound % bound;
  for (;;) {
    const uint32_t draw = generator();
    if (draw >= reject_below) return draw % bound;
  }
}

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> found;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) found.push_back(d);
  }
  return found;
}

bool is_permutation_of(int64_t n, std::vector<int64_t> order) {
  std::sort(order.begin(), order.end());
  std::vector<int64_t> expected(n);
  std::iota(expected.begin(), expected.end(), 0);
  return order == expected;
}

// "6:random:4*0.5" → groups and their factor on the learning rate.
Grouping parse_groups(std::string_view text, std::string_view whole) {
  const auto [groups, factor] = cut(text, '*');
  const auto [size, rest] = cut(groups, ':');
  const auto [rule, shards] = cut(rest, ':');
  Grouping grouping;
  if (text.find('*') != std::string_view::npos) grouping.lr_factor = parse_real(factor, whole);
  if (rest.find(':') != std::string_view::npos) grouping.shards = parse_number(shards, whole);
  if (size != "all") {
    grouping.group_size = parse_number(size, whole);
    TORCH_CHECK_VALUE(
        grouping.group_size > 0, "group_muon: group size 0 in '", whole,
        "': use 1 or more heads, or 'all'");
  }
  if (rule.empty() || rule == "adjacent") {
    grouping.rule = GroupingRule::kAdjacent;
  } else if (rule == "interval") {
    grouping.rule = GroupingRule::kInterval;
  } else if (rule == "random") {
    grouping.rule = GroupingRule::kRandom;
  } else if (rule.find_first_not_of("0123456789-") == std::string_view::npos) {
    grouping.rule = GroupingRule::kGiven;
    grouping.order = parse_numbers(rule, '-', whole);
  } else {
    TORCH_CHECK_VALUE(
        false, "group_muon: unknown grouping rule '", rule, "' in '", whole,
        "': use adjacent, interval, random, or an order of heads such as 2-0-3-1");
  }
  return grouping;
}

// "all*1.5/5" → the periodic entry that belongs to `usual`.
Grouping parse_periodic(std::string_view text, std::string_view whole, const Grouping& usual) {
  const auto [groups, every] = cut(text, '/');
  TORCH_CHECK_VALUE(
      text.find('/') != std::string_view::npos, "group_muon: '~", text, "' in '", whole,
      "' should say at which steps, as in ~all/5");
  Grouping periodic = parse_groups(groups, whole);
  periodic.every = parse_number(every, whole);
  TORCH_CHECK_VALUE(
      periodic.every > 1, "group_muon: '/", every, "' in '", whole,
      "' should be a period of 2 steps or more");
  periodic.from_step = usual.from_step;
  periodic.from_lr = usual.from_lr;
  return periodic;
}

// Appends "6:random~all/5@2000", with or without a periodic entry and a start, which is a step or a learning rate.
void parse_entry(std::string_view text, std::string_view whole, GroupingSchedule& schedule) {
  const auto [groups, from] = cut(text, '@');
  const auto [usual, periodic] = cut(groups, '~');
  Grouping entry = parse_groups(usual, whole);
  if (from.ends_with("lr")) {
    entry.from_lr = parse_real(from.substr(0, from.size() - 2), whole);
  } else if (text.find('@') != std::string_view::npos) {
    entry.from_step = parse_number(from, whole);
  }
  schedule.push_back(entry);
  if (groups.find('~') != std::string_view::npos) {
    schedule.push_back(parse_periodic(periodic, whole, entry));
  }
}

// The text of parse_groups().
std::string groups_text(const Grouping& grouping) {
  std::string text = grouping.group_size == 0 ? "all" : std::to_string(grouping.group_size);
  if (grouping.rule == GroupingRule::kGiven) {
    text += ':' + join(grouping.order, "-");
  } else if (grouping.rule != GroupingRule::kAdjacent || grouping.shards != 1) {
    text += ':' + to_string(grouping.rule);
  }
  if (grouping.shards != 1) text += ':' + std::to_string(grouping.shards);
  if (grouping.lr_factor != 1) text += '*' + to_text(grouping.lr_factor);
  return text;
}

std::string start_text(const Grouping& grouping) {
  if (grouping.from_lr > 0) return to_text(grouping.from_lr) + "lr";
  return std::to_string(grouping.from_step);
}

bool same_start(const Grouping& a, const Grouping& b) {
  return a.from_step == b.from_step && a.from_lr == b.from_lr;
}

// Whether the entries begin in order: by step or by learning rate.
void check_starts(const GroupingSchedule& schedule, const std::string& where) {
  const auto &first = schedule.front(), *by_step = &first, *by_lr = &first;
  for (const auto& entry : schedule) {
    TORCH_CHECK_VALUE(
        entry.from_lr >= 0 && entry.from_lr <= 1, where,
        "a grouping should start at a fraction of ", "the full learning rate, from 0 to 1, not ",
        entry.from_lr);
    if (entry.from_step != 0) by_step = &entry;
    if (entry.from_lr != 0) by_lr = &entry;
  }
  TORCH_CHECK_VALUE(
      by_step->from_step == 0 || by_lr->from_lr == 0, where,
      "a schedule should go by step or by learning rate, not by both: ", by_step->from_step,
      " and ", by_lr->from_lr, "lr");
  TORCH_CHECK_VALUE(
      same_start(first, {}), where, "the first grouping should start at ",
      first.from_lr > 0 ? "0lr" : "step 0", ", not ", start_text(first));
  for (size_t i = 0; i < schedule.size(); ++i) {
    const auto& entry = schedule[i];
    if (entry.every > 1) {
      TORCH_CHECK_VALUE(
          i > 0 && schedule[i - 1].every == 1 && same_start(schedule[i - 1], entry), where,
          "a periodic grouping should follow the one that it replaces at every ", entry.every,
          " steps, and start with it");
      continue;
    }
    TORCH_CHECK_VALUE(
        entry.every == 1, where, "the period of a grouping should be 1 or more, not ", entry.every);
    TORCH_CHECK_VALUE(
        i == 0 || entry.from_step > schedule[i - 1].from_step ||
            entry.from_lr > schedule[i - 1].from_lr,
        where, "the ", by_lr->from_lr > 0 ? "learning rates" : "steps",
        " of a schedule should increase, but ", start_text(entry), " follows ",
        start_text(schedule[i - 1]));
  }
}

}  // namespace

uint64_t parameter_key(std::string_view name) {
  // FNV-1a, 64 bits.
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const unsigned char byte : name) hash = (hash ^ byte) * 0x100000001b3ULL;
  return hash;
}

std::vector<int64_t> random_permutation(int64_t n, const RandomKey& key) {
  constexpr uint64_t kBetweenShards =
      0x9e3779b97f4a7c15ULL;  // far from other parameters and streams
  const uint64_t subsequence = key.parameter + static_cast<uint64_t>(key.stream) +
                               static_cast<uint64_t>(key.shard) * kBetweenShards;
  const uint64_t offset = static_cast<uint64_t>(key.step) << kDrawBits;
  at::Philox4_32 generator(key.seed, subsequence, offset);
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = n - 1; i > 0; --i) {
    std::swap(order[i], order[uniform_below(static_cast<uint32_t>(i + 1), generator)]);
  }
  return order;
}

std::vector<int64_t> head_order(int64_t num_heads, const Grouping& grouping, const RandomKey& key) {
  switch (grouping.rule) {
    case GroupingRule::kRandom: {
      const int64_t size = num_heads / grouping.shards;
      std::vector<int64_t> order;
      for (RandomKey own = key; own.shard < grouping.shards; ++own.shard) {
        for (const auto head : random_permutation(size, own)) {
          order.push_back(own.shard * size + head);
        }
      }
      return order;
    }
    case GroupingRule::kGiven:
      return grouping.order;
    case GroupingRule::kInterval: {
      const int64_t stride = grouping.group_size > 0 ? num_heads / grouping.group_size : 1;
      std::vector<int64_t> order;
      for (int64_t group = 0; group < stride; ++group) {
        for (int64_t head = group; head < num_heads; head += stride) order.push_back(head);
      }
      return order;
    }
    case GroupingRule::kAdjacent:
      break;
  }
  std::vector<int64_t> order(num_heads);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

std::vector<std::vector<int64_t>> separable_heads(
    int64_t num_heads, const GroupingSchedule& schedule) {
  std::vector<int64_t> set(num_heads);  // a head of the same set, in the end the first
  std::iota(set.begin(), set.end(), 0);
  const auto first_of = [&](int64_t head) {
    while (set[head] != head) head = set[head];
    return head;
  };
  for (const auto& grouping : schedule) {
    // A random grouping joins any heads of a shard sooner or later.
    const bool random = grouping.rule == GroupingRule::kRandom && grouping.group_size > 1;
    const int64_t joined = random ? num_heads / grouping.shards : grouping.group_size;
    const auto order =
        random ? head_order(num_heads, {.group_size = 1}, {}) : head_order(num_heads, grouping, {});
    for (int64_t i = 0; i < num_heads; ++i) {
      const int64_t a = first_of(order[i - i % joined]), b = first_of(order[i]);
      set[std::max(a, b)] = std::min(a, b);
    }
  }
  std::vector<std::vector<int64_t>> sets(num_heads);
  for (int64_t head = 0; head < num_heads; ++head) sets[first_of(head)].push_back(head);
  std::erase_if(sets, [](const auto& heads) { return heads.empty(); });
  return sets;
}

const Grouping& grouping_at(const GroupingSchedule& schedule, int64_t step, double lr_fraction) {
  TORCH_CHECK_VALUE(step >= 0, "group_muon: a step should be 0 or more, not ", step);
  size_t now = 0;
  for (size_t i = 1; i < schedule.size(); ++i) {
    const auto& entry = schedule[i];
    const bool begun = entry.from_step <= step && entry.from_lr <= lr_fraction;
    if (entry.every == 1 && begun) now = i;
  }
  const size_t next = now + 1;
  const bool periodic = next < schedule.size() && schedule[next].every > 1;
  return periodic && step % schedule[next].every == 0 ? schedule[next] : schedule[now];
}

GroupingSchedule with_lr_factor(GroupingSchedule schedule, double factor) {
  for (auto& grouping : schedule) grouping.lr_factor *= factor;
  return schedule;
}

GroupingSchedule checked(GroupingSchedule schedule, int64_t num_heads, const std::string& where) {
  constexpr double kLargestFactor = 1e38;  // of about the size of the largest float
  TORCH_CHECK_VALUE(!schedule.empty(), where, "no grouping is given; use 'all' for one group");
  check_starts(schedule, where);
  for (auto& [group_size, rule, order, from_step, shards, from_lr, lr_factor, every] : schedule) {
    if (group_size == 0) group_size = num_heads;
    TORCH_CHECK_VALUE(
        group_size > 0 && num_heads % group_size == 0, where, "group size ", group_size,
        " does not divide ", num_heads, " heads; use one of ", join(divisors(num_heads), ", "));
    TORCH_CHECK_VALUE(
        rule != GroupingRule::kGiven || is_permutation_of(num_heads, order), where, "the order ",
        join(order, "-"), " should list each of the heads 0 … ", num_heads - 1, " exactly once");
    TORCH_CHECK_VALUE(
        rule == GroupingRule::kGiven || order.empty(), where, "the order ", join(order, "-"),
        " is given, but the rule is ", to_string(rule), "; use GroupingRule::kGiven");
    TORCH_CHECK_VALUE(
        shards == 1 || rule == GroupingRule::kRandom, where,
        "shards are for random groups, not for ", to_string(rule), " ones");
    TORCH_CHECK_VALUE(
        shards > 0 && num_heads % shards == 0 && num_heads / shards % group_size == 0, where,
        shards, " shards of ", num_heads, " heads do not hold whole groups of ", group_size,
        "; use a number of shards that divides ", num_heads / group_size);
    TORCH_CHECK_VALUE(
        lr_factor >= 0 && lr_factor <= kLargestFactor, where,
        "the factor on the learning rate should be from 0 to ", kLargestFactor, ", not ",
        lr_factor);
  }
  return schedule;
}

GroupingSchedule parse_schedule(std::string_view given) {
  std::string text(given);
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  GroupingSchedule schedule;
  for (const auto part : split(text, ',')) parse_entry(part, text, schedule);
  return schedule;
}

std::string to_string(GroupingRule rule) {
  switch (rule) {
    case GroupingRule::kAdjacent:
      return "adjacent";
    case GroupingRule::kInterval:
      return "interval";
    case GroupingRule::kRandom:
      return "random";
    case GroupingRule::kGiven:
      return "given";
  }
  TORCH_INTERNAL_ASSERT(false);
}

std::string to_string(const GroupingSchedule& schedule) {
  std::string text;
  for (size_t i = 0; i < schedule.size(); ++i) {
    const auto& entry = schedule[i];
    if (entry.every == 1 && i > 0) text += ',';
    if (entry.every > 1) text += '~';
    text += groups_text(entry);
    if (entry.every > 1) text += '/' + std::to_string(entry.every);
    const bool last = i + 1 == schedule.size() || schedule[i + 1].every == 1;
    if (last && !same_start(entry, {})) text += '@' + start_text(entry);
  }
  return text;
}

}  // namespace group_muon
