"""kernel_trace.py on a trace whose answer is known."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).parents[1] / "cuda" / "kernel_trace.py"
MS = 1_000_000


def step(begin):
    """100 ms: 150 kernels of 0.5 ms with 0.1 ms between them, then NCCL of 4 ms, half
    of it under another kernel, and AdamW at the end."""
    rows = []
    for i in range(150):
        at = begin + i * 6 * MS // 10
        rows.append((at, at + MS // 2, 7, "product"))
    rows.append((begin + 90 * MS, begin + 94 * MS, 9, "ncclDevKernel_ReduceScatter"))
    rows.append((begin + 92 * MS, begin + 95 * MS, 7, "attention"))
    rows.append((begin + 95 * MS, begin + 100 * MS, 7, "adamw_kernel"))
    return rows


class KernelTrace(unittest.TestCase):
    def run_script(self, rows, *options):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "trace.1"
            path.write_text("".join(f"{b} {e} {s} {n}\n" for b, e, s, n in rows))
            return subprocess.run(
                [sys.executable, str(SCRIPT), str(path), *options],
                capture_output=True,
                text=True,
            )

    def test_gaps_and_hidden_collectives(self):
        rows = [row for i in range(4) for row in step(i * 100 * MS)]
        done = self.run_script(reversed(rows))  # records arrive in any order
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 steps of 100.0 ms", done.stdout)
        self.assertIn("nothing ran      15.00 % of a step", done.stdout)
        self.assertIn("4.0 ms, 50.0 % under other kernels", done.stdout)
        self.assertIn("no other kernel  17.00 % of a step", done.stdout)
        self.assertRegex(done.stdout, r"75\.00 ms +150 x +product")

    def test_too_few_steps_are_an_error(self):
        done = self.run_script(step(0))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("at least three steps", done.stderr)

    def test_a_whole_file_is_one_step(self):
        done = self.run_script(step(0), "--whole")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1 steps of 100.0 ms", done.stdout)
        self.assertRegex(done.stdout, r"75\.00 ms +150 x +product")


if __name__ == "__main__":
    unittest.main()
