"""Base models: transformers and our program read the same directory and compute the same; so do their exports."""

import json
import os
import pathlib

import pytest
import torch
from support import (
    GOLDEN,
    SOURCE,
    assert_close,
    assert_same_answer,
    export,
    generate,
    load,
    logits_of,
    our_answers,
    our_logits,
    random_ids,
)

TEACHERS = ("qwen3-tiny", "qwen3-tiny-untied", "qwen2-tiny", "llama-tiny", "llama3-rope-tiny")


def ids_for(model, count, seed):
    return random_ids(count, seed, model.config.vocab_size)


@pytest.mark.parametrize("name", TEACHERS)
def test_teachers_agree(tmp_path, name):
    model = load(GOLDEN / name)
    ids = ids_for(model, 150, 1)
    assert_close(logits_of(model, ids), our_logits(GOLDEN / name, {"a": ids}, tmp_path)["a"])
    prompt = ids[:20]
    (ours,) = our_answers(GOLDEN / name, [prompt], 200, tmp_path)
    # Both stop at an end token of the model's own.
    answer = generate(model, torch.tensor([prompt]), min_new_tokens=0)[0].tolist()
    assert_same_answer(model, prompt, answer, ours)


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("preset", ["keep", "bifocal", "swa_sink_tokens"])
def test_exports_of_the_program_agree(tmp_path, name, preset):
    """`bifocal export` of an untrained student, and of the teacher itself, which needs no code of ours."""
    budget = {"bifocal": 80, "swa_sink_tokens": 16}.get(preset, 576)
    directory = export(tmp_path / "export", "--teacher.path", GOLDEN / name, "--student.preset", preset,
                       "--student.budget", budget, "--dtype", "float32")  # fmt: skip
    model = load(directory)
    assert model.config.model_type == ("bifocal" if preset != "keep" else load(GOLDEN / name).config.model_type)
    assert (directory / "modeling_bifocal.py").exists() == (preset != "keep")
    ids = ids_for(model, 150, 2)
    got = logits_of(model, ids)
    assert_close(got, our_logits(directory, {"a": ids}, tmp_path)["a"])
    if preset == "keep":
        assert torch.equal(got, logits_of(load(GOLDEN / name), ids))


@pytest.mark.skipif("BIFOCAL_SMOLLM2" not in os.environ, reason="BIFOCAL_SMOLLM2 names no directory")
def test_smollm2_agrees(tmp_path):
    """A real model of 134.5 million parameters: every token of a text gets the same distribution."""
    from transformers import AutoTokenizer

    directory = pathlib.Path(os.environ["BIFOCAL_SMOLLM2"])
    text = (SOURCE / "README.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(directory)(text)["input_ids"][:300]
    ours = our_logits(directory, {"a": ids}, tmp_path)["a"]
    model = load(directory)
    theirs = logits_of(model, ids)
    # Thirty layers in another order of sums: 3.3e-6 of the largest logit was seen.
    assert_close(theirs, ours, 2e-5)
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    print(json.dumps({"tokens": len(ids), "largest difference": (theirs - ours).abs().max().item(),
                      "largest KL": (log_p.exp() * (log_p - log_q)).sum(-1).max().item()}))  # fmt: skip
    (answer,) = our_answers(directory, [ids[:40]], 20, tmp_path)
    theirs = generate(model, torch.tensor([ids[:40]]), new_tokens=20, min_new_tokens=0)[0].tolist()
    assert_same_answer(model, ids[:40], theirs, answer)
