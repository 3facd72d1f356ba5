"""Settings of the whole session, and the tiny students that most tests read."""

import os

# Before transformers is imported: nothing is fetched, and code of exports goes to a folder of this session.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile  # noqa: E402

os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="bifocal_interop_modules_")

import shutil  # noqa: E402

import pytest  # noqa: E402
import support  # noqa: E402


def pytest_report_header():
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}, {support.BUILD}"


def pytest_unconfigure():
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def students(tmp_path_factory):
    """Random students as exports: BASE-tied-MIXERS and BASE-untied-MIXERS."""
    folder = tmp_path_factory.mktemp("students")
    support.run(support.BUILD / "tests/interop_models", "students", folder)
    return folder
