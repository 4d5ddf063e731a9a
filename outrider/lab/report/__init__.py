"""The report of a benchmark: one HTML file, its charts as files for papers, and its tables as
Markdown."""

from outrider.lab.report.markdown import write_markdown
from outrider.lab.report.write import write_charts, write_report

__all__ = ["write_charts", "write_markdown", "write_report"]
