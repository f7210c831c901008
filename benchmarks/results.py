"""What a run found, as it is written to JSON, and the arithmetic of medians and ratios. Knows no workloads."""

from __future__ import annotations

import json
import statistics
from pathlib import Path


class Results:
    """The figures of a run.

    Parameters
    ----------
    data : dict
        ``tag``, ``date``, ``commit``, ``rounds``, ``seconds``, ``machine``, ``python``; ``contenders``, a dict by name
        with either ``versions`` or ``absent`` (a reason); and ``results``, a list with ``workload``, ``settings``,
        ``contender`` and ``figures`` (lists with a number for each round), or ``failed`` or ``not_applicable``
        (reasons).
    """

    def __init__(self, data: dict) -> None:
        self.data = data
        self.by_key = {(row["workload"], row["settings"], row["contender"]): row for row in data["results"]}

    @classmethod
    def load(cls, path: Path) -> Results:
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")

    @property
    def has_gil(self) -> bool:
        return self.data["python"]["gil"]

    @property
    def defers_counts(self) -> bool:
        """Whether threads can share an object without fighting for its reference count: free-threaded 3.14 can."""
        return not self.has_gil and tuple(map(int, self.data["python"]["version"].split(".")[:2])) >= (3, 14)

    @property
    def present(self) -> list[str]:
        return [name for name, about in self.data["contenders"].items() if "absent" not in about]

    def was_run(self, workload: str) -> bool:
        return any(key[0] == workload for key in self.by_key)

    def rounds(self, workload: str, settings: str, contender: str, figure: str) -> list[float]:
        """The figure in each round; none if there is none."""
        return self.by_key.get((workload, settings, contender), {}).get("figures", {}).get(figure, [])

    def median(self, workload: str, settings: str, contender: str, figure: str = "items/s") -> float | None:
        values = self.rounds(workload, settings, contender, figure)
        return statistics.median(values) if values else None

    def ratio(self, workload: str, over: tuple[str, str], under: tuple[str, str],
              figure: str = "items/s") -> float | None:
        """The median over all rounds of one figure divided by another of the same round.

        A machine that slows down does so for both, since they are neighbours in time. `over` and `under` are pairs of
        settings and contender.
        """
        pairs = list(zip(self.rounds(workload, *over, figure), self.rounds(workload, *under, figure), strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs else None

    def reason(self, workload: str, settings: str, contender: str) -> str:
        """Why there is no figure."""
        about = self.data["contenders"].get(contender)
        if about is None:
            return f"{contender} did not take part"
        if "absent" in about:
            return f"{contender} is absent"
        row = self.by_key.get((workload, settings, contender))
        if row is None:
            return "not run"
        if "failed" in row:
            return f"{contender} failed: {row['failed']}"
        return f"{contender} {row.get('not_applicable', 'gave no figure')}"
