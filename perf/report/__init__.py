"""The table of docs/performance.md out of perf/history, and plots of the history on demand.

history  lines of perf/history, checked, with file and line where one is wrong; the newest of each row kept
table    the latest line of each variant of a row, as Markdown between the markers of the document
plots    the history of ratios as panels, drawn by matplotlib
"""
