"""Programs that time, compile or compare our code.

    suites/     measurements behind `llamaspec bench`, `profile` and `inspect --plan`
    gates/      checks of compiled code, which CI runs
    audits/     comparisons with other engines and kernels, and campaigns that take hours: run by hand
    common/     random models, timing, load, reports, and the table of kernel cases
    summary.py  writes a short summary of a run, with the machine and the versions, to results/

The wheel contains suites/ and common/. Imports run one way: common <- suites <- audits, and common <- gates.
"""
