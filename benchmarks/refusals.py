"""Malformed SharePods, each applied with kubectl to a real API server: prints kubectl's answers.

    python benchmarks/refusals.py

Writes build/results/refusals.json: per case, whether it was refused with a message that names the field and the remedy.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time

from cluster.malformed import CASES
from cluster.malformed_case import Case
from harness.cluster import Cluster
from harness.installation import install
from results import Row, write


def answer_to(cluster: Cluster, case: Case) -> tuple[bool, str]:
    """Apply a case. Return whether kubectl refused it as expected, and the message without the parts that all share."""
    answer = cluster.kubectl("apply", "-f", "-", input=json.dumps(case.manifest()), check=False)
    message = (answer.stdout + answer.stderr).strip()
    good = answer.returncode != 0 and case.names in message and case.mend in message
    message = re.sub(r"(?s)^.*?(denied request: |is invalid: \n?(?:\* )?|strict decoding error: )", "", message)
    return good, re.sub(r"\n\* <nil>.*", "", message)


def main() -> int:
    """Run the benchmark. Return 0 if every case is refused as it should be."""
    rows: list[Row] = []
    with Cluster(scheduler=False) as cluster:
        install(cluster)
        begun = time.monotonic()
        for number, case in enumerate(CASES, start=1):
            good, message = answer_to(cluster, case)
            rows.append(Row(case.title, "refused_with_field_and_mend", "bool", int(good)))
            print(f"{number:3} {case.title}{'' if good else '   <-- NOT AS IT SHOULD BE'}")
            print(textwrap.fill(message, 116, initial_indent="      ", subsequent_indent="      "), flush=True)
        seconds = time.monotonic() - begun
    rows.append(Row("all", "cases", "count", len(CASES)))
    rows.append(Row("all", "refused_with_field_and_mend", "count", sum(row.value for row in rows[: len(CASES)])))
    rows.append(Row("all", "time_per_kubectl_apply", "ms", round(1000 * seconds / len(CASES), 1)))
    write("refusals", rows)
    return 0 if all(row.value for row in rows[: len(CASES)]) else 1


if __name__ == "__main__":
    sys.exit(main())
