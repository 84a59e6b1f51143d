"""The papers' shape at this scale, claim by claim, from the committed studies. No engine is started.

    python -m benchmarks.claims [--out data/studies/claims.csv]

Prints a row a claim: the number that decides with its 95 % interval, the rule that was written down before, and the verdict. The studies
come from benchmarks/remedies.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rar_lib.checkpoint import DATA_DIR
from rar_lib.runs.studies import Study, claims, claims_table

STUDIES = DATA_DIR / "studies"


def main() -> None:
    """Read, decide, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=STUDIES / "claims.csv")
    options = parser.parse_args()
    table = claims_table(claims(*(Study.read(STUDIES / name) for name in ("remedies", "staleness", "rates"))))
    table.to_csv(options.out, index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
