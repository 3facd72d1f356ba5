"""Ranks that die, stop, fail or hang: every process of the job must end, and rank 0 must say why.

Trains the tiny model under mpirun. A launcher that ends a job when one rank dies would hide what
the ranks do by themselves: --enable-recovery makes mpirun leave them alone.
"""

import errno
import fcntl
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ["BIFOCAL_BINARY"]
MPIEXEC = os.environ["BIFOCAL_MPIEXEC"]
MACHINE = ROOT / "data/register-machine"
HEARTBEAT = 4  # seconds, where nothing else is said
RECOVERY = ["--enable-recovery"]
# Runs the program as a child, so that its exit status can be kept, and keeps the output of each rank.
WRAPPER = """#!/bin/bash
rank=$OMPI_COMM_WORLD_RANK
cd {directory}
out=out.$rank
before_$rank 2>/dev/null
bash -c 'name=pid.$OMPI_COMM_WORLD_RANK; echo $$ >new.$name; mv new.$name $name; cd "$PLACE"; exec "$@"' - "$@" >$out 2>err.$rank
echo $? >new.$rank
mv new.$rank status.$rank
"""


def state_of(pid):
    """The letter of the process's state, None where there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return None
        raise


def runs(pid):
    return state_of(pid) not in (None, "Z", "X")


def wait_until(condition, limit, what):
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit} s")
        time.sleep(0.05)


class Job:
    """bifocal train on some ranks. setup: shell commands by rank, run before the program."""

    def __init__(self, data, ranks, setup=None, launcher=RECOVERY, options=None):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.ranks = ranks
        functions = "".join(
            f"before_{rank}() {{ {(setup or {}).get(rank, ':')}; }}\n" for rank in range(ranks)
        )
        head, _, tail = WRAPPER.format(directory=self.directory).partition("\n")
        wrapper = self.directory / "rank.sh"
        wrapper.write_text(f"{head}\nexport PLACE={ROOT}\n{functions}{tail}")
        wrapper.chmod(0o755)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        self.begin = time.monotonic()
        self.log = open(self.directory / "mpirun.log", "w")
        settings = {
            "config": ROOT / "configs/tiny/bifocal.toml",
            "data.train": data,
            "run.directory": self.directory / "run",
            "run.heartbeat_seconds": HEARTBEAT,
            "data.row_tokens": 128,
            "data.rows_per_step": ranks,
            "student.budget": 48,
            "align.steps": 3,
            "distill.steps": 1000000,
            "checkpoint.stage_ends": "false",
        } | (options or {})
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        self.process = subprocess.Popen(
            [MPIEXEC, "-n", str(ranks), "--oversubscribe", *launcher, wrapper, BINARY, "train"]
            + words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def text(self, name):
        path = self.directory / name
        return path.read_text(errors="replace") if path.exists() else ""

    def pid(self, rank):
        return int(self.text(f"pid.{rank}"))

    def send(self, rank, number):
        os.kill(self.pid(rank), number)

    def wait_for_step(self, step):
        def reached():
            self.require_running()
            return self.text("run/metrics.jsonl").count('"loss"') >= step

        wait_until(reached, 60, f"step {step}")
        time.sleep(1.0)  # beats tell where a rank stands twice a second

    def require_running(self):
        if self.process.poll() is not None:
            raise AssertionError("the job ended early:\n" + self.all_text())

    def wait_for_end(self, ranks, limit):
        """The exit statuses of these ranks."""
        wait_until(
            lambda: all((self.directory / f"status.{rank}").exists() for rank in ranks),
            limit,
            f"end of ranks {list(ranks)}\n{self.all_text()}",
        )
        return [int(self.text(f"status.{rank}")) for rank in ranks]

    def all_text(self):
        names = ["mpirun.log"] + [f"{kind}.{r}" for r in range(self.ranks) for kind in ("out", "err")]
        return "\n".join(f"--- {name}\n{self.text(name)[-2000:]}" for name in names)

    def end(self):
        for rank in range(self.ranks):
            if self.text(f"pid.{rank}") and runs(self.pid(rank)):
                self.send(rank, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory)


class Faults(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.files)
        problems = cls.files / "problems.jsonl"
        cls.data = cls.files / "data"
        tokenizer = MACHINE / "teacher/tokenizer.json"
        for command in (
            ["synth", "register-machine", "--count", "60", "--seed", "1", "--output", problems],
            ["tokenize", problems, "--tokenizer", tokenizer, "--output", cls.data],
        ):
            subprocess.run([BINARY, *command], check=True, stdout=subprocess.DEVNULL)

    def start(self, *arguments, **options):
        job = Job(self.data, *arguments, **options)
        self.addCleanup(job.end)
        return job

    def check_block(self, job, file, rank, what, why, place=r"step \d+ of (align|distill)"):
        """The last lines of the file: rank, host, step and phase, and why."""
        text = job.text(file)
        block = text[text.rfind("bifocal: rank") :]
        expected = (
            rf"\Abifocal: rank {rank} of {job.ranks} {what}, and the job ends\n"
            rf"  host:  {re.escape(socket.gethostname())} \(process {job.pid(rank)}\)\n"
            rf"  place: {place}.*\n"
            rf"  why:   {why}"
        )
        self.assertRegex(block, expected, job.all_text())

    def check_all_ended(self, job, ranks, limit):
        statuses = job.wait_for_end(ranks, limit)
        self.assertNotIn(0, statuses, job.all_text())
        for rank in ranks:
            self.assertFalse(runs(job.pid(rank)), f"rank {rank} is left\n{job.all_text()}")
        return statuses


class RankFaults(Faults):
    def test_killed(self):
        job = self.start(3)
        job.wait_for_step(4)
        job.send(1, signal.SIGKILL)
        self.assertEqual(self.check_all_ended(job, range(3), 5), [1, 128 + signal.SIGKILL, 1])
        self.check_block(job, "err.0", 1, "is gone", "its connection closed without a word")

    def test_rank_0_killed(self):
        job = self.start(3)
        job.wait_for_step(4)
        job.send(0, signal.SIGKILL)
        self.check_all_ended(job, range(3), 5)
        for file in ("err.1", "err.2"):
            self.check_block(job, file, 0, "is gone", "its connection closed without a word")

    def test_killed_under_a_launcher_that_ends_the_job(self):
        job = self.start(2, launcher=[])
        job.wait_for_step(4)
        job.send(1, signal.SIGKILL)
        self.assertNotEqual(job.process.wait(timeout=20), 0)
        self.check_block(job, "err.0", 1, "is gone", "its connection closed without a word")
        wait_until(lambda: not any(runs(job.pid(rank)) for rank in (0, 1)), 5, "end of the ranks")

    def test_stopped_and_woken_too_late(self):
        job = self.start(3)
        job.wait_for_step(4)
        job.send(1, signal.SIGSTOP)
        self.check_all_ended(job, (0, 2), 2 * HEARTBEAT + 5)
        self.check_block(job, "err.0", 1, "does not answer", r"nothing .*: it is stopped \(SIGSTOP")
        self.assertEqual(state_of(job.pid(1)), "T")
        job.send(1, signal.SIGCONT)
        self.check_all_ended(job, (1,), 5)

    def test_rank_0_stopped(self):
        job = self.start(2)
        job.wait_for_step(4)
        job.send(0, signal.SIGSTOP)
        self.check_all_ended(job, (1,), 2 * HEARTBEAT + 5)
        self.check_block(job, "err.1", 0, "does not answer", r"nothing .*: it is stopped \(SIGSTOP")
        job.send(0, signal.SIGCONT)
        self.check_all_ended(job, (0,), 5)

    def test_all_stopped_for_a_while_go_on(self):
        """Ctrl-Z of the whole job, and a break that is longer than the limit."""
        job = self.start(2)
        job.wait_for_step(4)
        for rank in (0, 1):
            job.send(rank, signal.SIGSTOP)
        time.sleep(HEARTBEAT + 2)
        for rank in (1, 0):
            job.send(rank, signal.SIGCONT)
        step = job.text("run/metrics.jsonl").count('"loss"')
        job.wait_for_step(step + 10)
        job.send(1, signal.SIGTERM)
        job.wait_for_end((0, 1), 20)
        self.assertIn("SIGTERM", job.text("out.0"))
        self.assertEqual(job.text("status.0").strip(), "75")

    def test_throwing(self):
        """A host that lacks a file system: a relative path leads nowhere on one rank."""
        job = self.start(2, setup={1: "PLACE=/"})
        self.check_all_ended(job, (0, 1), 30)
        text = "data/register-machine/teacher"
        self.check_block(job, "err.0", 1, "has failed", rf".*{text}", place="starting")
        self.assertRegex(job.text("err.1"), rf"bifocal: error on rank 1 of 2 .*{text}")

    def test_an_error_of_all_is_told_once(self):
        job = self.start(2, options={"teacher.path": "nowhere"})
        self.check_all_ended(job, (0, 1), 30)
        self.assertRegex(job.text("err.0"), r"\Abifocal: error on rank 0 of 2 \(host .*nowhere")
        self.assertEqual(job.text("err.1"), "")

    @unittest.skipIf(os.environ.get("BIFOCAL_SANITIZE"), "sanitizers map terabytes")
    def test_out_of_memory(self):
        """The second stage needs more than one rank is allowed."""
        job = self.start(2, options={"align.steps": 20})
        job.wait_for_step(2)
        status = pathlib.Path(f"/proc/{job.pid(1)}/status").read_text()
        size = int(re.search(r"VmSize:\s+(\d+) kB", status).group(1)) * 1024
        resource.prlimit(job.pid(1), resource.RLIMIT_AS, (size, size))
        self.check_all_ended(job, (0, 1), 60)
        self.check_block(job, "err.0", 1, "has failed", r"\[memory\] out of memory")

    def test_a_hang_with_live_heartbeats(self):
        """Rank 0 writes to a terminal that nobody reads (Ctrl-S), and so does what waits for it."""
        job_pipe = "mkfifo out.fifo; out=out.fifo"
        job = self.start(2, setup={0: job_pipe}, options={"run.progress_seconds": 4})
        fifo = job.directory / "out.fifo"
        wait_until(fifo.exists, 30, "the pipe")
        with open(fifo, "rb", buffering=0) as reader:
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
            self.check_all_ended(job, (0, 1), 60)
        self.check_block(job, "err.0", 0, "stands still", r"no progress for .*\n +rank 0: step")
        self.assertIn(", log", job.text("err.0"))


class DefaultLimits(Faults):
    def test_a_stopped_rank_ends_all_within_a_minute(self):
        job = self.start(3, options={"run.heartbeat_seconds": 50})
        job.wait_for_step(4)
        begin = time.monotonic()
        job.send(2, signal.SIGSTOP)
        self.check_all_ended(job, (0, 1), 60)
        self.assertGreater(time.monotonic() - begin, 45)
        self.check_block(job, "err.0", 2, "does not answer", "nothing was heard of it for 50 s")


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
