"""A run's event files, read by TensorBoard's own package."""

import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

import support

BINARY = os.environ.get("BIFOCAL_EVENT_WRITER", "")


@unittest.skipUnless(support.has("tensorboard"), "needs tensorboard")
@unittest.skipUnless(BINARY, "BIFOCAL_EVENT_WRITER names no program")
class EventFiles(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)

    def write(self, *steps):
        subprocess.run([BINARY, self.path, *map(str, steps)], check=True)

    def read(self):
        from tensorboard.backend.event_processing import event_accumulator

        events = event_accumulator.EventAccumulator(str(self.path))
        events.Reload()
        return events

    def test_scalars_come_back(self):
        self.write(1, 300)
        events = self.read()
        self.assertEqual(sorted(events.Tags()["scalars"]), ["loss", "rate/all"])
        loss = events.Scalars("loss")
        self.assertEqual([event.step for event in loss], list(range(1, 301)))
        for event in loss:
            self.assertEqual(event.value, struct.unpack("f", struct.pack("f", 1.0 / event.step))[0])

    def test_a_resumed_run_replaces_the_steps_it_repeats(self):
        self.write(1, 10)
        self.write(6, 8)
        steps = [event.step for event in self.read().Scalars("loss")]
        self.assertEqual(steps, [1, 2, 3, 4, 5, 6, 7, 8])


if __name__ == "__main__":
    unittest.main()
