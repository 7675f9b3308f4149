#include "cli/arguments.h"

#include <c10/util/StringUtil.h>

#include <charconv>
#include <cmath>
#include <set>

#include "train/config.h"

namespace cli {
namespace {

const CLI::App* subcommand(const CLI::App& app, const std::string& name) {
  for (const auto* command : app.get_subcommands({})) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

const CLI::App& innermost(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return *command;
}

bool may_be_empty(const CLI::Option& option) {
  return option.get_description().find("empty:") != std::string::npos;
}

bool is_for_once(const CLI::Option& option) {
  return option.get_multi_option_policy() == CLI::MultiOptionPolicy::Throw &&
         option.get_items_expected_max() == 1;
}

// Whether the next word can be the option's value: never a flag, but a negative number can.
bool may_follow(const CLI::Option& option, const std::string& word) {
  return word.rfind("--", 0) != 0 || option.get_type_name() == kAnyText;
}

// "there is no flag --qk-grop; did you mean --qk-group?"
std::string unknown_argument(const CLI::App& app) {
  const auto extras = app.remaining(/*recurse=*/true);
  const std::string& given = extras.front();
  const std::string name = given.substr(0, given.find('='));
  const bool flag = name.rfind('-', 0) == 0;
  if (!flag && !app.get_subcommands().empty()) return "unexpected argument '" + name + "'";
  std::vector<std::string> known;
  if (flag) {
    for (const auto* option : innermost(app).get_options()) {
      for (const auto& long_name : option->get_lnames()) known.push_back("--" + long_name);
    }
  } else {
    for (const auto* command : app.get_subcommands({})) known.push_back(command->get_name());
  }
  const std::string near = train::nearest(name, known);
  return "there is no " + std::string(flag ? "flag " : "command ") + name +
         (near.empty() ? "; see --help" : "; did you mean " + near + "?");
}

// "sample: no run given. Folder of a run (uses its newest checkpoint) or of a checkpoint"
std::string missing_argument(const CLI::App& app) {
  const CLI::App& command = innermost(app);
  for (const auto* option : command.get_options()) {
    if (!option->get_required() || !option->empty()) continue;
    return c10::str(
        command.get_name(), ": no ", option->get_name(), " given. ", option->get_description());
  }
  return "an argument is missing; see --help";
}

template <typename Number>
bool parse(const std::string& text, Number& number) {
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end;
}

// A check that returns "" or what the value should be. It adds nothing to the help.
template <typename Check>
CLI::Validator validator(Check&& check) {
  return CLI::Validator([check](std::string& text) { return check(text); }, "");
}

}  // namespace

std::vector<std::string> checked_words(const CLI::App& app, int argc, char** argv) {
  const std::vector<std::string> given(argv + 1, argv + argc);
  std::vector<std::string> words;
  std::set<const CLI::Option*> seen;
  const CLI::App* command = &app;
  for (size_t i = 0; i < given.size(); ++i) {
    const std::string& word = given[i];
    if (word == "--") {  // only positional arguments follow
      words.insert(words.end(), given.begin() + static_cast<int64_t>(i), given.end());
      break;
    }
    words.push_back(word);
    const auto* inner = subcommand(*command, word);
    if (inner != nullptr) command = inner;
    if (inner != nullptr || word.rfind('-', 0) != 0) continue;
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const auto* option = command->get_option_no_throw(name);
    if (option == nullptr || option->get_items_expected_max() == 0) continue;  // left to the parser
    if (!seen.insert(option).second && is_for_once(*option)) {
      throw WrongUse(name + " is given twice");
    }
    const bool has_next = i + 1 < given.size() && may_follow(*option, given[i + 1]);
    std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (equals == std::string::npos) {
      if (!has_next && option->get_items_expected_min() > 0)
        throw WrongUse(name + " needs a value");
      value = has_next ? given[++i] : "true";
    }
    if (value.empty() && !may_be_empty(*option)) throw WrongUse(name + " is given an empty value");
    const bool joined =
        !value.empty() && name.rfind("--", 0) == 0;  // whatever the value looks like
    words.back() = joined ? name + "=" + value : name;
    if (!joined) words.push_back(value);
  }
  return words;
}

std::string words_of(const CLI::ParseError& error, const CLI::App& app) {
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) return unknown_argument(app);
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) return missing_argument(app);
  std::string text = error.what();
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {  // "--steps: 1 required …"
    return text.substr(0, text.find(':')) + " needs a value";
  }
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr) {
    const std::string before = "Could not convert: ";  // "--learn = x": only numbers are converted
    if (text.rfind(before, 0) == 0) text.erase(0, before.size());
    const size_t equals = text.find(" = ");
    if (equals == std::string::npos) return text + " should be a number";
    return text.substr(0, equals) + " should be a number, not '" + text.substr(equals + 3) + "'";
  }
  const size_t colon = text.find(": should be ");  // of a check below
  if (colon != std::string::npos) text.erase(colon, 1);
  return text;
}

CLI::Validator whole_number(int64_t least, int64_t most) {
  return validator([least, most](const std::string& text) {
    int64_t number = 0;
    if (parse(text, number) && number >= least && number <= most) return std::string();
    const std::string range = most == INT64_MAX ? c10::str(", ", least, " or more")
                                                : c10::str(" from ", least, " to ", most);
    return c10::str("should be a whole number", range, ", not '", text, "'");
  });
}

CLI::Validator number_above_zero() {
  return validator([](const std::string& text) {
    double number = 0;
    if (parse(text, number) && number > 0 && std::isfinite(number)) return std::string();
    return "should be above 0, not '" + text + "'";
  });
}

CLI::Validator one_of(const std::vector<std::string>& choices) {
  return validator([choices](const std::string& text) {
    std::string list;
    for (const auto& choice : choices) {
      if (text == choice) return std::string();
      list += (list.empty() ? "" : " or ") + choice;
    }
    return "should be " + list + ", not '" + text + "'";
  });
}

}  // namespace cli
