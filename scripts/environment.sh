# Sourced by train.sh, test.sh and .ci/run. It is a function because a sourced file sees its caller's arguments.

# install_environment [EXTRAS]: create .venv with the project and these extras if needed, and activate it.
install_environment() {
  local extras="${1:-}" stamp
  stamp=".venv/installed-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-12)${extras:+-$extras}"
  if [ ! -e "$stamp" ]; then
    { mkdir -p .venv && [ -w .venv ] && [ -w . ]; } 2>/dev/null || {
      echo "error: $PWD/.venv cannot be written: copy the checkout to a folder that you may write to" >&2
      exit 2
    }
    echo "installing into .venv (once)..."
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "error: $(.venv/bin/python --version) is too old: remove .venv and set PYTHON to Python 3.11 or newer" >&2
      exit 2
    }
    local log
    log=$(.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
      -e ".${extras:+[$extras]}" 2>&1) || {
      printf '%s\n' "$log" >&2
      exit 1
    }
    touch "$stamp"
  fi
  export PATH="$PWD/.venv/bin:$PATH"
}
