# Installs into an empty folder and uses what is there as others would: the program from text to text, then
# everything again from another place, and examples/ built against the package there.
# cmake -DBUILD=… -DSOURCE=… -DWORK=… -P install_test.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed WORKING_DIRECTORY "${WORK}")
  if(failed)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

# Nothing of the build folder may be needed.
function(check_rpath file)
  execute_process(COMMAND readelf -d "${file}" OUTPUT_VARIABLE dynamic COMMAND_ERROR_IS_FATAL ANY)
  string(FIND "${dynamic}" "${BUILD}/" place)
  if(NOT place EQUAL -1)
    message(FATAL_ERROR "${file} looks for libraries in the build folder: ${dynamic}")
  endif()
endfunction()

function(use_program prefix)
  set(program "${prefix}/bin/group-muon")
  check_rpath("${program}")
  file(GLOB_RECURSE library "${prefix}/lib*/libgroup_muon.so")
  check_rpath("${library}")
  set(place "${prefix}-use")
  run("${program}" --version)
  run("${program}" tokenize "${SOURCE}/docs/theory.md" "${SOURCE}/ARCHITECTURE.md" --learn 300 --out "${place}/data")
  run("${program}" train --data "${place}/data" --out "${place}/run" --layers 1 --heads 2 --width 16 --context 16
    --batch 4 --steps 3 --warmdown 1 --validation-tokens 256 --qk-group 1 --threads 1)
  run("${program}" sample "${place}/run" --prompt "The" --tokens 8)
endfunction()

file(REMOVE_RECURSE "${WORK}")
file(MAKE_DIRECTORY "${WORK}")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")
use_program("${WORK}/prefix")
file(RENAME "${WORK}/prefix" "${WORK}/moved")
use_program("${WORK}/moved")

run("${CMAKE_COMMAND}" -S "${SOURCE}/examples" -B "${WORK}/build" -G Ninja
  "-DCMAKE_PREFIX_PATH=${WORK}/moved" -DCMAKE_BUILD_TYPE=Debug)
run("${CMAKE_COMMAND}" --build "${WORK}/build")
execute_process(COMMAND "${WORK}/build/minimal" OUTPUT_VARIABLE printed RESULT_VARIABLE failed)
message("${printed}")
if(failed OR NOT printed MATCHES "step 200  loss 0\\.0")
  message(FATAL_ERROR "the example did not learn its task")
endif()

# Another torch than the one it was built for is refused, and so is one that is too old.
foreach(torch IN ITEMS "9.8.7;was built for torch" "2.4.1;is too old")
  list(POP_FRONT torch version)
  set(folder "${WORK}/torch-${version}")
  file(WRITE "${folder}/version.py" "__version__ = '${version}+cpu'\n")
  file(WRITE "${folder}/include/torch/library.h" "")
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}/examples" -B "${folder}/build" -G Ninja
    "-DCMAKE_PREFIX_PATH=${WORK}/moved" "-DTORCH_WHEEL_DIR=${folder}"
    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE said)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  if(NOT failed OR NOT said MATCHES "${torch}")
    message(FATAL_ERROR "torch ${version} was not refused: ${said}")
  endif()
endforeach()
