# Writes HEADER with the commit of SOURCE, if the commit has changed.
execute_process(COMMAND git describe --always --dirty --abbrev=12
  WORKING_DIRECTORY "${SOURCE}" OUTPUT_VARIABLE _commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT _commit)
  set(_commit "unknown")
endif()
set(_text "#pragma once\n#define GROUP_MUON_COMMIT \"${_commit}\"\n")
set(_old "")
if(EXISTS "${HEADER}")
  file(READ "${HEADER}" _old)
endif()
if(NOT _old STREQUAL _text)
  file(WRITE "${HEADER}" "${_text}")
endif()
