"""Forks the commands of a test, `serve` and scripts, from one process that has TensorFlow imported: they start at once.

Reads lines of JSON, `[output file, [arguments], script or null]`; answers each with the process's number.
"""

import json
import os
import runpy
import signal
import sys
import time
import traceback

import tensorflow  # noqa: F401  imported before forking, not used before it

from tfopt.pipelines import serve


def _run(output, arguments, script):
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        if script is None:
            return serve.main(arguments)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        return 0
    except SystemExit as ended:
        return ended.code
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()


def _ended(number):
    limit = time.monotonic() + 60
    while not (ended := os.waitpid(number, os.WNOHANG))[0]:
        if time.monotonic() > limit:
            os.kill(number, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def main():
    """Forks until its input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            answer = _ended(asked["wait"])
        else:
            answer = os.fork()
            if answer == 0:
                os.environ.update(asked["environ"])
                os._exit(_run(asked["output"], asked["arguments"], asked["script"]))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
