#!/bin/sh
# The documents say what is true: every program in them compiles without a warning and runs, every command marked as
# runnable succeeds, both print what the document says they print, and every link between files leads somewhere.
#
#   ```c              a block with a main() is a program
#   ```sh run         commands, run in an empty folder with heed in the PATH; other sh blocks are for reading
#   ```text output    what the program or the commands before it print; <...> stands for any text within a line
#
# Usage: test_docs.sh SOURCE HEED LIBDIR CC SCRATCH
set -eu
source=$1 heed=$2 libdir=$3 cc=$4 scratch=$5
unset HEED_KERNEL
rm -rf "$scratch"
mkdir -p "$scratch"
cd "$source"
failures=0

fail() { # fail <where> <what>
    printf '%s: %s\n' "$1" "$2" >&2
    failures=$((failures + 1))
}

# Each block to a file of its own: NNN.c or NNN.sh, with NNN.want where its output is given; NNN.where says whence.
cat >"$scratch/split.awk" <<'AWK'
function close_block() {
    if (kind == "c" && text ~ /int main\(/ || kind == "sh run") {
        name = sprintf("%s/%03d", out, ++count)
        printf "%s", text >(name (kind == "c" ? ".c" : ".sh"))
        print file ":" start >(name ".where")
    } else if (kind == "text output" && name)
        printf "%s", text >(name ".want")
    else if (kind == "text output")
        print file ":" start ": output of what?" >"/dev/stderr"
}
FNR == 1 { inside = 0; name = ""; file = FILENAME }
/^```/ && !inside { inside = 1; kind = substr($0, 4); start = FNR; text = ""; next }
/^```/ { inside = 0; close_block(); next }
inside { text = text $0 "\n" }
AWK

# Compares line by line; the pieces around <...> must come in order, the first at the start, the last at the end.
cat >"$scratch/compare.awk" <<'AWK'
function agrees(want, got,    pieces, n, i, at) {
    n = split(want, pieces, "<[.][.][.]>")
    for (i = 1; i <= n; i++) {
        at = pieces[i] == "" ? 1 : index(got, pieces[i])
        if (!at || (i == 1 && at != 1))
            return 0
        if (i == n && i > 1)
            return substr(got, length(got) - length(pieces[i]) + 1) == pieces[i]
        got = substr(got, at + length(pieces[i]))
    }
    return got == ""
}
NR == FNR { want[++wanted] = $0; next }
{ got++ }
got > wanted { print "prints more than is said: " $0; bad = 1; exit }
!agrees(want[got], $0) { print "says:   " want[got] "\nprints: " $0; bad = 1; exit }
END {
    if (!bad && got + 0 < wanted)
        print "says, but does not print: " want[got + 1]
    exit bad || got + 0 < wanted
}
AWK

awk -v out="$scratch" -f "$scratch/split.awk" README.md docs/*.md

run() { # run <name without its ending> <command...>
    name=$1
    shift
    mkdir -p "$name.d"
    if ! (cd "$name.d" && PATH=$(dirname "$heed"):$PATH "$@") >"$name.got" 2>"$name.err" </dev/null; then
        fail "$where" "does not run: $(cat "$name.err")"
    elif [ -e "$name.want" ] && ! difference=$(awk -f "$scratch/compare.awk" "$name.want" "$name.got"); then
        fail "$where" "prints something else
$difference"
    fi
}

blocks=0
for file in "$scratch"/[0-9]*.c "$scratch"/[0-9]*.sh; do
    [ -e "$file" ] || continue
    blocks=$((blocks + 1))
    name=${file%.*}
    where=$(cat "$name.where")
    case $file in
    *.sh) run "$name" sh -eu "$file" ;;
    *.c)
        if "$cc" -std=c11 -O1 -Wall -Wextra -Werror -I include "$file" -o "$name.exe" -L "$libdir" \
            -Wl,-rpath,"$libdir" -lheed -lm 2>"$name.err"; then
            run "$name" "$name.exe"
        else
            fail "$where" "does not compile: $(cat "$name.err")"
        fi
        ;;
    esac
done
[ "$blocks" -gt 10 ] || fail "README.md, docs" "$blocks programs and commands were found, there should be more"

# [text](path) and [text](path#part), from the folder of the document.
links=0
for document in ./*.md docs/*.md docs/decisions/*.md; do
    grep -o '](\([^)#]*\)' "$document" | sed 's/^](//; /^https*:/d; /^$/d' >"$scratch/links" || continue
    while read -r link; do
        links=$((links + 1))
        [ -e "$(dirname "$document")/$link" ] || fail "$document" "links to $link, which is not there"
    done <"$scratch/links"
done

echo "$blocks programs and commands, $links links, $failures failures"
[ "$failures" -eq 0 ]
