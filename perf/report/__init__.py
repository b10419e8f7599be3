"""The figures of docs/performance.md and their plots, made from perf/history.

history    lines of perf/history, checked, with file and line where one is wrong
workloads  what each workload is called and where it is listed
figures    which lines are shown: the latest of each, and those before it on the same machine
tables     figures as Markdown
svg        lines, dots and words as SVG
plots      the history of ratios as small panels
document   the part between the markers of docs/performance.md, and whether it is up to date
"""
