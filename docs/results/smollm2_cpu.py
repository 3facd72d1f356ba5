#!/usr/bin/env python3
"""Writes smollm2-cpu.{json,md,svg} beside itself from the folder that launch/smollm2.sh filled.

    docs/results/smollm2_cpu.py RUN_FOLDER --commit HASH --machine TEXT

Reads {bifocal,swa_learned_sink}/{config.toml,metrics.jsonl} and {evaluation,reach}-NAME.json of both
and of the untrained window there. The page's prose stays; its tables are written anew. Standard
library only.
"""

import argparse
import datetime
import json
import math
import pathlib
import tomllib

STUDENTS = ("bifocal", "swa_learned_sink")
EVALUATIONS = STUDENTS + ("untrained",)
COLOURS = {"bifocal": "#1b6ca8", "swa_learned_sink": "#c8553d", "untrained": "#777777", "teacher": "#222222"}


def read_run(folder, student):
    """The last metrics line of each (stage, step): a resumed run writes some again."""
    lines = {}
    for line in (folder / student / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        lines[(entry["stage"], entry["stage_step"])] = entry
    with open(folder / student / "config.toml", "rb") as file:
        config = tomllib.load(file)
    return list(lines.values()), config


def smooth(values, window):
    """Means over up to `window` values that end at each."""
    return [sum(values[max(0, i - window + 1): i + 1]) / len(values[max(0, i - window + 1): i + 1])
            for i in range(len(values))]


class Panel:
    """One set of axes, both logarithmic where asked, drawn into an SVG text."""

    def __init__(self, left, title, x_label, y_label, x_range, y_range, log_x):
        self.left, self.top, self.width, self.height = left, 46, 400, 260
        self.x_range, self.y_range, self.log_x = x_range, y_range, log_x
        self.parts = [
            f'<text x="{left}" y="24" class="title">{title}</text>',
            f'<text x="{left + 200}" y="{46 + 260 + 40}" text-anchor="middle">{x_label}</text>',
            f'<text transform="translate({left - 48},{46 + 130}) rotate(-90)" text-anchor="middle">{y_label}</text>',
            f'<rect x="{left}" y="46" width="400" height="260" class="frame"/>',
        ]

    def x(self, value):
        low, high = self.x_range
        share = (math.log(value / low) / math.log(high / low)) if self.log_x else (value - low) / (high - low)
        return self.left + self.width * share

    def y(self, value):
        low, high = self.y_range
        value = min(max(value, low), high)
        return self.top + self.height * (1 - math.log(value / low) / math.log(high / low))

    def ticks(self, x_ticks, y_ticks):
        for value, text in x_ticks:
            self.parts.append(f'<line x1="{self.x(value):.1f}" x2="{self.x(value):.1f}" y1="306" y2="311" class="frame"/>'
                              f'<text x="{self.x(value):.1f}" y="325" text-anchor="middle">{text}</text>')
        for value, text in y_ticks:
            self.parts.append(f'<line x1="{self.left}" x2="{self.left + 400}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}" class="grid"/>'
                              f'<text x="{self.left - 6}" y="{self.y(value) + 4:.1f}" text-anchor="end">{text}</text>')

    def line(self, points, colour, dashed=False):
        text = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')


def decades(low, high):
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [(10.0 ** k, f"1e{k}" if k < -2 else f"{10.0 ** k:g}") for k in range(first, last + 1)
            if low <= 10.0 ** k <= high]


def draw(path, curves, reaches):
    tokens = max(points[-1][0] for points in curves.values())
    values = [value for points in curves.values() for _, value in points]
    loss = Panel(70, "Distillation: KL to the teacher", "tokens of stage 2, thousands",
                 "KL, nats (mean of 10 steps)", (0, tokens), (min(values) / 1.3, max(values) * 1.3), False)
    step = max(1, round(tokens / 5 / 50)) * 50
    low, high = loss.y_range
    marks = [m * 10.0 ** k for k in range(-3, 3) for m in (1, 2, 5) if low <= m * 10.0 ** k <= high]
    loss.ticks([(value, f"{value}") for value in range(0, int(tokens) + 1, step)],
               [(value, f"{value:g}") for value in marks])
    for name, points in curves.items():
        loss.line(points, COLOURS[name])
    distances = [distance for points in reaches.values() for distance, _ in points]
    values = [value for points in reaches.values() for _, value in points if value > 0]
    reach = Panel(560, "Reach: KL when the token D back is replaced", "D, tokens", "KL, nats",
                  (min(distances), max(distances)), (max(min(values), 1e-9) / 1.5, max(values) * 1.5), True)
    reach.ticks([(d, str(d)) for d in sorted(set(distances)) if math.log2(d) % 2 == 0],
                decades(*reach.y_range))
    for name, points in reaches.items():
        reach.line([(d, max(value, 1e-12)) for d, value in points], COLOURS[name],
                   dashed=name in ("untrained", "teacher"))
    legend = []
    for index, name in enumerate(list(reaches)):
        dash = ' stroke-dasharray="5 4"' if name in ("untrained", "teacher") else ""
        label = "untrained window" if name == "untrained" else name
        legend.append(f'<line x1="{70 + 200 * index}" x2="{100 + 200 * index}" y1="372" y2="372" stroke="{COLOURS[name]}" stroke-width="2"{dash}/>'
                      f'<text x="{106 + 200 * index}" y="376">{label}</text>')
    style = ("text{font:12px sans-serif;fill:#222}.title{font-size:14px;font-weight:bold}"
             ".frame{fill:none;stroke:#222}.grid{stroke:#ddd}")
    path.write_text('<svg xmlns="http://www.w3.org/2000/svg" width="990" height="396" viewBox="0 0 990 396">'
                    f'<style>{style}</style><rect width="990" height="396" fill="#fff"/>'
                    + "".join(loss.parts + reach.parts + legend) + "</svg>\n")


def position_table(evaluations):
    lines = ["| position | tokens | " + " | ".join(f"{n} KL | {n} top-1" for n in EVALUATIONS) + " |",
             "|---|---|" + "---|" * (2 * len(EVALUATIONS))]
    rows = [entry["position"] for entry in evaluations["bifocal"]["by_position"]] + ["all"]
    for name in EVALUATIONS:
        counts = [[(entry["position"], entry["tokens"]) for entry in evaluations[other]["by_position"]]
                  for other in ("bifocal", name)]
        if counts[0] != counts[1]:
            raise SystemExit(f"{name} was measured on other rows than bifocal")
    for position in rows:
        cells = []
        for name in EVALUATIONS:
            report = evaluations[name]
            entry = report["all"] if position == "all" else next(
                e for e in report["by_position"] if e["position"] == position)
            cells += [f"{entry['kl']:.4f}", f"{100 * entry['top1_agreement']:.1f} %"]
            tokens = entry["tokens"]
        lines.append(f"| {position} | {tokens:,.0f} | " + " | ".join(cells) + " |")
    return lines


def reach_table(reaches):
    lines = ["| D | " + " | ".join(reaches) + " |", "|---|" + "---|" * len(reaches)]
    for index, (distance, _) in enumerate(reaches["teacher"]):
        lines.append(f"| {distance} | " + " | ".join(f"{reaches[n][index][1]:.2e}" for n in reaches) + " |")
    return lines


def stage_table(runs):
    lines = ["| student | stage | steps | tokens | first loss | last loss (mean of 10) | seconds |",
             "|---|---|---|---|---|---|---|"]
    for student, (metrics, config) in runs.items():
        per_step = config["data"]["rows_per_step"] * config["data"]["row_tokens"]
        for stage in ("align", "distill"):
            entries = [entry for entry in metrics if entry["stage"] == stage]
            if entries:
                last = [entry["loss"] for entry in entries[-10:]]
                lines.append(f"| {student} | {stage} | {len(entries)} | {len(entries) * per_step:,} | "
                             f"{entries[0]['loss']:.4f} | {sum(last) / len(last):.4f} | "
                             f"{sum(entry['seconds'] for entry in entries):,.0f} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--command", default="launch/smollm2.sh")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--notes", default="")
    arguments = parser.parse_args()
    folder = arguments.folder
    runs = {student: read_run(folder, student) for student in STUDENTS}
    evaluations = {name: json.loads((folder / f"evaluation-{name}.json").read_text()) for name in EVALUATIONS}
    measured = {name: json.loads((folder / f"reach-{name}.json").read_text())["reach"] for name in EVALUATIONS}
    curves = {}
    for student, (metrics, config) in runs.items():
        thousand = config["data"]["rows_per_step"] * config["data"]["row_tokens"] / 1000
        entries = [entry for entry in metrics if entry["stage"] == "distill"]
        curves[student] = [((i + 1) * thousand, value) for i, value in
                           enumerate(smooth([entry["kl"] for entry in entries], 10))]
    reaches = {name: [(point["distance"], point["student_kl"]) for point in measured[name]]
               for name in EVALUATIONS}
    reaches["teacher"] = [(point["distance"], point["teacher_kl"]) for point in measured["bifocal"]]

    rows = []
    for name in EVALUATIONS:
        report = evaluations[name]
        rows += [{"name": f"kl_{name}", "unit": "nats", "ours": report["all"]["kl"]},
                 {"name": f"top1_{name}", "unit": "share", "ours": report["all"]["top1_agreement"]},
                 {"name": f"perplexity_{name}", "unit": "1", "ours": report["all"]["student_perplexity"]}]
        rows += [{"name": f"kl_{name}_{entry['position']}", "unit": "nats", "ours": entry["kl"],
                  "samples": entry["tokens"]} for entry in report["by_position"]]
        rows += [{"name": f"reach_{name}_{distance}", "unit": "nats", "ours": value}
                 for distance, value in reaches[name]]
    rows += [{"name": f"reach_teacher_{distance}", "unit": "nats", "ours": value}
             for distance, value in reaches["teacher"]]
    out = pathlib.Path(__file__).resolve().parent
    result = {"what": "distillation of SmolLM2-135M-Instruct", "command": arguments.command,
              "commit": arguments.commit, "date": arguments.date, "machine": arguments.machine,
              "notes": arguments.notes,
              "configuration": {student: config for student, (_, config) in runs.items()},
              "loss_curves": {student: [[entry["stage"], entry["stage_step"], round(entry["loss"], 6)]
                                        for entry in metrics] for student, (metrics, _) in runs.items()},
              "rows": rows}
    (out / "smollm2-cpu.json").write_text(json.dumps(result) + "\n")
    draw(out / "smollm2-cpu.svg", curves, reaches)
    tables = {"stages": stage_table(runs), "positions": position_table(evaluations), "reach": reach_table(reaches)}
    page = out / "smollm2-cpu.md"
    text = page.read_text()
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, rest = text.split(begin, 1)
        text = head + begin + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1]
    page.write_text(text)
    print("\n".join(tables["stages"] + [""] + tables["positions"] + [""] + tables["reach"]))


if __name__ == "__main__":
    main()
