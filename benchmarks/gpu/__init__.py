"""What has to be seen on a GPU: `llamaspec bench --suite gpu`, under nine minutes on an H200.

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

    scale.py      how large everything is: on a GPU, or in a dry run on a CPU
    drawing.py    random arguments
    clock.py      the time that is left

A part that dies takes nothing with it but itself: what it found until then is kept, and the report says that it died.
"""
