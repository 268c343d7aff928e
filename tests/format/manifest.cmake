# Manifests. Builds without Cap'n Proto report that they have none.
if(FRUGAL_WITH_PROCESSES)
  add_executable(manifest_test format/manifest_test.cpp)
  target_link_libraries(manifest_test PRIVATE frugal_objects GTest::gtest GTest::gtest_main)
  frugal_test(NAME manifest_test COMMAND manifest_test)
  # Checks of folders, also by the program.
  add_executable(folder_check_test format/folder_check_test.cpp)
  target_link_libraries(folder_check_test PRIVATE frugal_objects GTest::gtest GTest::gtest_main)
  add_dependencies(folder_check_test frugal-fsck)
  frugal_test(NAME folder_check_test COMMAND folder_check_test
    PROPERTIES ENVIRONMENT FRUGAL_FSCK=$<TARGET_FILE:frugal-fsck>)
else()
  add_executable(manifest_none_test format/manifest_none_test.cpp)
  target_link_libraries(manifest_none_test PRIVATE frugal_objects GTest::gtest GTest::gtest_main)
  frugal_test(NAME manifest_none_test COMMAND manifest_none_test)
endif()
