"""The report of a benchmark: one HTML file, and its charts as files for papers."""

from outrider.lab.report.write import write_charts, write_report

__all__ = ["write_charts", "write_report"]
