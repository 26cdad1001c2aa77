#!/bin/bash
# A training on several nodes under Slurm that restarts when a worker is lost:
#
#     sbatch slurm.sh python train.py --epochs 90
#
# Not with --export=NONE: srun would pass nothing on, not even run_worker.
# The script calls tfopt.distribute.strategy() and resumes from its last checkpoint, in a folder that all nodes share;
# tfopt.callbacks.TrainingCheckpoint does that.
# Lines that start with ##SBATCH are disabled; remove one # to enable a line.

#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
##SBATCH --partition=gpu
##SBATCH --account=project

# One task is one worker. A single one on a node takes all of the job's GPUs there; --ntasks-per-node=4 divides them.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

# GPUs per node. Not --gpus-per-task: confined to its own GPU, a task may not reach the next one through NCCL.
##SBATCH --gpus-per-node=4

# Cores per task, by default often one, while the input pipeline needs several. For whole nodes, the two below.
##SBATCH --cpus-per-task=16
##SBATCH --exclusive
##SBATCH --mem=0

# Two minutes before the time is up, Slurm sends SIGTERM to every task. TrainingCheckpoint saves after the running step,
# and ends the workers with 75, so that the job restarts; without it they end unsaved. Allow for the longest step or
# validation, and the save. A job that is requeued or preempted gets SIGTERM, too, and has KillWait or GraceTime, as
# the site chose (scontrol show config, scontrol show partition).
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue

# An error that always kills a worker, such as too little memory, would restart the job endlessly. Preemptions and
# --time count, too.
MAX_RESTARTS=20

# What the site must load, such as: module load cuda; source ~/venv/bin/activate

export PYTHONUNBUFFERED=1
# A worker that makes no progress for so long is ended, and the job restarts. Set more if anything takes longer, such as
# reading the data before fit, one save, or one call of a tf.function.
export TFOPT_WATCH_PROGRESS_SECONDS=${TFOPT_WATCH_PROGRESS_SECONDS:-3600}
[ $# -gt 0 ] || set -- python train.py # what to run if sbatch gets no command

# What every task runs. srun returns the highest code of its tasks: 200 for an error in one of them, otherwise 128 + n
# for one that signal n killed, otherwise 75 (restart me) for those that lost a worker.
run_worker() {
    trap : TERM USR1 USR2 # meant for Python, but Slurm sends them to the shell too
    "$@"
    local code=$?
    case $code in 0 | 75 | 129 | 1[3-9]?) exit $code ;; esac
    echo "task $SLURM_PROCID on $SLURMD_NODENAME failed with exit code $code" >&2
    exit 200
}
export -f run_worker

# Survivors take up to 90 s to find out which worker was lost, and must not be killed before. Since Slurm 22.05, srun
# ignores SLURM_CPUS_PER_TASK.
srun --label --kill-on-bad-exit=0 --distribution=block ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    bash -c 'run_worker "$@"' run_worker "$@"
code=$?

case $code in 129 | 13[1-9] | 1[4-9]?) code=75 ;; esac # 130 is Ctrl-C
if [ $code -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -ge $MAX_RESTARTS ]; then
    echo "restarted $MAX_RESTARTS times; see above for what ended it" >&2
    code=1
fi
# With RequeueExit=75 in slurm.conf (scontrol show config), 75 restarts the job; otherwise enable this line:
# [ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
