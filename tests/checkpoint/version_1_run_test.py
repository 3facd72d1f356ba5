"""The kept checkpoint of a training run on two ranks, of format version 1: today's program goes on from it, on one
rank and on three, as the program that wrote it did. How it was made: make_version_1_run.sh beside this file."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

KEPT = pathlib.Path(__file__).resolve().parent / "version_1_run"
STEP = 4  # of the checkpoint
STEPS = 8  # of the whole run

# Sums of float32 in another order: by ranks, and by the processor's width. 6e-8 was seen on three ranks.
LOSS_TOLERANCE = 1e-5


def losses(directory):
    """Loss by step, of the steps that metrics.jsonl tells of."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "event" not in record}


class Version1Run(unittest.TestCase):
    def resume(self, ranks):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder) / "kept"
            shutil.copytree(KEPT, folder)
            (folder / "run/metrics.jsonl").unlink()
            environment = dict(
                os.environ,
                OMP_NUM_THREADS="1",
                OMPI_ALLOW_RUN_AS_ROOT="1",
                OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                OMPI_MCA_rmaps_base_oversubscribe="1",
            )
            launch = [os.environ["BIFOCAL_MPIEXEC"], "-n", str(ranks), os.environ["BIFOCAL_BINARY"]]
            done = subprocess.run(
                [*launch, "train", "--config", "run/config.toml"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(f"resumed from run/checkpoints/step_{STEP} (step {STEP})", done.stdout)
            return losses(folder / "run")

    def test_training_goes_on(self):
        kept = losses(KEPT / "run")
        self.assertEqual(set(kept), set(range(1, STEPS + 1)))
        for ranks in (1, 3):
            resumed = self.resume(ranks)
            self.assertEqual(set(resumed), set(range(STEP + 1, STEPS + 1)))
            for step, loss in resumed.items():
                self.assertTrue(math.isfinite(loss))
                self.assertAlmostEqual(loss / kept[step], 1.0, delta=LOSS_TOLERANCE, msg=f"{ranks} ranks, step {step}")


if __name__ == "__main__":
    unittest.main()
