"""The exit codes of tfopt's commands and workers."""

USAGE = 2
ENVIRONMENT = 3  # this machine cannot run it
RESTART = 75  # EX_TEMPFAIL of sysexits.h: a worker was lost, start all again
INTERRUPTED = 130
