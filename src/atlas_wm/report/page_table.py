"""A table of the report: as HTML, as CSV with plain numbers, as LaTeX with booktabs."""

import csv
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "²": r"$^2$",
    "°": r"$^\circ$",
    "₂": r"$_2$",
    "ℓ": r"$\ell$",
    "ε": r"$\varepsilon$",
    "η": r"$\eta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "–": "--",
    "−": "$-$",
    "…": r"\ldots{}",
}


@dataclass(frozen=True)
class Table:
    name: str  # file name
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    data: Sequence[dict[str, Any]] = field(default_factory=list)  # for the CSV; default: the cells
    note: str = ""
    folded: bool = False  # collapsed in the page
    best: Container[tuple[int, str]] = ()  # (row, column) of bold cells

    def without_constant(self, *columns: str) -> "Table":
        """Move columns with the same value in every row into the note."""
        constants, header, rows = [], list(self.header), [list(row) for row in self.rows]
        for column in columns:
            index = header.index(column)
            if len({row[index] for row in rows}) == 1:
                constants.append(f"{column}: {rows[0][index]}.")
                header.pop(index)
                for row in rows:
                    row.pop(index)
        return replace(self, header=header, rows=rows, note=" ".join([*constants, self.note]))

    def write(self, folder: Path) -> None:
        records = list(self.data) or [dict(zip(self.header, row, strict=True)) for row in self.rows]
        with (folder / f"{self.name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for record in records for key in record)))
            writer.writeheader()
            writer.writerows(records)
        (folder / f"{self.name}.tex").write_text(self.latex)

    @property
    def latex(self) -> str:
        """Needs only \\usepackage{booktabs}."""
        lines = [" & ".join(latex(cell) for cell in row) + r" \\" for row in [self.header, *self.rows]]
        return "\n".join(
            [
                r"\begin{table}",
                rf"\caption{{{latex(self.title)}. {latex(self.note)}}}",
                rf"\label{{tab:{self.name}}}",
                rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
                r"\toprule",
                lines[0],
                r"\midrule",
                *lines[1:],
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
