# ./dev and the checks of the bindings source this file. $logs has to be an existing folder.

say() { printf '== %s\n' "$*"; }
fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# quietly NAME COMMAND...: runs the command, writes its output into a log, and prints the end of the
# log if the command fails.
quietly() {
  local log="$logs/$1.log"
  shift
  if ! "$@" >"$log" 2>&1 </dev/null; then
    tail -n 40 "$log" >&2
    fail "failed: $* (all of it: $log)"
  fi
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    env DEBIAN_FRONTEND=noninteractive "$@"
  elif command -v sudo >/dev/null; then
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else
    echo "this needs root, and there is no sudo: $*" >&2
    return 1
  fi
}

# need PACKAGE...: installs the Debian packages that are missing.
need() {
  command -v dpkg-query >/dev/null || {
    say "no dpkg here: please see that you have what these Debian packages hold: $*"
    return 0
  }
  local missing=() package
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] ||
      missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return 0
  say "installing ${missing[*]}"
  quietly apt-update as_root apt-get update
  quietly apt-install as_root apt-get install -y --no-install-recommends "${missing[@]}"
}
