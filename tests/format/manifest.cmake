# Manifests. Builds without Cap'n Proto report that they have none.
if(FRUGAL_WITH_PROCESSES)
  frugal_test_program(NAME manifest_test SOURCE format/manifest_test.cpp IN parts_test
    LIBRARIES frugal_objects)
  frugal_test(NAME manifest_test COMMAND manifest_test)
  # Checks of folders, also by the program.
  frugal_test_program(NAME folder_check_test SOURCE format/folder_check_test.cpp IN parts_test
    LIBRARIES frugal_objects)
  if(FRUGAL_TESTS_TOGETHER)
    add_dependencies(parts_test frugal-fsck)
  else()
    add_dependencies(folder_check_test frugal-fsck)
  endif()
  frugal_test(NAME folder_check_test COMMAND folder_check_test
    PROPERTIES ENVIRONMENT FRUGAL_FSCK=$<TARGET_FILE:frugal-fsck>)
else()
  add_executable(manifest_none_test format/manifest_none_test.cpp)
  target_link_libraries(manifest_none_test PRIVATE frugal_objects GTest::gtest GTest::gtest_main)
  frugal_test(NAME manifest_none_test COMMAND manifest_none_test)
endif()
