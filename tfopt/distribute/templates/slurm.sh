#!/bin/bash
# A training on several nodes under Slurm, started again when a worker is lost:
#
#     sbatch slurm.sh python train.py --epochs 90
#
# Not with --export=NONE: srun would hand nothing on, run_worker neither.
# The script calls tfopt.distribute.strategy(), and begins with the last checkpoint where there is one: in a folder that
# all nodes share. Lines that begin with ##SBATCH are switched off; take one # away to switch one on.

#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
##SBATCH --partition=gpu
##SBATCH --account=project

# One task is one worker. One a node takes all GPUs that the job has there; with --ntasks-per-node=4 four divide them.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

# GPUs of each node. Not --gpus-per-task: where a task is confined to its own, NCCL may not reach the one next to it.
##SBATCH --gpus-per-node=4

# Cores of each task, of which the input pipeline needs several: Slurm may give one. For whole nodes the two below.
##SBATCH --cpus-per-task=16
##SBATCH --exclusive
##SBATCH --mem=0

# Two minutes before the time is over Slurm sends SIGTERM to every task. Without a handler it ends the worker, and the
# job goes on in its next run from the last checkpoint; a handler can save one first.
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue

MOST_RESTARTS=20 # an error that kills a worker each time, as too little memory, would come back for ever

# What a site must load, as: module load cuda; source ~/venv/bin/activate

export PYTHONUNBUFFERED=1
[ $# -gt 0 ] || set -- python train.py # the training, where sbatch is given none

# What every task runs. srun returns the highest code of its tasks: 200 for an error in one of them, else 128 + n for
# one that signal n has killed, else 75 (restart me) for those that have lost a worker.
run_worker() {
    trap : TERM USR1 USR2 # for Python, to which Slurm sends them as well
    "$@"
    local code=$?
    case $code in 0 | 75 | 129 | 1[3-9]?) exit $code ;; esac
    echo "task $SLURM_PROCID on $SLURMD_NODENAME failed with exit code $code" >&2
    exit 200
}
export -f run_worker

# Survivors take up to 90 s to find out who was lost: they are not to be killed before. srun reads SLURM_CPUS_PER_TASK
# no more since Slurm 22.05.
srun --label --kill-on-bad-exit=0 --distribution=block ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    bash -c 'run_worker "$@"' run_worker "$@"
code=$?

case $code in 129 | 13[1-9] | 1[4-9]?) code=75 ;; esac # 130 is Ctrl-C
if [ $code -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -ge $MOST_RESTARTS ]; then
    echo "ended and started again $MOST_RESTARTS times; see above for what ended it" >&2
    code=1
fi
# 75 starts the job again where slurm.conf has RequeueExit=75 (scontrol show config); elsewhere switch this on:
# [ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
