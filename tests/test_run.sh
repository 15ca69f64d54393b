#!/bin/bash
# The set-up of ./run on a machine that has next to nothing: test_run.sh path/to/run. The tools it looks for are those of a
# folder of our own, in which id, sudo and apt-get write down what they are asked; a copy of the script works beside it, so
# that nothing is built or installed here.
set -u
script=$(cd "$(dirname "$1")" && pwd)/run
work=$(mktemp -d "${TMPDIR:-/tmp}/test_run.XXXXXX")
trap 'rm -rf "$work"' EXIT
cp "$script" "$work/run"
tools=$work/tools
mkdir "$tools"
for tool in bash sh env cat dirname getconf uname mkdir grep sed head; do
    ln -s "$(command -v $tool)" "$tools/$tool"
done
failures=0 checks=0

# stub <name> <line of shell>
stub() {
    printf '#!/bin/sh\necho "%s $*" >>"%s"\n%s\n' "$1" "$work/asked" "$2" >"$tools/$1"
    chmod +x "$tools/$1"
}

fail() {
    failures=$((failures + 1))
    echo "FAILED: $*"
    sed 's/^/  said: /' "$work/said"
    sed 's/^/  asked: /' "$work/asked"
}

# calls <arguments>: ./run with these, and nothing to be found but the tools. What it says and asks is left in files.
calls() {
    : >"$work/asked"
    env -i PATH="$tools" HOME="$work" "$work/run" "$@" >"$work/said" 2>&1 </dev/null
    code=$?
    checks=$((checks + 1))
    [[ $code -ne 0 ]] || fail "run $*: exit code 0, though there is no cmake"
}

says() { checks=$((checks + 1)); grep -qE -e "$1" "$work/said" || fail "does not say '$1'"; }
never_says() { checks=$((checks + 1)); if grep -qE -e "$1" "$work/said"; then fail "says '$1'"; fi; }
asks() { checks=$((checks + 1)); grep -qE -e "$1" "$work/asked" || fail "does not ask '$1'"; }
never_asks() { checks=$((checks + 1)); if grep -qE -e "$1" "$work/asked"; then fail "asks '$1'"; fi; }

# Neither root nor sudo: every package of the command is named, in one line.
stub id 'echo 1000'
stub apt-get 'exit 0'
calls demo; says '^Missing packages.*apt-get install gcc .*cmake ninja-build$'
calls test
says 'apt-get install gcc .*cmake ninja-build g\+\+ make pkg-config libcmocka-dev clang .*valgrind gcovr'
says ' python3-dev python3 python3-venv$'
checks=$((checks + 1))
[[ $(wc -l <"$work/said") -eq 1 ]] || fail "more than one line"
calls test asan; says ' python3 python3-venv$'; never_says python3-dev
calls test --quick; says ' libcmocka-dev$'; never_says python
calls bench; says 'ninja-build python3 python3-venv$'
never_asks apt-get

# A Python without pip builds no package, one without its headers neither.
stub python3 'case $2 in *pip*) exit 1 ;; esac'
calls test python; says ' python3-venv$'
stub python3 'case $2 in *Python.h*) exit 1 ;; esac'
calls test python; says ' python3-dev$'; never_says python3-venv
stub python3 'exit 0'
calls test python; says gcovr; never_says python
rm "$tools/python3"

# Without apt there is nothing to ask.
rm "$tools/apt-get"
calls demo; says '^Missing: gcc .*there is no apt-get here'
stub apt-get 'exit 0'

# sudo that asks for nothing is used, and so is root; one that would ask is not where nobody can answer.
stub sudo 'case $1 in -n) shift ;; esac; exec "$@"'
stub true 'exit 0'
calls demo; says '^Installing with apt: gcc .*ninja-build$'
asks '^sudo -n apt-get -q update$'; asks '^apt-get -qy install --no-install-recommends gcc .*ninja-build$'
stub sudo 'case $1 in -n) exit 1 ;; esac; exec "$@"'
calls demo; says '^Missing packages'; never_asks apt-get
if command -v script >/dev/null; then # at a terminal it may
    : >"$work/asked"
    script -qec "env -i PATH='$tools' HOME='$work' '$work/run' demo" /dev/null >"$work/said" 2>&1 </dev/null
    says 'Installing with apt: gcc'
    asks '^sudo env DEBIAN_FRONTEND=noninteractive apt-get -qy install'
fi
stub id 'echo 0'
calls demo; says '^Installing with apt'; asks '^apt-get -qy install'; never_asks sudo

echo "$checks checks, $failures failures"
[[ $failures -eq 0 ]]
