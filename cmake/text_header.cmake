# Generates a header with a text file as a string: cmake -DFILE=… -DHEADER=… -DNAME=kName -P text_header.cmake
file(READ "${FILE}" _text)
get_filename_component(_source "${FILE}" NAME)
file(WRITE "${HEADER}" "#pragma once
// Generated from ${_source}.

namespace study {
constexpr const char* ${NAME} = R\"~~~(${_text})~~~\";
}  // namespace study
")
