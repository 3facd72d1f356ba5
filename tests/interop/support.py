"""What the tests of this folder share: where things lie, our programs, and models of both sides."""

import json
import os
import pathlib
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BIFOCAL_BUILD", SOURCE / "build/cpu")).resolve()
GOLDEN = SOURCE / "tests/golden/hf"
MACHINE = SOURCE / "data/register-machine"

# Both sides compute in float32, in another order: the worst seen over all students is 1.4e-6 of the largest logit.
LOGIT_TOLERANCE = 5e-6


def run(*command):
    """Runs a program; its output, or an AssertionError with what it said."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=SOURCE, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def bifocal(*arguments):
    return run(BUILD / "bifocal", *arguments)


def export(output, *arguments):
    bifocal("export", "--output", output, *arguments)
    return output


def our_logits(directory, documents, folder):
    """Logits of our forward pass, by document. documents: lists of ids by name."""
    from safetensors.torch import load_file

    (folder / "documents.json").write_text(json.dumps(documents))
    run(BUILD / "tests/interop_models", "logits", directory, folder / "documents.json", folder / "logits")
    return load_file(folder / "logits/model.safetensors")


def our_answers(directory, prompts, new_tokens, folder):
    """Greedy answers of `bifocal generate`."""
    lines = [json.dumps({"id": str(i), "prompt_ids": ids}) for i, ids in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    bifocal("generate", "--model", directory, "--input", folder / "prompts.jsonl", "--output",
            folder / "answers.jsonl", "--max-new-tokens", new_tokens)  # fmt: skip
    return [json.loads(line)["answer_ids"] for line in (folder / "answers.jsonl").read_text().splitlines()]


def load(directory, **options):
    import torch
    from transformers import AutoModelForCausalLM

    options.setdefault("dtype", torch.float32)
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **options).eval()


def code_of(model):
    """The module that transformers loaded from the export."""
    return sys.modules[type(model).__module__]


def random_ids(count, seed, vocabulary=53):
    import torch

    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model, ids, **options):
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids]), **options).logits[0]


def assert_close(got, wanted, tolerance=LOGIT_TOLERANCE):
    """The largest difference, as a share of the largest wanted value."""
    assert got.shape == wanted.shape
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= tolerance, f"differs by {error:.3g} of the largest value, more than {tolerance:.3g}"


def assert_same_answer(model, prompt, got, wanted):
    """Greedy answers are the same ids. Where two logits lie within rounding of each other either may win, and what
    follows differs: only such a tie excuses a difference."""
    if got == wanted:
        return
    at = next((i for i, (left, right) in enumerate(zip(got, wanted)) if left != right), None)
    assert at is not None, f"{len(got)} tokens came, {len(wanted)} were wanted, and the shorter begins the longer"
    logits = logits_of(model, prompt + wanted[:at])[-1]
    gap = (logits[got[at]] - logits[wanted[at]]).abs() / logits.abs().max()
    assert gap <= 2 * LOGIT_TOLERANCE, f"token {at} is {got[at]}, wanted {wanted[at]}: their logits are {gap:.3g} apart"


def padded(prompts, pad=0):
    """ids and attention_mask [B, T], padded on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def generate(model, ids, mask=None, new_tokens=200, **options):
    """What transformers answers, greedily and past end tokens unless told otherwise, [B, new tokens]."""
    import torch

    options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": new_tokens, **options}
    mask = torch.ones_like(ids) if mask is None else mask
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **options)
    return answer[:, ids.shape[1] :]
