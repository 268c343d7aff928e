# frugal_test(NAME name COMMAND command... [LABEL label] [TIER tier] [COST seconds] [TIMEOUT seconds] [SERIAL]
#             [PROPERTIES name value...])
# adds a test. docs/testing.md tells what the labels and tiers are.
#   LABEL  unit (the default), header, oracle or system. A unit test may take FRUGAL_UNIT_SECONDS of processor time.
#   TIER   base (the default): ./dev test and all others; ci: ./dev test --ci; all: ./dev test --all.
#   COST   seconds of the whole test; ctest begins with the longest.
if(FRUGAL_SANITIZE)
  set(FRUGAL_UNIT_SECONDS 300)
else()
  set(FRUGAL_UNIT_SECONDS 30)
endif()

add_executable(frugal_budget ${CMAKE_SOURCE_DIR}/tests/support/budget.c)
set_target_properties(frugal_budget PROPERTIES C_EXTENSIONS ON)

function(frugal_test)
  cmake_parse_arguments(PARSE_ARGV 0 t "SERIAL" "NAME;LABEL;TIER;COST;TIMEOUT" "COMMAND;PROPERTIES")
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
    list(PREPEND t_COMMAND $<TARGET_FILE:frugal_budget> ${FRUGAL_UNIT_SECONDS})
  endif()
  add_test(NAME ${t_NAME} COMMAND ${t_COMMAND})
  set_tests_properties(${t_NAME} PROPERTIES LABELS "${t_LABEL};tier_${t_TIER}" COST ${t_COST} TIMEOUT ${t_TIMEOUT}
    ${t_PROPERTIES})
  if(t_SERIAL)
    set_tests_properties(${t_NAME} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()
