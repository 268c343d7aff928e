# frugal_test(NAME name COMMAND command... [LABEL label] [TIER tier] [COST seconds] [TIMEOUT seconds] [SERIAL]
#             [SHARDS number] [PROPERTIES name value...])
# adds a test. docs/testing.md tells what the labels and tiers are.
#   LABEL  unit (the default), header, oracle or system. A unit test should take FRUGAL_UNIT_SECONDS of processor time at most.
#   TIER   base (the default): ./dev test and all others; ci: ./dev test --ci; all: ./dev test --all.
#   COST   seconds of the whole test; ctest begins with the longest.
#   SHARDS of a GoogleTest program that mostly waits: that many tests, NAME_1 and so on, which can run side by side.
#          GoogleTest itself deals the cases out to them, so that none is left out.
if(FRUGAL_SANITIZE)
  set(FRUGAL_UNIT_SECONDS 300)
else()
  set(FRUGAL_UNIT_SECONDS 30)
endif()

add_executable(frugal_budget ${CMAKE_SOURCE_DIR}/tests/support/budget.c)
set_target_properties(frugal_budget PROPERTIES C_EXTENSIONS ON)

function(frugal_test)
  cmake_parse_arguments(PARSE_ARGV 0 t "SERIAL" "NAME;LABEL;TIER;COST;TIMEOUT;SHARDS" "COMMAND;PROPERTIES")
  if(t_UNPARSED_ARGUMENTS OR NOT t_COMMAND)
    message(FATAL_ERROR "frugal_test: ${t_NAME}: ${t_UNPARSED_ARGUMENTS}")
  endif()
  foreach(default LABEL=unit TIER=base COST=1 TIMEOUT=900)
    string(REPLACE "=" ";" default ${default})
    list(GET default 0 name)
    if(NOT t_${name})
      list(GET default 1 t_${name})
    endif()
  endforeach()
  list(GET t_COMMAND 0 program)
  if(TARGET ${program})
    list(POP_FRONT t_COMMAND)
    list(PREPEND t_COMMAND $<TARGET_FILE:${program}>)
  endif()
  if(t_LABEL STREQUAL unit)
    set(budget $<TARGET_FILE:frugal_budget> ${FRUGAL_UNIT_SECONDS})
  endif()
  set(names ${t_NAME})
  if(t_SHARDS)
    set(names)
    foreach(shard RANGE 1 ${t_SHARDS})
      list(APPEND names ${t_NAME}_${shard})
    endforeach()
  endif()
  set(index 0)
  foreach(name IN LISTS names)
    if(t_SHARDS)
      set(share ${CMAKE_COMMAND} -E env GTEST_TOTAL_SHARDS=${t_SHARDS} GTEST_SHARD_INDEX=${index})
    endif()
    add_test(NAME ${name} COMMAND ${budget} ${share} ${t_COMMAND})
    set_tests_properties(${name} PROPERTIES LABELS "${t_LABEL};tier_${t_TIER}" COST ${t_COST} TIMEOUT ${t_TIMEOUT}
      ${t_PROPERTIES})
    if(t_SERIAL)
      set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
    endif()
    math(EXPR index "${index} + 1")
  endforeach()
endfunction()

# frugal_with_programs(target) tells a test's program where the controller and frugal-top are
# (FRUGAL_CONTROLLER, FRUGAL_TOP). A file of its own does: the others are compiled the same way in
# each build folder, so ccache shares them.
function(frugal_with_programs target)
  if(NOT TARGET frugal_programs)
    set(top)
    if(FRUGAL_TOOLS)
      set(top $<TARGET_FILE:frugal_top>)
    endif()
    file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/tests/programs.c CONTENT
      "const char frugal_controller_path[] = \"$<TARGET_FILE:frugal-controller>\";
const char frugal_top_path[] = \"${top}\";
")
    add_library(frugal_programs OBJECT ${CMAKE_BINARY_DIR}/tests/programs.c)
    add_dependencies(frugal_programs frugal-controller)
    target_compile_definitions(frugal_programs INTERFACE FRUGAL_CONTROLLER=frugal_controller_path)
    if(FRUGAL_TOOLS)
      add_dependencies(frugal_programs frugal_top)
      target_compile_definitions(frugal_programs INTERFACE FRUGAL_TOP=frugal_top_path)
    endif()
  endif()
  target_link_libraries(${target} PRIVATE frugal_programs)
endfunction()
