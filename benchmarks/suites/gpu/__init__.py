"""Suites of measurements on a GPU. `llamaspec bench --suite gpu` takes less than nine minutes on an H200.

The suite `models` runs only the part for whole models. The suites `kernels` and `variants` take as long as `gpu`.
`kernels` compares kernels with exact numbers for options that no published Llama uses. It repeats each case 1,000 times
(`gpu`: 10,000 times). It also times attention to prompts, attention that must clear hidden rows of V, and the cases of
the table, starting with the last case. `variants` times the options that no published Llama uses.

        suite.py      runs the parts in order, each in a new process, within its time limit
        report.py     tables, JSON and the chart
        __main__.py   runs one part and prints rows as lines of JSON

    right.py      kernels against exact numbers
    models.py     decoding and prompts of whole models
    kernels.py    each kernel compared with XLA
    prompts.py    attention to a prompt compared with cuDNN's
    launching.py  CUDA graphs and PDL (overlapping kernels), switched on and off
    starting.py   the time from the start of a process to the first token
    tuning.py     finds the fastest tiles

    varied.py     small cases with options that no published Llama uses
    scale.py      sizes and numbers of repeats, for a GPU and for a dry run on a CPU
    drawing.py    random arguments
    clock.py      the remaining time

If the process of a part dies, the other parts still run. The report has the rows so far, and says that the process
died.
"""
