# One process on each node of a PBS job, in this folder and with this environment, where PBS itself starts them:
#
#     bash on_nodes.sh pbs_tmrsh "x1 x2" COMMAND ...
#
# The first node whose part fails ends the others. pbs_tmrsh passes no signal on, so a second one goes after the first;
# with SIGTERM not to the first node, this one: qdel has told the part on it, and torchrun ends at once on a second one.
tmrsh=$1 hosts=$2; shift 2
mkdir -p "${MANYHANDS_OUTPUTS:-outputs}/jobs" && pids=$(mktemp -d "${MANYHANDS_OUTPUTS:-outputs}/jobs/nodes-XXXXXX") || exit
pids=$(cd "$pids" && pwd)
trap 'rm -rf "$pids"' EXIT
here=$(unset PBS_NODENUM PBS_TASKNUM PBS_MOMPORT; export -p)
command="cd $(printf %q "$PWD") && exec $(printf '%q ' "$@")"
declare -A part                           # host -> the process here that waits for it
status=0 told='' patience=''
for host in $hosts; do
    "$tmrsh" "$host" bash -c "$here; echo \$\$ >$(printf %q "$pids/$host"); $command" &
    part[$host]=$!
done
tell() {                                  # all, but the host $1
    told=yes
    for host in "${!part[@]}"; do [ "$host" = "$1" ] || "$tmrsh" "$host" bash -c "kill -TERM \$(<$(printf %q "$pids/$host"))" 2>/dev/null & done
}
trap 'tell ""' USR1 INT HUP
trap 'tell "${hosts%% *}"' TERM
while [ "${#part[@]}" -gt 0 ] && [ "$patience" != 0 ]; do
    sleep 0.2
    for host in "${!part[@]}"; do
        kill -0 "${part[$host]}" 2>/dev/null && continue
        wait "${part[$host]}" && code=0 || code=$?
        unset "part[$host]"
        [ "$code" != 0 ] && [ "$status" = 0 ] || continue
        echo "launch.py: the part of this run on $host ended with status $code, so the others end, too" >&2
        status=$code patience=${told:+600} patience=${patience:-150}  # fifths of a second: who was told to leave may save
        [ -n "$told" ] || tell ""
    done
    [ -z "$patience" ] || patience=$((patience - 1))
done
exit "$status"
