#pragma once
// The commands of group-muon. Each adds itself to the program, with its flags and help.

namespace CLI {
class App;
}

namespace cli {

void add_tokenize(CLI::App& app);
void add_train(CLI::App& app);
void add_sample(CLI::App& app);
void add_analyze(CLI::App& app);
void add_study(CLI::App& app);
void add_report(CLI::App& app);
void add_plan(CLI::App& app);

}  // namespace cli
