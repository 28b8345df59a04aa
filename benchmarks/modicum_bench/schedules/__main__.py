"""Play tasks, or write the table and the picture of what was played.

python -m modicum_bench.schedules play   [--only TASK ...]     (MODICUM_DATA set, in benchmarks/)
python -m modicum_bench.schedules report
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from modicum_bench.schedules.report import picture, table
from modicum_bench.schedules.search import search
from modicum_bench.schedules.tasks import TASKS, staged

OUT = Path(__file__).parents[2] / "schedules"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m modicum_bench.schedules", description=__doc__)
    parser.add_argument("what", choices=("play", "report"))
    parser.add_argument("--only", nargs="*", default=list(TASKS), choices=list(TASKS), help="tasks to play")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    results = given.out / "results.jsonl"
    if given.what == "play":
        given.out.mkdir(parents=True, exist_ok=True)
        done = (
            {json.loads(line)["task"] for line in results.read_text().splitlines()} if results.exists() else set()
        )
        for name in (n for n in given.only if n not in done):
            began = time.process_time()
            found = {**search(name), "seconds": round(time.process_time() - began)}
            staged.cache_clear()
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{name}: {found['tried']} settings tried, {found['seconds']} s", flush=True)
    played = [json.loads(line) for line in results.read_text().splitlines()]
    text = table(played)
    (given.out / "table.md").write_text(text, encoding="utf-8")
    picture(played, given.out / "gains.png")
    print(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
