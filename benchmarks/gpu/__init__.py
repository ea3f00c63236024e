"""What has to be seen on a GPU: `llamaspec bench --suite gpu`, under nine minutes on an H200.

The suite `models` is one part of it alone. Two more take as long, for what that leaves out. The suite `kernels` holds
kernels against the exact numbers where no published Llama would have them, with 1,000 repeats, not 10,000, and times
the cases of the table from the last, what clearing rows of V costs, and attention to prompts; the suite `variants`
times the cases that no published Llama has.

    suite.py      the parts in their order, each in a process of its own, and the time that each may take
    report.py     what is printed, kept and drawn
    __main__.py   one part: rows as lines of JSON

    right.py      kernels against exact numbers
    models.py     decoding and prompts of whole models
    kernels.py    each kernel beside XLA
    prompts.py    attention to a prompt beside cuDNN's
    launching.py  CUDA graphs and PDL, with and without
    starting.py   from the start to the first token
    tuning.py     which tiles are fastest

    varied.py     cases that no published Llama has
    scale.py      how large everything is: on a GPU, or in a dry run on a CPU
    drawing.py    random arguments
    clock.py      the time that is left

A part that dies takes nothing with it but itself: what it found until then is kept, and the report says that it died.
"""
