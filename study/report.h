#pragma once
// A study's report: one self-contained HTML page, tables, and the data of the figures.

#include <string>
#include <vector>

#include "study/folder.h"

namespace study {

struct Report {
  std::vector<std::string> files;     // files written
  std::vector<std::string> problems;  // problems found, such as runs left out and why
  std::string summary;                // the settings as a table for a terminal
};

/// Writes report.html, report.json, table.md, table.csv, table.tex and differences.csv to `out`.
Report write_report(const Folder& folder, const std::string& out);

}  // namespace study
