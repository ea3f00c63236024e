"""Gates on the machine code of our kernels, without a GPU: `make test-gpu-compile`.

Every case of the kernel table, and the decode step of every model, is compiled for an H200 by the CUDA plugin of jax,
which needs no device. The gates check the machine code: registers and spills, the order and the width of loads,
barriers between a store to shared memory and a read, and between a read and a copy over the same memory, instructions
per weight, copies and temporary memory of a whole step. A burst of steps, with its loops, must be one CUDA graph. The
products of a prompt must be calls of cuBLASLt. `serve` must write its pages in place, by stores. All limits are in
code, and none in a file of results.

    sass.py       read machine code: instructions, loops
    kernel.py     facts of one kernel, from the files that Mosaic GPU dumps while it compiles
    program.py    facts of one compiled program: launches, copies, memory
    h200.py       the GPU: its description for the compiler, and the bandwidth that a kernel can reach
    checks.py     the gates
    compiler.py   compile for an H200 (needs the plugin)
    chunk.py      a chunk of a prompt: its products must be cuBLASLt's (needs the plugin)
    multi_device.py  decode steps on several devices (needs the plugin)
    serving.py    the programs of `serve`: how they write pages (needs the plugin)
    workers.py    a process for each compilation, within a time limit
    report.py     rows and tables
    __main__.py   compile, print tables, and fail if a gate is broken

The plugin and the Mosaic interpreter must not share a process: together they abort at random.
"""
