#!/usr/bin/env python3
"""Kills ranks of a real run at random moments and wants the run that was never killed.

    tests/kills/kills.py --kills 50                 until that many kills, then the run's end
    tests/kills/kills.py --minutes 100              a soak: kills about every --mean seconds

A tiny student is distilled by `bifocal train` on two CPU ranks, once undisturbed. Then the same
command runs in another directory; one rank or all of them get SIGKILL at random moments, many while
a checkpoint is being written; and it is started again, until its end, and anew from the beginning.
Wanted each time: the launcher ends by itself and no rank is left; every step_N directory is whole;
the restart resumes from the newest checkpoint that was complete; every line of metrics.jsonl has
the undisturbed run's values to the last digit; and at the end each rank file of the last
checkpoint, weights and moments, has the undisturbed run's bytes.

The seed is printed; the same one draws the same kinds of kills and waits. Exit code 0: all held.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Path("data/register-machine")
VALUES = ("stage", "stage_step", "loss", "grad_norm", "rate", "kept_tokens", "kl", "ce",
          "layer_losses", "skipped_steps", "data")
OPEN_IN_SAVES = 4  # files that a rank has open in a save and not beside one, at most
END_WITHIN = 60.0  # seconds from a rank's death to the end of the job


def fail(text):
    print(f"[kills] FAILED: {text}", flush=True)
    sys.exit(1)


def steps_in(checkpoints):
    """Numbers of the directories that bear a checkpoint's final name."""
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in checkpoints.glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def require_whole(path):
    """A step_N directory is complete: its manifest's checksum, its files' sizes and hashes."""
    manifest = path / "manifest.json"
    if not manifest.exists():
        fail(f"{path} has no manifest")
    text = manifest.read_bytes()
    found = re.fullmatch(rb'(.*),\n "checksum": "([0-9a-f]{64})"\n}\n', text, re.S)
    if not found or hashlib.sha256(found[1] + b"\n}\n").hexdigest() != found[2].decode():
        fail(f"{manifest} does not match its checksum")
    for file in json.loads(text)["files"]:
        data = (path / file["name"]).read_bytes()
        if len(data) != file["bytes"] or hashlib.sha256(data).hexdigest() != file["sha256"]:
            fail(f"{path / file['name']} is not what the manifest says")


def file_hashes(path):
    manifest = json.loads((path / "manifest.json").read_text())
    return [file["sha256"] for file in manifest["files"]]


def curve_of(run):
    """Values of each step as JSON texts, so that every digit counts."""
    curve = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            step = json.loads(line)
        except ValueError:
            continue  # the line in which the run was killed
        if "event" not in step:
            curve[step["step"]] = json.dumps([step.get(value) for value in VALUES])
    return curve


class Job:
    """One `mpirun ... bifocal train` and its ranks."""

    newest = None

    def __init__(self, options, run, log):
        self.run = run
        self.log = log
        self.first_byte = log.stat().st_size if log.exists() else 0
        command = ["mpirun", "-n", str(options.ranks), "--bind-to", "none", "--oversubscribe",
                   str(options.bifocal), "train", *train_arguments(options, run)]
        environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_MCA_mpi_yield_when_idle="1",
                           OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        self.began = time.monotonic()
        self.wall = time.time()
        with open(log, "ab") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output,
                                            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        Job.newest = self

    def age(self):
        return time.monotonic() - self.began

    def is_saving(self):
        """Whether this job, not one before it, has left a directory that is not complete."""
        for path in (self.run / "checkpoints").glob("step_*.tmp"):
            try:
                if path.stat().st_ctime > self.wall:
                    return True
            except OSError:
                pass  # it has just been renamed
        return False

    def is_over(self):
        return self.process.poll() is not None

    def ranks(self):
        """Process numbers of the ranks, in order of their start."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            numbers = [int(number) for number in children.read_text().split()]
        except OSError:
            return []
        return [number for number in numbers if name_of(number) == "bifocal"]

    def stage(self):
        """Of the newest line of metrics; none before this job has written one."""
        metrics = self.run / "metrics.jsonl"
        if not metrics.exists() or metrics.stat().st_mtime < self.wall:
            return None
        found = re.findall(r'"stage":"(\w+)"', metrics.read_text()[-4000:])
        return found[-1] if found else None

    def output(self):
        with open(self.log, "rb") as file:
            file.seek(self.first_byte)
            return file.read().decode(errors="replace")

    def destroy(self):
        """Of a harness that ends early."""
        if not self.is_over():
            for number in [*self.ranks(), self.process.pid]:
                os.kill(number, signal.SIGKILL)

    def end(self):
        """Waits for the launcher and all ranks after a kill."""
        try:
            self.process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            fail(f"the job goes on {END_WITHIN:.0f} s after a rank's death: {self.log}")


def name_of(number):
    try:
        return Path(f"/proc/{number}/comm").read_text().strip()
    except OSError:
        return ""


def is_alive(number):
    try:
        state = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def train_arguments(options, run):
    return ["--config", "configs/tiny/bifocal.toml",
            "--run.directory", str(run),
            "--run.log_every", "1",
            "--data.train", f"{options.directory}/data",
            "--data.row_tokens", str(options.row_tokens),
            "--align.steps", str(options.steps // 3),
            "--distill.steps", str(options.steps - options.steps // 3),
            "--checkpoint.every", str(options.every),
            "--checkpoint.keep", "2"]


def make_data(options):
    problems = options.directory / "problems.jsonl"
    for command in (
            ["synth", "register-machine", "--count", "300", "--max-steps", "12", "--seed", "1",
             "--output", problems],
            ["tokenize", problems, "--tokenizer", MACHINE / "teacher/tokenizer.json",
             "--held-out", "0.05", "--output", options.directory / "data"]):
        subprocess.run([options.bifocal, *map(str, command)], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)


class Sample:
    """What a rank holds at a moment of its life."""

    def __init__(self, age, number, stage):
        self.age = age
        self.stage = stage
        status = Path(f"/proc/{number}/status").read_text()
        self.resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
        self.threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
        self.descriptors = len(os.listdir(f"/proc/{number}/fd"))


class Harness:
    def __init__(self, options):
        self.options = options
        self.random = random.Random(options.seed)
        self.run = options.directory / "run"
        self.log = options.directory / "run.log"
        self.samples = []  # lists of one rank's life
        self.kills = {"one rank": 0, "all ranks": 0}
        self.kills_in_saves = self.resumes = self.runs = self.steps = 0
        self.began = time.monotonic()

    def reference(self):
        """The undisturbed run: its curve and the hashes of its last checkpoint's files."""
        run = self.options.directory / "whole"
        job = Job(self.options, run, self.options.directory / "whole.log")
        while not (run / "metrics.jsonl").exists() and not job.is_over():
            time.sleep(0.05)
        started = job.age()
        if job.process.wait() != 0:
            fail(f"the undisturbed run ended with an error: {job.log}")
        self.seconds = job.age()
        self.curve = curve_of(run)
        self.hashes = file_hashes(run / "checkpoints" / f"step_{self.options.steps}")
        if len(self.curve) != self.options.steps:
            fail(f"the undisturbed run logged {len(self.curve)} of {self.options.steps} steps")
        print(f"[kills] undisturbed run: {self.options.steps} steps in {self.seconds:.1f} s",
              flush=True)
        if self.options.mean is None:  # a start and some checkpoints, however fast the machine
            step = (self.seconds - started) / self.options.steps
            self.options.mean = started + 5.0 * self.options.every * step

    def is_enough(self):
        if self.options.minutes:
            return time.monotonic() - self.began > 60.0 * self.options.minutes
        return sum(self.kills.values()) >= self.options.kills

    def draw_wait(self):
        if self.options.minutes:
            return 3.0 + self.random.expovariate(1.0 / (self.options.mean - 3.0))
        return self.random.uniform(0.0, self.options.mean)

    def sleep(self, job, seconds):
        """Until then or the job's end, taking samples."""
        until = time.monotonic() + seconds
        lives = {}
        while time.monotonic() < until and not job.is_over():
            time.sleep(max(0.0, min(2.0, until - time.monotonic())))
            for number in job.ranks() if self.options.minutes else []:
                try:
                    lives.setdefault(number, []).append(Sample(job.age(), number, job.stage()))
                except (OSError, TypeError):
                    pass  # it has just ended
        self.samples += lives.values()

    def wait_for_save(self, job):
        """Until a save is in progress; then some of the time that one takes."""
        until = time.monotonic() + self.options.mean
        while time.monotonic() < until and not job.is_over():
            if job.is_saving():
                time.sleep(self.random.uniform(0.0, 0.15))
                return
            time.sleep(0.001)

    def kill(self, job):
        """SIGKILL to one rank or to all, launcher included."""
        ranks = job.ranks()
        in_save = job.is_saving()
        kind = self.random.choice(list(self.kills))
        victims = [self.random.choice(ranks)] if kind == "one rank" and ranks else ranks
        if kind == "all ranks":
            victims = [*victims, job.process.pid]
        for number in victims:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not victims:  # before the ranks were there
            job.process.kill()
        job.end()
        until = time.monotonic() + END_WITHIN
        while any(is_alive(number) for number in ranks):
            if time.monotonic() > until:
                fail(f"a rank of a killed job lives on: {ranks}")
            time.sleep(0.02)
        self.kills[kind] += 1
        self.kills_in_saves += in_save
        return f"{kind}{' in a save' if in_save else ''}"

    def check(self):
        """What a kill has left; the newest complete step, 0 for none."""
        checkpoints = self.run / "checkpoints"
        steps = steps_in(checkpoints)
        for step in steps:
            require_whole(checkpoints / f"step_{step}")
        if (self.run / "metrics.jsonl").exists():
            for step, values in curve_of(self.run).items():
                if values != self.curve[step]:
                    fail(f"step {step} has {values}, the undisturbed run {self.curve[step]}")
        return steps[-1] if steps else 0

    def check_resume(self, job, newest):
        found = re.search(r"resumed from \S*step_(\d+) ", job.output())
        if found:
            self.resumes += 1
            if int(found[1]) != newest:
                fail(f"resumed from step {found[1]}, the newest complete one was {newest}")
        elif newest > 0 and re.search(r"^(align|distill) ", job.output(), re.M):
            fail(f"did not resume, though step {newest} was complete")

    def check_end(self):
        curve = curve_of(self.run)
        if curve != self.curve:
            fail(f"{len(curve)} of {len(self.curve)} steps are in metrics.jsonl at the end")
        last = self.run / "checkpoints" / f"step_{self.options.steps}"
        if file_hashes(last) != self.hashes:
            fail("the last checkpoint has other bytes than the undisturbed run's")
        self.runs += 1

    def play(self):
        """Runs, kills and restarts until it is enough and the last run has come to its end."""
        while not self.is_enough():
            shutil.rmtree(self.run, ignore_errors=True)
            newest = 0
            while True:
                job = Job(self.options, self.run, self.log)
                if self.is_enough():
                    job.process.wait()
                elif self.random.random() < self.options.in_saves:
                    self.sleep(job, self.draw_wait())
                    self.wait_for_save(job)
                else:
                    self.sleep(job, self.draw_wait())
                if job.is_over():
                    if job.process.returncode != 0:
                        fail(f"the run ended by itself with code {job.process.returncode}: "
                             f"{self.log}\n{job.output()[-2000:]}")
                    self.check()
                    self.check_resume(job, newest)
                    self.check_end()
                    self.steps += self.options.steps - newest
                    break
                age = job.age()
                kind = self.kill(job)
                before, newest = newest, self.check()
                self.check_resume(job, before)
                self.steps += newest - before
                if newest < before:
                    fail(f"step {before} was complete, now only {newest} is")
                print(f"[kills] {sum(self.kills.values())}: {kind} after {age:.1f} s; newest "
                      f"complete step {newest}", flush=True)

    def summary(self):
        minutes = (time.monotonic() - self.began) / 60.0
        print(f"[kills] seed {self.options.seed}: {sum(self.kills.values())} kills "
              f"({self.kills['one rank']} of one rank, {self.kills['all ranks']} of all, "
              f"{self.kills_in_saves} inside a save), {self.resumes} resumes, {self.runs} runs to "
              f"their end, {self.steps} steps kept, {minutes:.1f} minutes; every curve and every "
              "last checkpoint equals the undisturbed run's")
        self.report_growth()

    def report_growth(self):
        """Growth of each rank inside a stage, which begins by taking memory, as a rate."""
        growths = []
        for life, stage in itertools.product(self.samples, ("align", "distill")):
            same = [sample for sample in life if sample.stage == stage]
            later = [sample for sample in same if sample.age > same[0].age + 10.0]
            if len(later) < 2 or later[-1].age - later[0].age < 20.0:
                continue
            first, last = later[0], later[-1]
            growths.append((last.age - first.age, last.resident - first.resident,
                            last.descriptors - first.descriptors, last.threads - first.threads,
                            last.resident))
        if not growths:
            if self.options.minutes > 0.0:
                fail("no rank lived for half a minute in a stage: nothing is known of growth; raise --mean")
            return
        seconds = sum(growth[0] for growth in growths)
        rate = sum(growth[1] for growth in growths) / seconds * 3600.0 / 2**20
        longest = max(growths)
        print(f"[kills] {len(growths)} lives of ranks in a stage of at least 30 s, "
              f"{seconds / 60.0:.0f} minutes in all: resident memory {rate:+.1f} MiB an hour (at the end at most "
              f"{max(growth[4] for growth in growths) / 2**20:.0f} MiB); the longest, "
              f"{longest[0]:.0f} s: {longest[1] / 2**20:+.1f} MiB, {longest[2]:+d} descriptors, "
              f"{longest[3]:+d} threads")
        most = max(growth[2] for growth in growths)
        print(f"[kills] largest growth of open descriptors in a life: {most}")
        if most > OPEN_IN_SAVES:
            fail("ranks leave files open")
        # Resident memory is printed alone: lives this short are still warming up.
        if max(growth[3] for growth in growths) > 1:  # the writer's
            fail("ranks leave threads running")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bifocal", type=Path, default=ROOT / "build/cpu/bifocal")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/kills",
                        help="where everything is written, anew each time (runs/kills)")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=0.0,
                        help="soak for so long in place of --kills; memory and descriptors of the "
                             "ranks are recorded")
    parser.add_argument("--mean", type=float, default=None,
                        help="seconds between start and kill: at most (time for some saves), with "
                             "--minutes the mean (72)")
    parser.add_argument("--in-saves", type=float, default=0.5,
                        help="share of kills that wait for a save in progress (0.5)")
    parser.add_argument("--steps", type=int, default=None, help="of the run (90, or 600)")
    parser.add_argument("--every", type=int, default=None,
                        help="steps between checkpoints (5, or 20)")
    parser.add_argument("--row-tokens", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    soaks = options.minutes > 0.0
    options.mean = options.mean or (72.0 if soaks else None)
    options.steps = options.steps or (600 if soaks else 90)
    options.every = options.every or (20 if soaks else 5)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    options.bifocal = options.bifocal.resolve()
    options.directory = options.directory.resolve()
    print(f"[kills] seed {options.seed}", flush=True)
    shutil.rmtree(options.directory, ignore_errors=True)
    options.directory.mkdir(parents=True)
    make_data(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    harness = Harness(options)
    try:
        harness.reference()
        harness.play()
    finally:
        if Job.newest is not None:
            Job.newest.destroy()
    harness.summary()


if __name__ == "__main__":
    main()
