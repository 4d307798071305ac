#!/bin/bash
# Start a process of Hydra's mpiexec on another node of a PBS job: `mpiexec -launcher rsh -launcher-exec pbs_node.sh`.
# PBS starts it, so the nodes need no ssh between them. Hydra quotes its words for a shell, as ssh would have one.
host=$1
shift
exec pbs_tmrsh "$host" bash -c "$*"
