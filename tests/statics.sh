#!/bin/sh
# Static variables inside functions of the library and of Python's native module are constexpr or
# constinit, and so are thread-local ones. Others are initialized by the first call, with a lock of
# the C++ library. A child forked while another thread does that waits for the lock for ever.
# lib/base/immortal.h says where such objects go.
#
# tests/symbols.sh shows the same of what the compiler has made of lib.
#
#   statics.sh ROOT
cd "$1" || exit 2

# Of an indented declaration up to its initializer, function declarations have a parenthesis.
statics() {
  grep -rnE --include='*.cpp' --include='*.h' --include='*.inc' --include='*.cu' \
    -e '^ +([^/"]*[ (])?static +[^(]*(;|=|\{|\[)' -e '^[^/"]*\bthread_local\b' "$@" |
    grep -vE '\b(constexpr|constinit)\b|static_assert|static_cast|\bstatic [^={;[]*\boperator\b'
}

# The check finds known variables, and nothing else.
seen=$(mktemp -d) || exit 2
trap 'rm -rf "$seen"' EXIT
cat > "$seen/found.cpp" <<'END_OF_FOUND'
  static const Functions f = load();
  static Registry* all = [] { return new Registry; }();
  alignas(Servers) static char memory[sizeof(Servers)];
  static std::mutex mutex;
  static std::map<int, int> of{make()};
  if (first) static Kind kind = ask(1);
  thread_local String name;
END_OF_FOUND
cat > "$seen/fine.cpp" <<'END_OF_FINE'
  static constinit std::atomic<int> counter{0};
  static constexpr uint64_t none[2] = {};
  static uint64_t bytes_for(uint64_t keys);
  static Ref to(PyObject* object) {
  static uint8_t flag_mark(uint8_t flag) { return flag >> kMarkAt; }
  const char* call = "";  // static, or as long as the Runtime
  static_assert(sizeof(all) == 3);
static Kind at_namespace_scope = ask(1);
inline constinit thread_local Scheduler* this_scheduler = nullptr;
END_OF_FINE
if [ "$(statics "$seen/found.cpp" | wc -l)" -ne 7 ] || statics "$seen/fine.cpp" | grep -q .; then
  echo "of seven variables, and of fine lines, these are found:"
  statics "$seen/found.cpp" "$seen/fine.cpp"
  exit 1
fi

# Allowed, each with its reason:
#   cuda/kernels.cu: addresses of functions, which the compiler fills in; constexpr allows no cast.
found=$(statics lib bindings/python/native |
  grep -vE '^lib/device/cuda/kernels\.cu:[0-9]+:  static const CudaKernel all\[\] = ')
[ -z "$found" ] && exit 0
echo "variables that the first call initializes:"
echo "$found"
exit 1
