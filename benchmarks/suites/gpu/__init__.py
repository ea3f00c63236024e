"""Suites of measurements on a GPU: `llamaspec bench --suite gpu`, under nine minutes on an H200.

The suite `models` runs only the part for whole models. Two more suites take as long as `gpu`. The suite `kernels`
compares kernels with exact numbers for options that no published Llama uses, with 1,000 repeats each instead of 10,000.
It also times the cases of the table, from the last to the first, the clearing of rows of V, and attention to prompts.
The suite `variants` times the options that no published Llama uses.

    suite.py      runs the parts in order, each in a new process, within its time limit
    report.py     tables, JSON and the chart
    __main__.py   one part: rows as lines of JSON

    right.py      kernels against exact numbers
    models.py     decoding and prompts of whole models
    kernels.py    each kernel compared with XLA
    prompts.py    attention to a prompt compared with cuDNN's
    launching.py  CUDA graphs and PDL, with and without
    starting.py   from the start to the first token
    tuning.py     the fastest tiles

    varied.py     small cases with options that no published Llama uses
    scale.py      sizes and repeats, on a GPU or in a dry run on a CPU
    drawing.py    random arguments
    clock.py      the remaining time

If a part dies, the other parts still run. The report has the rows of the dead part so far, and says that it died.
"""
