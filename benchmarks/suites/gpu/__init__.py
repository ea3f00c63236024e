"""Suites of measurements on a GPU: `llamaspec bench --suite gpu`, under nine minutes on an H200.

The suite `models` runs only its part of whole models. Two more suites take as long. The suite `kernels` holds options
that no published Llama uses to the exact numbers, 1,000 times each instead of 10,000; it also times the cases of the
table from the last, the clearing of rows of V, and attention to prompts. The suite `variants` times the options that no
published Llama uses.

    suite.py      the parts in their order, each in a process of its own, and the time that each may take
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

If a part dies, the others run on. The report keeps the rows that it found before, and says that it died.
"""
