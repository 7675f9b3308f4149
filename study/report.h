#pragma once
// A study's report: one HTML page that needs nothing else, tables, and the data of the figures.

#include <string>
#include <vector>

#include "study/folder.h"

namespace study {

struct Report {
  std::vector<std::string> files;     // written
  std::vector<std::string> problems;  // runs that were left out, and why
};

/// Writes report.html, report.json, table.md, table.csv and table.tex to `out`.
Report write_report(const Folder& folder, const std::string& out);

}  // namespace study
