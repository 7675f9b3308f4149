# Links against the libtorch inside a pip-installed torch (CPU or CUDA wheel) by plain library paths.
# torch's own package file is not used: in the CUDA wheel it requires a CUDA toolkit, which is not needed here.
#
#   TORCH_WHEEL_DIR    the torch folder in site-packages; by default Python is asked for it
#   TorchWheel::torch  the target to link
#   TorchWheel_TESTED  the versions that the library is tested with (torches.txt). Older ones are refused; newer ones
#                      get a warning.

if(NOT TORCH_WHEEL_DIR)
  # The project's own environment first, then the active Python.
  find_program(TORCH_WHEEL_PYTHON NAMES python3 python
    HINTS "${CMAKE_SOURCE_DIR}/.venv/bin" NO_CMAKE_FIND_ROOT_PATH)
  if(Python_EXECUTABLE)
    set(TORCH_WHEEL_PYTHON "${Python_EXECUTABLE}")
  endif()
  execute_process(
    COMMAND "${TORCH_WHEEL_PYTHON}" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0], end='')"
    OUTPUT_VARIABLE _torch_dir ERROR_QUIET RESULT_VARIABLE _torch_failed)
  if(NOT _torch_failed)
    set(TORCH_WHEEL_DIR "${_torch_dir}" CACHE PATH "The torch folder in site-packages" FORCE)
  endif()
endif()

set(_torch_version "")
if(EXISTS "${TORCH_WHEEL_DIR}/version.py")
  file(STRINGS "${TORCH_WHEEL_DIR}/version.py" _torch_version_line REGEX "^__version__ = ")
  string(REGEX REPLACE "^__version__ = '([^']*)'.*" "\\1" _torch_version "${_torch_version_line}")
endif()

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/torches.txt" _torch_tested REGEX "^[0-9]")
list(JOIN _torch_tested ", " TorchWheel_TESTED)
list(GET _torch_tested 0 _torch_oldest)
list(GET _torch_tested -1 _torch_newest)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torch_oldest "${_torch_oldest}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torch_newest "${_torch_newest}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torch_minor "${_torch_version}")
if(_torch_minor AND _torch_minor VERSION_LESS _torch_oldest)
  message(FATAL_ERROR "torch ${_torch_version} at ${TORCH_WHEEL_DIR} is too old: Group Muon is tested with torch "
    "${TorchWheel_TESTED}. Name another one with -DTORCH_WHEEL_DIR=<site-packages>/torch")
elseif(_torch_minor AND _torch_minor VERSION_GREATER _torch_newest)
  message(WARNING "torch ${_torch_version} is newer than those that Group Muon is tested with: ${TorchWheel_TESTED}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchWheel
  REQUIRED_VARS TORCH_WHEEL_DIR _torch_version
  VERSION_VAR _torch_version
  REASON_FAILURE_MESSAGE "no torch found. Run ./run setup, install torch with pip, or pass -DTORCH_WHEEL_DIR=<site-packages>/torch")

if(TorchWheel_FOUND AND NOT EXISTS "${TORCH_WHEEL_DIR}/include/torch/library.h")
  message(FATAL_ERROR "the torch at ${TORCH_WHEEL_DIR} has no C++ headers. Install torch with pip")
endif()

if(TorchWheel_FOUND AND NOT TARGET TorchWheel::torch)
  set(TorchWheel_VERSION "${_torch_version}")
  add_library(TorchWheel::torch INTERFACE IMPORTED)
  target_include_directories(TorchWheel::torch SYSTEM INTERFACE
    "${TORCH_WHEEL_DIR}/include" "${TORCH_WHEEL_DIR}/include/torch/csrc/api/include")
  target_compile_features(TorchWheel::torch INTERFACE cxx_std_20)
  set(_torch_libraries torch torch_cpu c10)
  if(SKBUILD)
    # In our wheel torch is already loaded, with or without its CUDA part.
    set(_torch_libraries torch_cpu c10)
  elseif(EXISTS "${TORCH_WHEEL_DIR}/lib/libtorch_cuda.so")
    list(APPEND _torch_libraries torch_cuda c10_cuda)
  endif()
  # torch_cuda registers its kernels when it is loaded, so it must stay linked although none of its symbols is used.
  # It finds its own CUDA libraries, so undefined symbols in it are allowed.
  target_link_options(TorchWheel::torch INTERFACE
    "LINKER:--allow-shlib-undefined")
  foreach(_library IN LISTS _torch_libraries)
    target_link_libraries(TorchWheel::torch INTERFACE
      "-Wl,--push-state,--no-as-needed" "${TORCH_WHEEL_DIR}/lib/lib${_library}.so" "-Wl,--pop-state")
  endforeach()
endif()
