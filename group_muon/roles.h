#pragma once
// What names say of a weight: output head, embedding or constant. The one list of such names, for C++ and Python.

#include <string>
#include <string_view>

namespace group_muon {

/// What the dotted name of a module, below the model, says about an output head. "known": it is one. "guessed": it
/// probably is. "guessed if linear": it is directly below the model, and probably one if it is a linear layer. "": no.
/// In a head, the last matrix makes the output.
std::string head_by_name(std::string_view module);

/// What the own name of a parameter says, if no known layer has it. "embedding": a table of vectors, not a map from
/// vectors to vectors. "bias". "constant": of a state space. "": nothing.
std::string role_by_name(std::string_view parameter);

/// Whether a module of this name, the last part alone, is an embedding, whatever its type.
bool is_embedding_name(std::string_view module);

}  // namespace group_muon
