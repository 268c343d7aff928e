# frugal_test(NAME name COMMAND command... [LABEL label] [TIER tier] [COST seconds]
#             [TIMEOUT seconds] [SERIAL] [ONE_THREAD] [SHARDS number] [PROPERTIES name value...])
# adds a test. docs/testing.md explains the labels and tiers.
#   LABEL  unit (the default), header, oracle or system. A unit test should take at most
#          FRUGAL_UNIT_SECONDS of processor time.
#   TIER   base (the default): ./dev test and all others; ci: ./dev test --ci; all: ./dev test --all
#   COST   seconds of the whole test; ctest begins with the longest.
#   ONE_THREAD: the test shows the same with one thread. Under ThreadSanitizer its tier is all. The
#          target tests_all then builds its program, if that has the test's name.
#   SHARDS of a GoogleTest program that mostly waits: so many tests, NAME_1 and so on, which can run
#          concurrently. GoogleTest itself distributes the cases, so none is left out.
if(FRUGAL_SANITIZE)
  set(FRUGAL_UNIT_SECONDS 300)
else()
  set(FRUGAL_UNIT_SECONDS 30)
endif()

add_custom_target(tests_all)
add_executable(frugal_budget ${CMAKE_SOURCE_DIR}/tests/support/budget.c)
set_target_properties(frugal_budget PROPERTIES C_EXTENSIONS ON)

function(frugal_test)
  cmake_parse_arguments(PARSE_ARGV 0 t "SERIAL;ONE_THREAD" "NAME;LABEL;TIER;COST;TIMEOUT;SHARDS"
    "COMMAND;PROPERTIES")
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
  if(t_ONE_THREAD AND FRUGAL_SANITIZE MATCHES "thread")
    set(t_TIER all)
    if(TARGET ${t_NAME})
      set_target_properties(${t_NAME} PROPERTIES EXCLUDE_FROM_ALL ON)
      add_dependencies(tests_all ${t_NAME})
    endif()
  endif()
  list(POP_FRONT t_COMMAND program)
  get_property(together GLOBAL PROPERTY frugal_${program}_is_in)
  if(together)
    get_property(suites GLOBAL PROPERTY frugal_${program}_suites)
    if(NOT t_COMMAND)
      set(t_COMMAND --gtest_filter=${suites})
    elseif(t_COMMAND MATCHES "^--gtest_filter=-[^;]*$")
      string(REPLACE "filter=" "filter=${suites}" t_COMMAND ${t_COMMAND})
    endif()  # a filter that selects cases stays as the caller gave it
    set(program ${together})
  endif()
  if(TARGET ${program})
    set(program $<TARGET_FILE:${program}>)
  endif()
  list(PREPEND t_COMMAND ${program})
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
    set_tests_properties(${name} PROPERTIES LABELS "${t_LABEL};tier_${t_TIER}" COST ${t_COST}
      TIMEOUT ${t_TIMEOUT} ${t_PROPERTIES})
    if(t_SERIAL)
      set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
    endif()
    math(EXPR index "${index} + 1")
  endforeach()
endfunction()

# frugal_with_programs(target) gives a test's program the paths of the controller and of frugal-top
# (FRUGAL_CONTROLLER, FRUGAL_TOP). A separate source file has them: the other files are compiled the
# same way in each build folder, so ccache shares them.
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

# frugal_test_program(NAME name SOURCE file IN program LIBRARIES library...) adds a program of
# GoogleTest's cases. With FRUGAL_TESTS_TOGETHER the files with the same IN are one program, and the
# compiler reads several of them as one file: the headers that they include and the templates that
# they instantiate take most of its time. frugal_test() then runs the file's own suites. So each
# file needs a namespace of its own.
#
# Mutants and the build clang have a program for each file: the former build few of them, the latter
# shows that each file includes the headers that it needs.
option(FRUGAL_TESTS_TOGETHER "One program of many test files" OFF)
function(frugal_test_program)
  cmake_parse_arguments(PARSE_ARGV 0 p "" "NAME;SOURCE;IN" "LIBRARIES")
  if(NOT FRUGAL_TESTS_TOGETHER)
    add_executable(${p_NAME} ${p_SOURCE})
    target_link_libraries(${p_NAME} PRIVATE ${p_LIBRARIES} GTest::gtest GTest::gtest_main)
    return()
  endif()
  if(NOT TARGET ${p_IN})
    add_executable(${p_IN})
    set_target_properties(${p_IN} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
    target_link_libraries(${p_IN} PRIVATE GTest::gtest GTest::gtest_main)
  endif()
  target_sources(${p_IN} PRIVATE ${p_SOURCE})
  target_link_libraries(${p_IN} PRIVATE ${p_LIBRARIES})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${p_SOURCE})
  file(STRINGS ${p_SOURCE} cases REGEX "^TEST(_F|_P)?\\(")
  set(suites)
  foreach(case IN LISTS cases)
    string(REGEX REPLACE "^TEST[_FP]*\\(([A-Za-z0-9_]+),.*" "\\1" suite ${case})
    list(APPEND suites ${suite}.* */${suite}.*)
  endforeach()
  if(NOT suites)
    message(FATAL_ERROR "frugal_test_program: ${p_SOURCE} has no suites")
  endif()
  list(REMOVE_DUPLICATES suites)
  get_property(others GLOBAL PROPERTY frugal_${p_IN}_suites)
  foreach(suite IN LISTS suites)
    if(suite IN_LIST others)
      message(FATAL_ERROR
        "frugal_test_program: another file than ${p_SOURCE} has the suite ${suite}, too")
    endif()
  endforeach()
  set_property(GLOBAL APPEND PROPERTY frugal_${p_IN}_suites ${suites})
  list(JOIN suites ":" suites)
  set_property(GLOBAL PROPERTY frugal_${p_NAME}_is_in ${p_IN})
  set_property(GLOBAL PROPERTY frugal_${p_NAME}_suites ${suites})
endfunction()
