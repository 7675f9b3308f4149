#include "group_muon/roles.h"

#include <algorithm>
#include <regex>

#include "group_muon/text.h"

namespace group_muon {
namespace {

// Made at the first use.
struct Patterns {
  const std::regex head{
      R"((?!pre_)(\w+_)?(lm_head|lm_heads|classifier|classification_head|seq_relationship|qa_outputs|score|embed_out)"
      R"(|logits_proj|start_logits|end_logits|answer_class|dense_prediction|vocab_projector|to_logits|unembed))"};
  // Unless a numbered layer or attention has them.
  const std::regex maybe_head{R"((\w+_)?heads?)"};
  const std::regex head_at_top{"output|out|decoder|fc"};
  const std::regex inside{R"(^\d+$|attn|attention)", std::regex::icase};
  const std::regex table{
      R"(token|embed|(^|_)emb(s|$|_)|(^|_)pos(_|$|ition)|latent|quer(y|ies)($|_)|prompt|probe|table|(^|_)rpb)"
      R"(|codebook|codevector|prototype|register)"};
  const std::regex map{"proj"};  // prompts_visual_projection
  const std::regex bias{"bias(es|_[uv])?$"};
  const std::regex state_space{R"(A_logs?|Ds?|A|dt|dt_bias|time_(decay|first|mix\w*|faaaa))"};
};

const Patterns& patterns() {
  static const Patterns made;
  return made;
}

bool matches(std::string_view text, const std::regex& pattern) {
  return std::regex_match(text.begin(), text.end(), pattern);
}

bool contains(std::string_view text, const std::regex& pattern) {
  return std::regex_search(text.begin(), text.end(), pattern);
}

}  // namespace

std::string head_by_name(std::string_view module) {
  const auto path = split(module, '.');
  const auto last = path.back();
  if (matches(last, patterns().head)) return "known";
  const bool inside = std::any_of(path.begin(), path.end() - 1, [](std::string_view part) {
    return contains(part, patterns().inside);
  });
  if (matches(last, patterns().maybe_head) && !inside) return "guessed";
  return path.size() == 1 && matches(last, patterns().head_at_top) ? "guessed if linear" : "";
}

std::string role_by_name(std::string_view parameter) {
  if (matches(parameter, patterns().state_space)) return "constant";
  if (contains(parameter, patterns().bias)) return "bias";
  const bool table = contains(parameter, patterns().table) && !contains(parameter, patterns().map);
  return table ? "embedding" : "";
}

bool is_embedding_name(std::string_view module) { return module == "wte" || module == "wpe"; }

}  // namespace group_muon
