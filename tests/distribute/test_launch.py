"""The launcher, with scripts that do not load TensorFlow."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gone import gone

from tfopt.distribute.launch import gpu_variables, main
from tfopt.errors import ClusterError

ROOT = Path(__file__).parents[2]
DEADLINE = 60  # seconds; only keeps a failing test from hanging
SLEEP = "time.sleep(300)"
PREAMBLE = """
import json, os, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank = config["task"]["index"]
"""
HEAVY = ("tensorflow", "keras", "numpy", "psutil", "pynvml", "asyncio", "multiprocessing")
SHORT = """
import tfopt.distribute.local_workers as l
l._SURVIVOR_SECONDS, l._KILL_SECONDS, l._DRAIN_SECONDS, l._LEAVE_SECONDS = 2, 1, 0.5, 0.5
"""


class Launched:
    """A running launcher."""

    def __init__(self, folder, script, *options, arguments=(), **environment):
        (folder / "train.py").write_text(PREAMBLE + script)
        without = ("CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "TF_CONFIG")
        environ = {key: value for key, value in os.environ.items() if key not in without}
        code = f"{SHORT}import sys; from tfopt.distribute.launch import main; sys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *options, folder / "train.py", *arguments],
            env=environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def lines(self, count):
        """Its next lines on stdout, in rank order."""
        return sorted(self.process.stdout.readline().decode() for _ in range(count))

    def end(self):
        """Waits for its end and returns its exit code and remaining output."""
        try:
            out, err = self.process.communicate(timeout=DEADLINE)
        finally:
            self.process.kill()
        return self.process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


@pytest.fixture
def launch(tmp_path):
    return lambda script, *options, **more: Launched(tmp_path, script, *(options or ("-n", "2")), **more)


class TestWhatTheWorkersGet:
    def test_a_cluster_each(self, launch):
        code, out, err = launch("print(os.environ['TF_CONFIG'])", "-n", "3").end()
        assert (code, err) == (0, "")
        configs = [json.loads(line.partition("] ")[2]) for line in sorted(out.splitlines())]
        assert [line[:4] for line in sorted(out.splitlines())] == ["[0] ", "[1] ", "[2] "]
        assert [config["task"] for config in configs] == [{"type": "worker", "index": i} for i in range(3)]
        workers = configs[0]["cluster"]["worker"]
        assert all(config["cluster"]["worker"] == workers for config in configs)
        assert len(set(workers)) == 3
        assert all(worker.startswith("127.0.0.1:") for worker in workers)

    def test_ports_that_can_be_bound_as_tensorflow_does_and_that_nobody_else_is_given(self, launch):
        bind = """
import socket
host, port = config["cluster"]["worker"][rank].split(":")
with socket.socket() as other:
    try:
        other.bind((host, int(port)))
        print("given away")
    except OSError:
        print("held")
socket.create_server(("", int(port)), family=socket.AF_INET)
"""
        code, out, err = launch(bind).end()
        assert (code, sorted(out.splitlines())) == (0, ["[0] held", "[1] held"]), err

    def test_arguments_and_output_at_once(self, launch):
        script = f"print(sys.argv[1:], end='; '); print('unfinished'); {SLEEP}"
        run = launch(script, arguments=["--epochs", "3", "-n", "7"])
        assert run.lines(2) == [f"[{i}] ['--epochs', '3', '-n', '7']; unfinished\n" for i in range(2)]
        run.process.send_signal(signal.SIGINT)
        run.end()

    def test_a_module(self):
        command = [sys.executable, "-m", "tfopt.distribute.launch", "-n", "1", "-m", "json.tool", "--help"]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert output.stdout.startswith("[0] usage: python -m json.tool")

    def test_gpus_only_if_asked_for(self, launch):
        script = "print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('TFOPT_GPUS_ASSIGNED'))"
        assert sorted(launch(script).end()[1].splitlines()) == ["[0] None None", "[1] None None"]
        run = launch(script, "-n", "2", "--gpus-per-worker", "2", CUDA_VISIBLE_DEVICES="GPU-a,GPU-b,6,7,8")
        assert sorted(run.end()[1].splitlines()) == ["[0] GPU-a,GPU-b 1", "[1] 6,7 1"]

    def test_a_tf_config_of_the_environment_is_replaced_and_this_is_said(self, launch):
        code, out, err = launch("print(rank)", TF_CONFIG="{}").end()
        assert (code, sorted(out.splitlines())) == (0, ["[0] 0", "[1] 1"])
        assert "replacing TF_CONFIG of the environment" in err


class TestExitCode:
    def test_the_first_failure_ends_the_others(self, launch):
        code, _, err = launch(f"rank == 1 and sys.exit(7); {SLEEP}", "-n", "3").end()
        assert code == 7
        assert "[launch] worker 1 ended with exit code 7" in err
        assert "ending 2 more" in err

    def test_of_a_signal(self, launch):
        code, _, err = launch(f"rank == 1 and os.kill(os.getpid(), 9); {SLEEP}").end()
        assert code == 137
        assert "[launch] worker 1 was killed by SIGKILL" in err

    @pytest.mark.slow
    @pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
    def test_a_survivor_does_not_hide_the_one_it_lost(self, launch, end, code):
        assert launch(f"rank == 0 and sys.exit(75); time.sleep(0.5); {end}").end()[0] == code

    @pytest.mark.slow
    def test_survivors_alone(self, launch):
        assert launch("sys.exit(75)").end()[0] == 75
        assert launch(f"rank == 0 and sys.exit(75); {SLEEP}").end()[0] == 75

    def test_a_worker_that_ends_well_ends_no_other(self, launch):
        code, out, _ = launch("rank == 0 and sys.exit(0); time.sleep(1); print('done')").end()
        assert (code, out) == (0, "[1] done\n")

    @pytest.mark.slow
    def test_ended_workers_do_not_count_as_failed(self, launch):
        deaf = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); {SLEEP}"
        code, out, _ = launch(f"rank == 0 and (time.sleep(1), sys.exit(5))\n{deaf}").end()
        assert (code, out) == (5, "[1] deaf\n")

    def test_where_the_ends_of_children_are_ignored(self, tmp_path):
        (tmp_path / "train.py").write_text("raise SystemExit(7)")
        ignore = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
        code = f"{ignore}; from tfopt.distribute.launch import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "-n", "2", tmp_path / "train.py"]
        assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=DEADLINE).returncode == 7


class TestRestarts:
    @pytest.mark.parametrize(
        ("most", "last", "code", "starts"),
        [
            (5, "sys.exit(75)", 0, 3),
            (1, "sys.exit(75)", 75, 2),
            (5, "os.kill(os.getpid(), signal.SIGKILL)", 0, 3),
            (5, "sys.exit(1)", 1, 1),
            (5, "sys.exit(200)", 200, 1),
            (0, "sys.exit(75)", 75, 1),
        ],
    )
    def test_all_workers_start_again_where_that_may_help(self, launch, tmp_path, most, last, code, starts):
        started = tmp_path / "started"
        script = (
            f"if rank == 0:\n    with open({str(started)!r}, 'a') as file:\n        file.write('x')\n"
            f"    if os.path.getsize({str(started)!r}) < 3:\n        {last}\n"
        )
        ended, _, err = launch(script, "-n", "2", "--max-restarts", str(most)).end()
        assert (ended, len(started.read_text())) == (code, starts)
        said = [line for line in err.splitlines() if "restarting all workers" in line]
        assert said == [f"[launch] restarting all workers, {n} of at most {most}" for n in range(1, starts)]

    def test_not_after_a_signal_to_the_launcher(self, launch, tmp_path):
        run = launch(f"print('ready', flush=True); {SLEEP}", "-n", "2", "--max-restarts", "5")
        run.lines(2)
        run.process.send_signal(signal.SIGTERM)
        code, _, err = run.end()
        assert code == 143
        assert "restarting" not in err


class TestSignals:
    @pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
    def test_are_passed_on(self, launch, number, expected):
        run = launch(f"signal.signal({int(number)}, lambda *_: (print('heard'), sys.exit(0))); print('ready'); {SLEEP}")
        run.lines(2)
        run.process.send_signal(number)
        code, out, _ = run.end()
        assert sorted(out.splitlines()) == ["[0] heard", "[1] heard"]
        assert code == expected

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
    def test_for_the_user_end_nothing(self, launch, number):
        run = launch(f"signal.signal({int(number)}, lambda *_: print('heard')); print('ready'); time.sleep(1)")
        run.lines(2)
        run.process.send_signal(number)
        code, out, _ = run.end()
        assert (code, sorted(out.splitlines())) == (0, ["[0] heard", "[1] heard"])

    def test_by_which_the_workers_die(self, launch):
        run = launch(f"print('ready'); {SLEEP}")
        run.lines(2)
        run.process.terminate()
        assert run.end()[0] == 143

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_second_one_ends_workers_that_ignore_it(self, launch, number):
        run = launch(f"[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('ready'); {SLEEP}")
        run.lines(2)
        run.process.send_signal(number)
        time.sleep(0.3)
        assert run.process.poll() is None
        run.process.send_signal(number)
        assert run.end()[0] == 128 + number

    def test_a_killed_launcher_takes_its_workers_along(self, launch):
        run = launch(f"print(os.getpid()); {SLEEP}")
        pids = [int(line.partition("] ")[2]) for line in run.lines(2)]
        run.process.kill()
        run.end()
        assert all(gone(pid) for pid in pids)


class TestWhatWorkersLeave:
    CHILD = "child = subprocess.Popen(['sleep', '300'], start_new_session={}); print(child.pid);"

    @pytest.mark.slow
    @pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(1)", f"rank == 0 and sys.exit(1); {SLEEP}"])
    def test_in_their_group_is_ended(self, launch, end):
        run = launch(self.CHILD.format(False) + f"time.sleep(1); {end}")
        pids = [int(line.partition("] ")[2]) for line in run.lines(2)]
        run.end()
        assert all(gone(pid) for pid in pids)

    def test_outside_it_does_not_block_the_launcher(self, launch):
        code, out, _ = launch("print('unfinished', end='');" + self.CHILD.format(True)).end()
        assert code == 0
        for line in out.splitlines():
            os.kill(int(line.partition("unfinished")[2]), signal.SIGKILL)


class TestOutput:
    def test_streams_stay_apart_and_no_byte_is_lost(self, launch):
        script = "sys.stdout.buffer.write(b'\\xff\\x00\\n\\xfe'); sys.stderr.write('last words')"
        run = launch(script, "-n", "1")
        out, err = run.process.communicate(timeout=DEADLINE)
        assert out == b"[0] \xff\x00\n[0] \xfe\n"
        assert err == b"[0] last words\n"

    def test_much_of_it(self, launch):
        _, out, _ = launch("[print(i, 'x' * 1000) for i in range(3000)]").end()
        for rank in range(2):
            mine = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
            assert [line.split()[1] for line in mine] == [str(i) for i in range(3000)]

    def test_a_closed_output_does_not_end_the_training(self, launch, tmp_path):
        run = launch(
            f"print('ready'); time.sleep(1); print('x' * 100_000); open({str(tmp_path / 'saved')!r}, 'a').close()"
        )
        run.process.stdout.close()
        assert run.process.wait(DEADLINE) == 0
        assert "can no longer be written (Broken pipe)" in run.process.stderr.read().decode()
        run.process.stderr.close()
        assert (tmp_path / "saved").exists()


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["-n", "0", "train.py"], "Received: argument -n: '0', which is not a whole number of 1 or more."),
            (["-n", "2", "--max-restarts", "-1", "train.py"], "'-1', which is not a whole number of 0 or more"),
            (["-n", "2", "nowhere.py"], "'nowhere.py', and there is no such file"),
            (["-n", "2"], "Received: nothing for SCRIPT. What"),
            ([], "Received: nothing for -n, SCRIPT. What"),
            (["-n", "2", "--restarts", "3", "train.py"], "Received: unrecognized arguments: --restarts. What"),
        ],
    )
    def test_wrong(self, arguments, said, capsys):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        text = capsys.readouterr().err
        assert said in text
        assert "Expected" in text
        assert "What to do" in text

    def test_help_tells_what_each_exit_code_means(self, capsys):
        with pytest.raises(SystemExit) as end:
            main(["--help"])
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert "So a scheduler should restart the job after 75, 137 and 143." in text
        assert all(f"\n  {code} " in text for code in ("0", "2", "3", "75", "130", "128 + n", "others"))

    def test_too_few_gpus(self, launch):
        code, out, err = launch(
            "print('started')", "-n", "2", "--gpus-per-worker", "2", CUDA_VISIBLE_DEVICES="0,1,2"
        ).end()
        assert (code, out) == (3, "")
        assert "Expected 4 GPUs for 2 workers of 2 each. Found 3 in CUDA_VISIBLE_DEVICES. What to do:" in err


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "-1,0,1", ",0,1", "0,,1", "0,-1,1"])
def test_gpus_hidden_from_cuda_are_not_assigned(value):
    with pytest.raises(ClusterError, match=r"Found [01] in CUDA_VISIBLE_DEVICES"):
        gpu_variables(2, 1, {"CUDA_VISIBLE_DEVICES": value})


def test_nothing_heavy_is_loaded():
    modules = "tfopt.distribute.launch, tfopt.distribute.watchdog.process, tfopt.distribute.watchdog.watch"
    code = f"import {modules}, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout == "[]\n"
