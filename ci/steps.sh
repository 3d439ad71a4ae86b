# shellcheck shell=bash
# Stages of a script, timed. To be sourced: `step NAME` begins one, `skip NAME WHY` says that one is left out, and when the
# script ends, in whatever way, a table says how long each took and which one failed.

steps_done=()
step_name=
step_begin=0
steps_begin=$SECONDS

step_end() {
    [ -z "$step_name" ] || steps_done+=("$(printf '%5d s  %s' $((SECONDS - step_begin)) "$step_name")")
    step_name=
}

step() {
    step_end
    step_name=$1
    step_begin=$SECONDS
    printf '\n== %s\n' "$1"
}

skip() {
    step_end
    steps_done+=("skipped  $1: $2")
    printf '\n== %s\nskipped: %s\n' "$1" "$2"
}

steps_report() {
    local code=$?
    [ "$code" = 0 ] || [ -z "$step_name" ] || step_name="$step_name (FAILED)"
    step_end
    printf '\n== stages\n'
    printf '%s\n' "${steps_done[@]}" "$(printf '%5d s  all' $((SECONDS - steps_begin)))"
    exit "$code"
}
trap steps_report EXIT
