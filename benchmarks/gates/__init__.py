"""Gates on the machine code of our kernels, without a GPU: `make test-gpu-compile`.

The CUDA plugin of jax compiles every case of the kernel table, and the decode step of every model, for an H200, without
a device. The gates check the machine code: registers and spills; the order and width of loads; barriers between a store
to shared memory and a read, and between a read and a copy over the same memory; instructions per weight; copies and
temporary memory of a whole step. A burst of steps, with its loops, must be one CUDA graph. The products of a prompt
must be calls of cuBLASLt. `serve` must write its pages in place, by stores. All limits are in the code, not in a file
of results.

        sass.py          reads machine code: instructions and loops
        kernel.py        facts of one kernel, from the files that Mosaic GPU dumps while it compiles
        program.py       facts of one compiled program: launches, copies, memory
        h200.py          the GPU: its description for the compiler, and the bandwidth that a kernel can reach
        checks.py        the gates for kernels and decode steps
        compiler.py      compiles for an H200 (needs the plugin)
        chunk.py         a chunk of a prompt: cuBLASLt must compute its products (needs the plugin)
        multi_device.py  decode steps on several devices (needs the plugin)
        serving.py       the programs of `serve`: how they write pages (needs the plugin)
        workers.py       runs each compilation in a process with a time limit
        report.py        rows and tables
        __main__.py      compiles, prints tables, and fails if a gate is broken

The plugin and the Mosaic interpreter must not share a process: together they abort at random.
"""
