# Installs the package into an empty folder and builds examples/ against it, as another project would.
# cmake -DBUILD=… -DSOURCE=… -DWORK=… -P install_test.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

file(REMOVE_RECURSE "${WORK}")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")
run("${CMAKE_COMMAND}" -S "${SOURCE}/examples" -B "${WORK}/build" -G Ninja
  "-DCMAKE_PREFIX_PATH=${WORK}/prefix" -DCMAKE_BUILD_TYPE=Debug)
run("${CMAKE_COMMAND}" --build "${WORK}/build")
execute_process(COMMAND "${WORK}/build/minimal" OUTPUT_VARIABLE printed RESULT_VARIABLE failed)
message("${printed}")
if(failed OR NOT printed MATCHES "step 200  loss 0\\.0")
  message(FATAL_ERROR "the example did not learn its task")
endif()
