// An object of the whole program, at namespace scope. It is made when the library is loaded, and it
// is never destroyed: threads of the host program may call the library while the program exits.
//
// A variable inside a function is no substitute. The first call that reaches it takes a lock, and a
// child forked meanwhile waits for that lock for ever (tests/statics.sh).
#pragma once

namespace frugal {

template <class T>
union Immortal {
  constexpr Immortal() : object() {}
  constexpr ~Immortal() {}
  Immortal(const Immortal&) = delete;
  Immortal& operator=(const Immortal&) = delete;
  constexpr T& operator*() { return object; }
  constexpr T* operator->() { return &object; }

  T object;
};

}  // namespace frugal
