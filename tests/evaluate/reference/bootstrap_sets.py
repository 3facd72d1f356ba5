"""Writes bootstrap_sets.json: two synthetic sets of graded answers, 120 problems of 16 samples of
which 96 have long answers, and numpy's paired bootstrap over problems.

    python3 bootstrap_sets.py        # numpy; a few seconds

Per problem and set: `tokens` of the 16 answers and `correct` as a text of 0 and 1. Expected, for
all problems and for the long ones: each set's rate, the difference of the second from the first,
and for each of the three the standard deviation of the resampled means and the 2.5 and 97.5
percentiles over a million resamples (so that the error of the expectation is a seventh of that of
20,000 resamples).
"""
import json
import pathlib

import numpy as np

PROBLEMS = 120
LONG = 96
SAMPLES = 16
LONG_TOKENS = 4000
RESAMPLES = 1_000_000
BLOCK = 20_000


def make_sets(draw):
    problems = []
    for number in range(PROBLEMS):
        is_long = number < LONG
        typical = draw.uniform(5000, 14000) if is_long else draw.uniform(600, 3000)
        easy = draw.beta(0.25, 3.0) if is_long else draw.beta(2.0, 1.4)
        sets = []
        for factor in (0.6, 1.0) if is_long else (1.02, 1.0):
            tokens = np.maximum(1, draw.lognormal(np.log(typical), 0.12, SAMPLES)).astype(int)
            correct = draw.random(SAMPLES) < min(1.0, easy * factor)
            sets.append(
                {
                    "tokens": tokens.tolist(),
                    "correct": "".join("1" if right else "0" for right in correct),
                }
            )
        problems.append({"id": f"p{number}", "sets": sets})
    return problems


def rate(entry):
    return entry["correct"].count("1") / SAMPLES


def bootstrap(rates, draw):
    count = rates.shape[1]
    means = np.empty((3, RESAMPLES))
    for begin in range(0, RESAMPLES, BLOCK):
        chosen = draw.integers(0, count, (BLOCK, count))
        means[0, begin : begin + BLOCK] = rates[0][chosen].mean(axis=1)
        means[1, begin : begin + BLOCK] = rates[1][chosen].mean(axis=1)
    means[2] = means[1] - means[0]
    values = [rates[0].mean(), rates[1].mean(), rates[1].mean() - rates[0].mean()]
    return [
        {
            "value": float(value),
            "deviation": float(row.std()),
            "low": float(np.percentile(row, 2.5)),
            "high": float(np.percentile(row, 97.5)),
        }
        for value, row in zip(values, means)
    ]


def main():
    draw = np.random.default_rng(20260101)
    problems = make_sets(draw)
    rates = np.array([[rate(p["sets"][s]) for p in problems] for s in range(2)])
    typical = np.array([np.median(p["sets"][0]["tokens"] + p["sets"][1]["tokens"]) for p in problems])
    is_long = typical > LONG_TOKENS
    assert is_long.sum() == LONG, is_long.sum()
    report = {
        "problems": problems,
        "expected": {
            "all": bootstrap(rates, draw),
            "long": bootstrap(rates[:, is_long], draw),
        },
    }
    text = '{"problems": [\n'
    text += ",\n".join(json.dumps(p) for p in problems)
    text += f'\n],\n"expected": {json.dumps(report["expected"], indent=1)}}}\n'
    pathlib.Path(__file__).with_name("bootstrap_sets.json").write_text(text)


if __name__ == "__main__":
    main()
