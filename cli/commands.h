#pragma once
// The commands of group-muon; each adds itself, with its flags and help, to the program.

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

}  // namespace cli
