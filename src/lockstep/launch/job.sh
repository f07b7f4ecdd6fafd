export PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
errors=${record}_$SLURM_JOB_ID.errors # what ranks failed with, however often the job is queued
rm -f "$record.$SLURM_JOB_ID."*.first # of a stay that ended with its node
is_terminated=
trap 'is_terminated=yes' TERM # SLURM takes the job away; the ranks know, save, and leave with 143

say() { echo "lockstep: $*"; }

# One task per rank. srun ends the others when one fails, and reports the highest exit code, which
# then is theirs: so the first to fail writes its own down, and its error. One that was killed is
# nobody's victim, and writes over what those it left alone have written. The shell around a rank
# outlives signals that are meant for it. A file system may take a while to see a file under a name
# that was not there before, so each try has a name of its own.
train() {
  local own
  code=0 error=
  LOCKSTEP_FIRST_FAILURE=$(realpath -m "$record.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$try.first")
  export LOCKSTEP_FIRST_FAILURE LOCKSTEP_RESTART_COUNT=$((try - 1))
  srun --kill-on-bad-exit=1 --export=ALL "${srun_options[@]}" bash -c '
    trap : USR1 TERM
    "$@"
    code=$?
    case $code in
      0) ;;
      135 | 136 | 137 | 139) echo $code >"$LOCKSTEP_FIRST_FAILURE" ;;
      *) (set -o noclobber; echo $code >"$LOCKSTEP_FIRST_FAILURE") 2>/dev/null ;;
    esac
    exit $code' rank "${command[@]}" || code=$?
  if { read -r own; read -r error; } <"$LOCKSTEP_FIRST_FAILURE"; [[ -n $own ]]; then code=$own; fi 2>/dev/null
  rm -f "$LOCKSTEP_FIRST_FAILURE"
}

# A bug comes back: so many times the same error at the same step, and it is not tried again.
is_crash_loop() {
  [[ -n $error ]] || return
  say "$error"
  echo "$error" >>"$errors"
  (($(grep -cFxe "$error" "$errors") >= crash_loop))
}

# Back to the queue; started again, the run goes on from its newest checkpoint. SLURM answers with a
# SIGTERM to every process of the job. It must not end scontrol, which may not have exited yet.
requeue() {
  if ((${SLURM_RESTART_COUNT:-0} >= requeues)); then
    say "$1; not queued again: --requeues $requeues"
  elif (trap '' TERM; exec scontrol requeue "$SLURM_JOB_ID"); then
    say "$1; the job is back in the queue"
    sleep 600 # until SLURM ends this script
  else
    say "$1, but SLURM did not requeue the job; submit it again to resume"
  fi
  exit "$code"
}

is_preempted() {
  scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING .*PreemptTime=[0-9]'
}

# SLURM tells ranks of the time limit, up to a minute early; between two tries there is none.
is_limit_near() {
  local end
  end=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o ' EndTime=[0-9T:-]*[0-9]') || return
  (($(date +%s) >= $(date -d "${end#*=}" +%s) - warn - 60))
}

# A node that died takes SLURM minutes to notice. It then queues the job again by itself.
wait_for_nodes() {
  local until=$((SECONDS + 600))
  while ((SECONDS < until)); do
    timeout 60 srun --overlap --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --quiet true && return
    [[ -z $is_terminated ]] || return
    say "not all nodes answer; waiting for them, or for SLURM to queue the job again"
    sleep 10
  done
}

for ((try = 1; ; try++)); do
  train
  if is_crash_loop; then
    say "the same error $crash_loop times in the same place; not trying again"
    code=4
  fi
  case $code in
    0 | 2 | 3 | 4 | 5 | 6 | 129 | 130 | 131) break ;; # finished, stopped, or a restart is no help
    143) if is_preempted; then requeue "saved: preempted by another job"; else break; fi ;;
  esac
  [[ -z $is_terminated ]] || break # cancelled, or in the queue again already
  ((code != 138)) || requeue "saved before the time limit"
  ((try <= restarts)) || break
  tries="try $((try + 1)) of $((restarts + 1))"
  say "a rank ended with exit code $code; restarting all ranks ($tries)"
  wait_for_nodes
  [[ -z $is_terminated ]] || break
  ! is_limit_near || requeue "the time limit is near"
done
exit "$code"
