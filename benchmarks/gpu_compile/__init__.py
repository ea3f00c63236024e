"""What the compiler makes of our kernels, seen on a machine without a GPU: `make test-gpu-compile`.

Every case of the kernel table, and the decode step of every model, is compiled for an H200 by the CUDA plugin of jax,
which needs no device for that, and what comes out is read and held against gates: registers and spills, the order and
the width of loads, threads that meet between a store to shared memory and a read, and between a read and a copy over
it, instructions per weight, copies and temporary memory of a whole step.

    sass.py       read machine code: instructions, loops
    kernel.py     facts of one kernel, from what Mosaic GPU writes down while it compiles
    program.py    facts of one compiled program: launches, copies, memory
    h200.py       the GPU: what the compiler is told of it, and what the facts mean for its memory
    gates.py      what must hold
    compiler.py   compile for an H200 (needs the plugin)
    workers.py    a process for each compilation, within a time limit
    report.py     what is shown and kept
    __main__.py   all of it: compile, print tables, fail where a gate does

The plugin and the Mosaic interpreter must not share a process: together they abort at random.
"""
