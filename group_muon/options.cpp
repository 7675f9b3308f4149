#include "group_muon/options.h"

#include <charconv>
#include <cmath>
#include <type_traits>

#include "group_muon/text.h"

namespace group_muon {
namespace {

// Checks of single values.

template <typename T>
void any(std::string_view, const T&) {}

template <auto parse>
void parses(std::string_view, const std::string& word) {
  parse(word);
}

void not_negative(std::string_view name, double value) {
  constexpr double kLargest = 1e38;  // of about the size of the largest float
  TORCH_CHECK_VALUE(value >= 0, name, " should be 0 or more, not ", value);
  TORCH_CHECK_VALUE(value <= kLargest, name, " should be at most ", kLargest, ", not ", value);
}

void fraction(std::string_view name, double value) {
  TORCH_CHECK_VALUE(value >= 0 && value < 1, name, " should be in [0, 1), not ", value);
}

void step_count(std::string_view name, int64_t value) {
  TORCH_CHECK_VALUE(value >= 0 && value <= 100, name, " should be from 0 to 100, not ", value);
}

void triples(std::string_view name, const std::vector<double>& flat) {
  TORCH_CHECK_VALUE(
      flat.size() % 3 == 0, name, " should be triples a, b, c, not ", flat.size(), " numbers");
}

void scale_or_same(std::string_view, const std::string& word) {
  if (word != "same") parse_scale_rule(word);
}

// Values as text.

std::string show(double value) { return to_text(value); }
std::string show(int64_t value) { return to_text(value); }
std::string show(bool value) { return value ? "true" : "false"; }
std::string show(const std::string& value) { return value; }
std::string show(const Layout& value) { return to_string(value); }

template <typename T>
std::string show(const std::vector<T>& values) {
  std::string text;
  for (const auto& value : values) text.append(text.empty() ? "" : ",").append(show(value));
  return text;
}

template <typename Number>
void read_number(std::string_view text, std::string_view name, const char* kind, Number& value) {
  const char *begin = text.data(), *end = begin + text.size();
  const auto [rest, error] = std::from_chars(begin, end, value);
  TORCH_CHECK_VALUE(
      error == std::errc() && rest == end, name, " should be ", kind, ", not '", text, "'");
}

void read(std::string_view text, std::string_view name, double& value) {
  read_number(text, name, "a number", value);
}

void read(std::string_view text, std::string_view name, int64_t& value) {
  read_number(text, name, "a whole number", value);
}

void read(std::string_view text, std::string_view name, bool& value) {
  TORCH_CHECK_VALUE(
      text == "true" || text == "false", name, " should be true or false, not '", text, "'");
  value = text == "true";
}

void read(std::string_view text, std::string_view, std::string& value) { value = text; }
void read(std::string_view text, std::string_view, Layout& value) { value = parse_layout(text); }

template <typename T>
void read(std::string_view text, std::string_view name, std::vector<T>& values) {
  values.clear();
  if (text.empty()) return;
  for (const auto part : split(text, ',')) read(part, name, values.emplace_back());
}

template <typename T>
constexpr const char* kTypeName = "str";  // also a layout
template <>
constexpr const char* kTypeName<double> = "float";
template <>
constexpr const char* kTypeName<int64_t> = "int";
template <>
constexpr const char* kTypeName<bool> = "bool";
template <>
constexpr const char* kTypeName<std::vector<double>> = "float[]";
template <>
constexpr const char* kTypeName<std::vector<int64_t>> = "int[]";
template <>
constexpr const char* kTypeName<std::vector<std::string>> = "str[]";

std::vector<Option> make_list() {
  const GroupMuonOptions defaults;
  // Numbers are shown as they are written in the list.
  const auto initial = [](const std::string& written, const std::string& value) {
    return written == "{}" || written.front() == '"' ? value : written;
  };
#define GROUP_MUON_ENTRY(type, name, value, part, check, help)                       \
  {#name,                                                                            \
   kTypeName<type>,                                                                  \
   initial(#value, show(defaults.name())),                                           \
   Part::part,                                                                       \
   help,                                                                             \
   [](const GroupMuonOptions& options) { return show(options.name()); },             \
   [](GroupMuonOptions& options, std::string_view text, std::string_view shown_as) { \
     read(text, shown_as, options.name());                                           \
   },                                                                                \
   [](const GroupMuonOptions& options, std::string_view shown_as) {                  \
     check(shown_as, options.name());                                                \
   }},
  return {GROUP_MUON_OPTIONS(GROUP_MUON_ENTRY)};
#undef GROUP_MUON_ENTRY
}

const Option& find_option(std::string_view name, Part part) {
  std::vector<std::string> names;
  for (const auto& option : option_list()) {
    if (option.part > part) continue;
    if (name == option.name) return option;
    names.emplace_back(option.name);
  }
  const std::string near = nearest(name, names);
  TORCH_CHECK_VALUE(
      false, "group_muon: there is no option '", name, "' here",
      near.empty() ? std::string() : c10::str("; did you mean '", near, "'?"));
}

OrthogonalizeOptions orthogonalize_options(const GroupMuonOptions& options) {
  OrthogonalizeOptions result;
  result.method = parse_method(options.method());
  const auto named = [&](Method method) {
    return coefficient_list(options.coefficients(), options.steps(), options.tail_steps(), method);
  };
  if (const auto& own = options.custom_coefficients(); own.empty()) {
    result.coefficients = named(Method::kNewtonSchulz);
    result.gram_coefficients = named(Method::kGram);
  } else {
    std::vector<Coefficients> list;
    for (size_t i = 0; i < own.size(); i += 3) list.push_back({own[i], own[i + 1], own[i + 2]});
    result.coefficients = with_tail(std::move(list), options.tail_steps());
  }
  result.restarts = options.restarts();
  result.precision = parse_precision(options.precision());
  result.engine = parse_engine(options.engine());
  result.eps = options.eps();
  result.relative_eps = options.relative_eps();
  result.rank_tolerance = options.rank_tolerance();
  check(result);
  return result;
}

}  // namespace

const std::vector<Option>& option_list() {
  static const std::vector<Option> list = make_list();
  return list;
}

std::string to_string(Part part) {
  return part == Part::kOrthogonalize ? "orthogonalize" : part == Part::kStep ? "step" : "weight";
}

GroupMuonOptions parse_options(std::string_view text, Part part) {
  GroupMuonOptions options;
  for (const auto word : split(text, ' ')) {
    if (word.empty()) continue;
    const auto [name, value] = cut(word, '=');
    const Option& option = find_option(name, part);
    TORCH_CHECK_VALUE(
        word.size() > name.size(), "group_muon: '", word, "' in '", text,
        "' should have a value, as in ", name, "=", option.initial);
    option.set(options, value, c10::str("group_muon: ", name));
  }
  return options;
}

GroupMuonOptions::GroupMuonOptions(double lr) : lr_(lr) {}

template <typename Visit>
void GroupMuonOptions::for_each_field(Visit&& visit) {
#define GROUP_MUON_VISIT(type, name, ...) visit(#name, &GroupMuonOptions::name##_);
  GROUP_MUON_OPTIONS(GROUP_MUON_VISIT)
#undef GROUP_MUON_VISIT
}

void GroupMuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_field([&](const char* name, auto member) {
    const auto& value = this->*member;
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Layout>) {
      archive.write(name, torch::IValue(to_string(value)));
    } else {
      archive.write(name, torch::IValue(value));
    }
  });
}

void GroupMuonOptions::serialize(torch::serialize::InputArchive& archive) {
  // Fields that an older version did not write keep their defaults.
  for_each_field([&](const char* name, auto member) {
    torch::IValue saved;
    if (!archive.try_read(name, saved)) return;
    auto& value = this->*member;
    using T = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<T, Layout>) {
      value = parse_layout(saved.toStringRef());
    } else {
      value = saved.to<T>();
    }
  });
}

bool GroupMuonOptions::operator==(const GroupMuonOptions& other) const {
  bool equal = true;
  for_each_field([&](const char*, auto member) { equal &= this->*member == other.*member; });
  return equal;
}

GroupMuonOptions GroupMuonOptions::merged_with(const GroupMuonOptions& defaults) const {
  const GroupMuonOptions untouched;
  GroupMuonOptions result = *this;
  for_each_field([&](const char*, auto member) {
    if (this->*member == untouched.*member) result.*member = defaults.*member;
  });
  return result;
}

double lr_fraction(const GroupMuonOptions& options) {
  return options.full_lr() > 0 ? options.lr() / options.full_lr() : 1;
}

StepOptions step_options(const GroupMuonOptions& options) {
  for (const auto& option : option_list()) {
    option.check(options, c10::str("group_muon: ", option.name));
  }
  const auto base = parse_scale_rule(options.base_scale());
  return {
      .momentum = options.momentum(),
      .nesterov = options.nesterov(),
      .average = options.average(),
      .seed = static_cast<uint64_t>(options.seed()),
      .scale =
          {base, options.transfer() == "same" ? base : parse_scale_rule(options.transfer()),
           parse_scale_reference(options.reference())},
      .match_spectral = options.match_spectral(),
      .row_balance = options.row_balance(),
      .orthogonalize = orthogonalize_options(options),
  };
}

}  // namespace group_muon
